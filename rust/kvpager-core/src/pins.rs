//! Pins: a caller holds a cached prefix (a system prompt, a shared document) so that it is not evicted.
//!
//! A pin counts as a holder of each of its blocks: ref ≥ 1, live. Invariant: `count_of` a block is the number of
//! pins that name it, absent for none; pins are few, so both are maps. The quota bounds the distinct pinned blocks.
//!
//! Costs: O(tokens compared + blocks) to pin, O(blocks) to unpin.

use rustc_hash::FxHashMap;

use crate::{BlockId, BlockManager, Error, Prompt, Result};

/// Names a pin; never used again.
pub type PinId = u64;

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pins {
    pub(crate) blocks_of: FxHashMap<PinId, Vec<BlockId>>,
    pub(crate) count_of: FxHashMap<BlockId, u32>,
    next_id: PinId,
}

impl Pins {
    pub(crate) fn on(&self, block: BlockId) -> u32 {
        self.count_of.get(&block).copied().unwrap_or(0)
    }
}

impl BlockManager {
    /// Holds the cached full blocks of a prompt until [`unpin`](Self::unpin); they may be none. Returns the pin's id.
    /// O(tokens compared + blocks).
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad token id or item; [`Error::State`] if it would exceed the quota.
    ///
    /// ```
    /// # use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.admit(1, &Prompt::new(&[1, 2, 3, 4]), &AdmitOptions::default(), &mut Vec::new())?;
    /// manager.commit(1, 4)?;
    /// let pin = manager.pin_prefix(&Prompt::new(&[1, 2, 3, 4]))?;
    /// manager.release_sequence(1)?;
    /// assert_eq!((manager.stats().live, manager.stats().pinned), (2, 2));
    /// manager.unpin(pin)?;
    /// assert_eq!(manager.stats().cached, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn pin_prefix(&mut self, prompt: &Prompt<'_>) -> Result<PinId> {
        self.check_and_find(prompt, prompt.token_ids.len())?;
        let blocks = &self.matching.blocks;
        let num_new = blocks.iter().filter(|&&block| self.pins.on(block) == 0).count();
        let (num_pinned, quota) = (self.pins.count_of.len(), self.config.max_pinned_blocks());
        if num_pinned + num_new > quota as usize {
            let reason = format!(
                "pinning {num_new} more blocks exceeds `max_pinned_blocks`: {num_pinned} of {quota} are pinned"
            );
            return Err(Error::State { reason });
        }
        for &block in blocks {
            self.pool.attach(block);
            *self.pins.count_of.entry(block).or_default() += 1;
        }
        let id = self.pins.next_id;
        self.pins.next_id += 1;
        self.pins.blocks_of.insert(id, blocks.clone());
        Ok(id)
    }

    /// Lets go of a pin's blocks, last first. O(blocks).
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such pin, or no more.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config, Prompt};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// let pin = manager.pin_prefix(&Prompt::new(&[1, 2]))?; // nothing is cached: it holds nothing
    /// manager.unpin(pin)?;
    /// assert!(manager.unpin(pin).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        let Some(blocks) = self.pins.blocks_of.remove(&pin) else {
            return Err(Error::argument("pin", "the id of a pin that is held", pin));
        };
        for &block in blocks.iter().rev() {
            if let Some(num_pins) = self.pins.count_of.get_mut(&block) {
                *num_pins -= 1;
                if *num_pins == 0 {
                    self.pins.count_of.remove(&block);
                }
            }
            self.pool.drop_ref(block);
        }
        Ok(())
    }
}
