//! The step of a batch: everything is checked and settled, the rows advance, the set whose turn it is is written. And
//! the commit of what a step appended. Both are the batched calls by row, so no id is looked up.

use super::batches::BatchMut;
use crate::batch::{BatchBuffers, BatchStep};
use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::prompt::{check_num_ids, check_token_ids};

impl BatchMut<'_> {
    /// Appends one token, or `counts[row]` (0, a chunk of a prompt, drafts), to every row, with their ids row after row
    /// if they are known, and brings the set whose turn it is up to date: tables, lengths, starts, slots, and in
    /// `changed` the table entries that differ from the previous step, rows ascending, then columns; of rows that came
    /// or moved, all entries; −1 for what is gone. Rows past the last read −1, length 0, slot −1. The other set is only
    /// read.
    /// O(rows + tokens + entries changed), nothing allocated.
    ///
    /// # Errors
    /// No row has advanced and nothing was written: [`Error::Argument`] if `counts` is not one per row, if
    /// `slot_mapping` has no room for the tokens, if `token_ids` is not one per token or one differs from a prompt's,
    /// or if the sets are not those of the batch; [`Error::SequenceTooLong`] for the first row whose table would be
    /// wider than `block_tables`, or that has a length it may not have;
    /// [`Error::OutOfBlocks`] with the first row that lacks one; [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.append_tokens(7, 3, None, &mut Vec::new())?;
    /// manager.batch(batch)?.add(7)?;
    ///
    /// let step = manager.batch(batch)?.step(&mut memory.each_mut().map(BatchMemory::lend), Some(&[2]), None)?;
    /// assert_eq!((step.buffer_set, step.num_tokens, step.num_changes), (0, 2, 2));
    /// assert_eq!(memory[0].block_tables, [0, 1, -1, -1, -1, -1]);
    /// assert_eq!(memory[0].seq_lens, [5, 0]);
    /// assert_eq!(memory[0].slot_mapping, [3, 4, -1, -1]);
    /// assert_eq!(memory[0].changed[..6], [0, 0, 0, 0, 1, 1]); // (row, column, block)
    ///
    /// let step = manager.batch(batch)?.step(&mut memory.each_mut().map(BatchMemory::lend), None, None)?;
    /// assert_eq!((step.buffer_set, step.num_changes), (1, 0));
    /// assert_eq!(memory[1].block_tables, [0, 1, -1, -1, -1, -1]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn step(
        &mut self,
        sets: &mut [BatchBuffers<'_>; 2],
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<BatchStep> {
        let rows = self.manager.batches.get(self.id)?;
        rows.check_sets(sets)?;
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        let num_tokens = rows.count_tokens(counts)?;
        if let Some(token_ids) = token_ids {
            check_num_ids(num_tokens, "one for each new token", token_ids)?;
        }
        rows.check_step_fits(&self.manager.sequences, counts, self.manager.config.block_size())?;

        let rows = self.manager.batches.get_mut(self.id)?;
        let mut slots = rows.take_slots();
        rows.lend_rows(&mut self.manager.scratch.places);
        let appended = self.manager.append_found(counts, token_ids, &mut slots);
        let rows = self.manager.batches.get_mut(self.id)?;
        rows.lend_rows(&mut self.manager.scratch.places);
        rows.give_back_slots(slots);
        appended?;
        Ok(rows.show(&mut self.manager.sequences, sets, counts))
    }

    /// Says that the keys and values of each row's first `ns[row]` tokens (all of them, if `None`) are written: as
    /// [`commit_batch`](crate::BlockManager::commit_batch), by row. O(rows + ids + blocks that became full).
    ///
    /// # Errors
    /// [`Error::Argument`] if `ns` is not one per row; those of [`commit_batch`](crate::BlockManager::commit_batch);
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.batch(batch)?.add(7)?;
    /// manager.batch(batch)?.step(&mut memory.each_mut().map(BatchMemory::lend), Some(&[3]), None)?; // two drafts
    /// manager.batch(batch)?.commit(Some(&[2]), Some(&[50, 51]))?; // one of them was right
    /// manager.truncate_sequence(7, 2)?;
    /// assert_eq!(manager.num_computed_tokens(7)?, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit(&mut self, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<()> {
        let rows = self.manager.batches.get_mut(self.id)?;
        if ns.is_none() && token_ids.is_none() && !self.manager.config.prefix_caching() {
            return Ok(()); // all tokens count as computed
        }
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        if let Some(ns) = ns.filter(|ns| ns.len() != rows.rows().len()) {
            let wanted = format!("one length for each of {} rows", rows.rows().len());
            return Err(Error::argument("ns", wanted, format!("{} lengths", ns.len())));
        }
        rows.lend_rows(&mut self.manager.scratch.places);
        let committed = self.manager.commit_found(ns, token_ids);
        let rows = self.manager.batches.get_mut(self.id)?;
        rows.lend_rows(&mut self.manager.scratch.places);
        committed
    }
}
