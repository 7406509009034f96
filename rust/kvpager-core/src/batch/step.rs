//! The step of a batch: everything is checked and settled, the rows advance, the set whose turn it is is written. And the
//! commit of what a step appended. Both are the batched calls by row, so no id is looked up.

use super::{Batch, BatchBuffers, BatchId, BatchStep};
use crate::admission::check_token_ids;
use crate::demand::check_num_ids;
use crate::{BlockManager, Error, Result, TokenId};

impl Batch {
    /// Tokens that a step appends.
    fn count_tokens(&self, counts: Option<&[u64]>) -> Result<u64> {
        let num_rows = self.rows.len();
        let num_tokens = match counts {
            None => num_rows as u64,
            Some(counts) if counts.len() == num_rows => {
                counts.iter().fold(0, |sum: u64, &count| sum.saturating_add(count))
            }
            Some(counts) => {
                let got = format!("{} counts", counts.len());
                return Err(Error::argument("counts", format!("one count for each of {num_rows} rows"), got));
            }
        };
        let room = self.shape.max_tokens;
        if num_tokens > room as u64 {
            let wanted = format!("at most {room} tokens, the room in `slot_mapping`");
            return Err(Error::argument("counts", wanted, format!("{num_tokens} tokens")));
        }
        Ok(num_tokens)
    }
}

impl BlockManager {
    /// Appends one token, or `counts[row]` (0, a chunk of a prompt, drafts), to every row, with their ids row after row
    /// if they are known, and brings the set whose
    /// turn it is up to date: tables, lengths, starts, slots, and in `changed` the table entries that differ from the
    /// previous step, rows ascending, then columns; of rows that came or moved, all entries; −1 for what is gone.
    /// Rows past the last read −1, length 0, slot −1. The other set is only read.
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
    /// manager.append_tokens(7, 3, &mut Vec::new())?;
    /// manager.add_to_batch(batch, 7)?;
    ///
    /// let step = manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), Some(&[2]), None)?;
    /// assert_eq!((step.buffer_set, step.num_tokens, step.num_changes), (0, 2, 2));
    /// assert_eq!(memory[0].block_tables, [0, 1, -1, -1, -1, -1]);
    /// assert_eq!(memory[0].seq_lens, [5, 0]);
    /// assert_eq!(memory[0].slot_mapping, [3, 4, -1, -1]);
    /// assert_eq!(memory[0].changed[..6], [0, 0, 0, 0, 1, 1]); // (row, column, block)
    ///
    /// let step = manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), None, None)?;
    /// assert_eq!((step.buffer_set, step.num_changes), (1, 0));
    /// assert_eq!(memory[1].block_tables, [0, 1, -1, -1, -1, -1]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn step_batch(
        &mut self,
        batch: BatchId,
        sets: &mut [BatchBuffers<'_>; 2],
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<BatchStep> {
        let at = self.batches.find(batch)?;
        let batch = &self.batches.all[at];
        batch.shape.check(sets)?;
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        let num_tokens = batch.count_tokens(counts)?;
        if let Some(token_ids) = token_ids {
            check_num_ids(num_tokens, token_ids)?;
        }
        if counts.is_none() && token_ids.is_none() {
            return self.step_one_each(at, sets);
        }
        self.check_steps_fit(batch, counts)?;

        let batch = &mut self.batches.all[at];
        let mut slots = std::mem::take(&mut batch.slots);
        slots.clear();
        std::mem::swap(&mut batch.rows, &mut self.scratch.rows);
        let appended = self.append_found(counts, token_ids, &mut slots);
        let batch = &mut self.batches.all[at];
        std::mem::swap(&mut batch.rows, &mut self.scratch.rows);
        batch.slots = slots;
        appended?;
        Ok(batch.show(&mut self.sequences, sets, counts))
    }

    /// One token for every row, without its id: what most steps of an engine are.
    fn step_one_each(&mut self, at: usize, sets: &mut [BatchBuffers<'_>; 2]) -> Result<BatchStep> {
        self.check_one_each_fits(at)?;
        std::mem::swap(&mut self.batches.all[at].rows, &mut self.scratch.rows);
        let settled = self.settle_found(None, None);
        if settled.is_ok() {
            self.note_parents(None);
        }
        let Self { config, pool, copies, sequences, scratch, batches, .. } = self;
        let batch = &mut batches.all[at];
        std::mem::swap(&mut batch.rows, &mut scratch.rows);
        settled?;
        let step = batch.append_and_show((config, pool, copies), sequences, sets);
        pool.copy_first.clear();
        batch.room.0 = batch.room.0.saturating_sub(1);
        Ok(step)
    }

    /// Says that the keys and values of each row's first `ns[row]` tokens (all of them, if `None`) are written: as
    /// [`commit_batch`](Self::commit_batch), by row. O(rows + ids + blocks that became full).
    ///
    /// # Errors
    /// [`Error::Argument`] if `ns` is not one per row; those of [`commit_batch`](Self::commit_batch);
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.add_to_batch(batch, 7)?;
    /// manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), Some(&[3]), None)?; // two drafts
    /// manager.commit_rows(batch, Some(&[2]), Some(&[50, 51]))?; // one of them was right
    /// manager.truncate_sequence(7, 2)?;
    /// assert_eq!(manager.num_computed_tokens(7)?, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit_rows(
        &mut self,
        batch: BatchId,
        ns: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<()> {
        let at = self.batches.find(batch)?;
        if ns.is_none() && token_ids.is_none() && !self.config.prefix_caching() {
            return Ok(()); // all tokens count as computed
        }
        std::mem::swap(&mut self.batches.all[at].rows, &mut self.scratch.rows);
        let committed =
            if self.commit_step(ns, token_ids) { Ok(()) } else { self.commit_any(at, ns, token_ids) };
        std::mem::swap(&mut self.batches.all[at].rows, &mut self.scratch.rows);
        committed
    }

    /// The general way of [`commit_rows`](Self::commit_rows), whose rows stand in `scratch.rows`.
    fn commit_any(&mut self, at: usize, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<()> {
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        let rows = &self.scratch.rows;
        if let Some(ns) = ns {
            check_num_lengths(rows.len(), ns)?;
            return self.commit_found(ns, token_ids);
        }
        let mut lengths = std::mem::take(&mut self.batches.all[at].lengths);
        lengths.clear();
        lengths.extend(rows.iter().map(|&row| self.sequences.rows[row as usize].length));
        let committed = self.commit_found(&lengths, token_ids);
        self.batches.all[at].lengths = lengths;
        committed
    }

    /// Whether every row has room for one token more, which it will get if nothing else refuses it.
    fn check_one_each_fits(&mut self, at: usize) -> Result<()> {
        let (batch, sequences) = (&mut self.batches.all[at], &self.sequences);
        if batch.room.0 == 0 || batch.room.1 != sequences.num_appends {
            let lengths = batch.rows.iter().map(|&row| sequences.rows[row as usize].length);
            let longest = batch.longest(self.config.block_size());
            batch.room = (longest.saturating_sub(lengths.max().unwrap_or(0)), sequences.num_appends);
        }
        if batch.room.0 > 0 || batch.rows.is_empty() {
            return Ok(());
        }
        self.check_steps_fit(&self.batches.all[at], None)
    }

    /// Finds the first row that would outgrow the buffers.
    fn check_steps_fit(&self, batch: &Batch, counts: Option<&[u64]>) -> Result<()> {
        let longest = batch.longest(self.config.block_size());
        let grown = |at: usize, row: u32| {
            let length = self.sequences.rows[row as usize].length;
            length.saturating_add(counts.map_or(1, |counts| counts[at]))
        };
        for (at, &row) in batch.rows.iter().enumerate() {
            let num_tokens = grown(at, row);
            if num_tokens > longest {
                let id = self.sequences.ids[row as usize];
                return batch.check_fits(self.config.block_size(), id, num_tokens);
            }
        }
        Ok(())
    }
}

fn check_num_lengths(num_rows: usize, lengths: &[u64]) -> Result<()> {
    if lengths.len() == num_rows {
        return Ok(());
    }
    let wanted = format!("one length for each of {num_rows} rows");
    Err(Error::argument("ns", wanted, format!("{} lengths", lengths.len())))
}
