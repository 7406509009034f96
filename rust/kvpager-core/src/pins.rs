//! Pins: which cached prefixes callers hold, and which blocks that makes.
//!
//! Invariant: `count_of` a block is the number of pins that name it, absent for none; pins are few, so both are maps.
//!
//! Costs: O(blocks of the pin).

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use crate::ids::BlockId;
use crate::pool::Recount;

/// Names a pin; never used again.
pub type PinId = u64;

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pins {
    blocks_of: FxHashMap<PinId, Vec<BlockId>>,
    count_of: FxHashMap<BlockId, u32>,
    next_id: PinId,
}

impl Pins {
    /// Pins on a block.
    pub(crate) fn on(&self, block: BlockId) -> u32 {
        self.count_of.get(&block).copied().unwrap_or(0)
    }

    /// Pinned blocks, each once.
    pub(crate) fn num_blocks(&self) -> usize {
        self.count_of.len()
    }

    /// The pinned blocks, each once, in no particular order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.count_of.keys().copied()
    }

    /// A new pin on these blocks.
    pub(crate) fn add(&mut self, blocks: &[BlockId]) -> PinId {
        for &block in blocks {
            *self.count_of.entry(block).or_default() += 1;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.blocks_of.insert(id, blocks.to_vec());
        id
    }

    /// Forgets a pin, if there is one; its blocks.
    pub(crate) fn remove(&mut self, pin: PinId) -> Option<Vec<BlockId>> {
        let blocks = self.blocks_of.remove(&pin)?;
        for block in &blocks {
            if let Some(num_pins) = self.count_of.get_mut(block) {
                *num_pins -= 1;
                if *num_pins == 0 {
                    self.count_of.remove(block);
                }
            }
        }
        Some(blocks)
    }

    /// Notes in `recount` who holds which block, and adds a line for each count that is wrong.
    pub(crate) fn audit(&self, quota: u32, recount: &mut Recount, faults: &mut Vec<String>) {
        let mut found: HashMap<BlockId, u32> = HashMap::new();
        for &block in self.blocks_of.values().flatten() {
            *found.entry(block).or_default() += 1;
            if !recount.hold(block) {
                faults.push(format!("pins: block {block} was never handed out"));
            }
        }
        for (&block, &num_pins) in &found {
            if self.on(block) != num_pins {
                let counted = self.on(block);
                faults.push(format!("block {block}: {counted} pins of callers counted, {num_pins} hold it"));
            }
        }
        let counted = self.num_blocks();
        if counted != found.len() || counted > quota as usize {
            faults.push(format!("counter `pinned`: {counted} of {quota}, but {} are", found.len()));
        }
    }
}

/// What [`Pins::plant`] breaks.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum PlantedFault {
    Count(BlockId, u32),
    NoCounts,
    NoPin(PinId),
}

#[cfg(test)]
impl Pins {
    /// Breaks something, for the tests of the audit.
    pub(crate) fn plant(&mut self, fault: PlantedFault) {
        match fault {
            PlantedFault::Count(block, count) => _ = self.count_of.insert(block, count),
            PlantedFault::NoCounts => self.count_of.clear(),
            PlantedFault::NoPin(pin) => _ = self.blocks_of.remove(&pin),
        }
    }
}
