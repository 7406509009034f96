//! A writer gives the next positions of a sequence their slots, and blocks where they need some.
//!
//! It is the one place where a block is opened or copied for a write. What it takes has been settled before: nothing
//! here can refuse.
//!
//! Costs: O(tokens); no look at the pool while the tail has open positions.

use crate::config::Config;
use crate::copies::CopyLedger;
use crate::ids::Slot;
use crate::pool::Pool;
use crate::sequences::{Place, SequenceTable};

/// What an append changes.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    pub(crate) config: &'a Config,
    pub(crate) pool: &'a mut Pool,
    pub(crate) copies: &'a mut CopyLedger,
    pub(crate) sequences: &'a mut SequenceTable,
}

impl Writer<'_> {
    /// Appends a settled run and adds its slots to `slots`.
    #[inline]
    pub(crate) fn append(&mut self, place: Place, num_tokens: u64, slots: &mut Vec<Slot>) {
        if num_tokens == 1 {
            slots.push(self.append_one(place));
            return;
        }
        let mut remaining = num_tokens;
        while remaining > 0 {
            if self.sequences.counters(place).open() == 0 {
                self.open_tail(place);
            }
            let counters = self.sequences.counters_mut(place);
            let taken = remaining.min(counters.open());
            let first = counters.advance(taken);
            slots.extend(first..first + taken as Slot);
            remaining -= taken;
        }
    }

    /// Appends one settled token, what most rows of a step are; its slot.
    #[inline]
    pub(crate) fn append_one(&mut self, place: Place) -> Slot {
        let counters = self.sequences.counters_mut(place);
        if counters.open() > 0 {
            return counters.advance(1);
        }
        self.open_tail(place);
        self.sequences.counters_mut(place).advance(1)
    }

    /// Makes the position at the length and the rest of its block writable by this sequence alone: opens a block, or
    /// leaves a shared tail, or one with children in the index, for a copy, or finds that the tail is its own, which
    /// then leaves the index.
    #[inline(never)]
    fn open_tail(&mut self, place: Place) {
        let Self { config, pool, copies, sequences } = self;
        let (block_size, length) = (config.block_size(), sequences.counters(place).length());
        let table = sequences.table(place);
        // Mostly the tail is full: no division.
        if table.len() as u64 * block_size == length {
            let block = pool.take();
            sequences.push_block(place, block);
            sequences.counters_mut(place).open_run(block_size, config.slot(block, 0));
            return;
        }
        let (last, offset) = (table.len() - 1, length % block_size);
        let mut block = table[last];
        if pool.must_copy(block) {
            let copy = pool.take();
            // The old entry is replaced: the copy is not a further block of the sequence.
            sequences.replace_block(place, last, copy);
            copies.owe(pool, block, copy);
            pool.drop_ref(block);
            block = copy;
        } else if pool.is_indexed(block) {
            pool.unindex(block);
        }
        sequences.counters_mut(place).open_run(block_size - offset, config.slot(block, offset));
    }

    /// Blocks that appending `num_tokens` to one sequence takes, exactly.
    pub(crate) fn demand(&self, place: Place, num_tokens: u64) -> u64 {
        let sequence = self.sequences.view(place);
        let (length, open) = (sequence.length(), sequence.open());
        if num_tokens <= open {
            return 0;
        }
        let opened =
            self.config.blocks_for(length.saturating_add(num_tokens)) - self.config.blocks_for(length);
        let copied = open == 0
            && !length.is_multiple_of(self.config.block_size())
            && sequence.table.last().is_some_and(|&tail| self.pool.must_copy(tail));
        opened.saturating_add(u64::from(copied))
    }
}
