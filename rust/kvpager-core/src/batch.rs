//! `DecodeBatch`, the hot path: the metadata of a batch that persists from step to step.
//!
//! A batch is a list of *rows*, each a sequence, shown in two caller-owned *buffer sets* that take turns: while a
//! device still reads the set of step `n`, step `n + 1` is prepared in the other. A step appends to every row, brings the
//! set whose turn it is up to date by writing what it has missed, and lists the table entries that differ from the
//! previous step, which used the other set.
//!
//! What changed is known without looking: a block table keeps the lowest column that was changed since the batch last
//! showed it (`BlockTable` in `sequence`, whoever changes it). So a row without a new block costs its length and slot.
//!
//! Invariants, audited:
//! * a sequence is a row of one batch at most, and `places` says of which;
//! * below its mark, and everywhere without one, a row's table is what the previous step showed;
//! * a set shows what its last turn wrote; what the step since then changed stands in `missed`.
//!
//! Costs: a step O(rows + tokens + entries changed), nothing allocated; coming, going and looking O(1).
//!
//! Here: the parts of a batch, and how it and its rows come and go. `step` appends and commits, `show` writes the sets,
//! `audit` recounts.

mod audit;
mod buffers;
mod show;
mod step;

pub use buffers::{BatchBuffers, BatchMemory, BatchShape};

use crate::sequence::SequenceTable;
use crate::{BlockManager, Error, Result, SequenceId, Slot};

/// The name of a batch within its manager. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchId(u32);

/// What a step wrote, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchStep {
    /// The set that holds the step: 0 or 1.
    pub buffer_set: usize,
    /// Rows in use: `0..num_rows`.
    pub num_rows: usize,
    /// New tokens of all rows: entries of `slot_mapping` in use.
    pub num_tokens: usize,
    /// Table entries that differ from the previous step; `changed` lists them if it has the room.
    pub num_changes: usize,
    /// `changed` does not hold them all, or what the device shows is unknown: upload the whole table.
    pub upload_table: bool,
}

/// What one set shows.
#[derive(Clone, Debug)]
struct Shown {
    /// Of each row: table entries in use; −1 behind them.
    num_blocks: Vec<u32>,
    /// Rows in use; empty tables and length 0 behind them.
    num_rows: usize,
    /// Slots in use; −1 behind them.
    num_tokens: usize,
    /// `query_start_loc` counts this many rows of one token each; `None` if it holds anything else.
    one_each: Option<usize>,
}

/// One batch; see the module header.
#[derive(Clone, Debug)]
struct Batch {
    id: BatchId,
    shape: BatchShape,
    /// Of each row: where its sequence stands in the table of sequences.
    rows: Vec<u32>,
    /// Of each row: it came or moved since the previous step, which showed something else there.
    is_new: Vec<bool>,
    /// The set that the next step writes.
    turn: usize,
    shown: [Shown; 2],
    /// Of each row: table entries that the previous step showed.
    previous: Vec<u32>,
    previous_rows: usize,
    /// Rows that the previous step changed in its set, each from a column on: what the other set has missed.
    missed: Vec<(u32, u32)>,
    /// Memory for the next `missed`.
    missed_next: Vec<(u32, u32)>,
    /// Nothing is known about what the device shows.
    is_invalid: bool,
    /// Steps of one token each that every row has room for, and [`SequenceTable::num_appends`] while that is known.
    room: (u64, u64),
    /// Memory for the slots of a step.
    slots: Vec<Slot>,
    /// Memory for the lengths of a commit.
    lengths: Vec<u64>,
}

/// Where a sequence is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    batch: BatchId,
    row: u32,
}

/// The batches of one manager.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batches {
    all: Vec<Batch>,
    /// Of each row of the table of sequences.
    places: Vec<Option<Place>>,
    next_id: u32,
}

impl Batches {
    fn find(&self, batch: BatchId) -> Result<usize> {
        let found = self.all.iter().position(|candidate| candidate.id == batch);
        found
            .ok_or_else(|| Error::State { reason: "no such batch: dropped, or another manager's".to_owned() })
    }

    fn place(&self, sequence_row: u32) -> Option<Place> {
        self.places.get(sequence_row as usize).copied().flatten()
    }

    /// A sequence that a batch shows can't be released.
    #[inline]
    pub(crate) fn check_free(&self, sequence_row: u32, sequence_id: SequenceId) -> Result<()> {
        let Some(place) = self.place(sequence_row) else { return Ok(()) };
        let row = place.row;
        Err(Error::State {
            reason: format!("sequence {sequence_id} is row {row} of a batch, remove it first"),
        })
    }
}

impl Batch {
    fn new(id: BatchId, shape: BatchShape) -> Self {
        let everything = Shown {
            num_blocks: vec![shape.max_blocks as u32; shape.max_rows],
            num_rows: shape.max_rows,
            num_tokens: shape.max_tokens,
            one_each: None,
        };
        Self {
            id,
            shape,
            rows: Vec::with_capacity(shape.max_rows),
            is_new: Vec::with_capacity(shape.max_rows),
            turn: 0,
            shown: [everything.clone(), everything],
            previous: vec![0; shape.max_rows],
            previous_rows: 0,
            missed: Vec::with_capacity(shape.max_rows),
            missed_next: Vec::with_capacity(shape.max_rows),
            is_invalid: false,
            room: (0, 0),
            slots: Vec::with_capacity(shape.max_tokens),
            lengths: Vec::with_capacity(shape.max_rows),
        }
    }

    /// Refuses a sequence of so many tokens where the buffers have no room for it.
    #[inline]
    fn check_fits(&self, block_size: u64, sequence_id: SequenceId, num_tokens: u64) -> Result<()> {
        if num_tokens <= self.longest(block_size) {
            return Ok(());
        }
        let (needed, max_blocks) = (num_tokens.div_ceil(block_size), self.shape.max_blocks);
        let reason = if needed > max_blocks as u64 {
            format!(
                "sequence {sequence_id}: {num_tokens} tokens need {needed} blocks of {block_size} tokens, \
                 `block_tables` has {max_blocks} columns"
            )
        } else {
            format!("sequence {sequence_id}: {num_tokens} tokens don't fit the int32 `seq_lens`")
        };
        Err(Error::SequenceTooLong { reason })
    }

    /// Tokens that a row has room for.
    #[inline]
    fn longest(&self, block_size: u64) -> u64 {
        block_size.saturating_mul(self.shape.max_blocks as u64).min(i32::MAX as u64)
    }

    /// The row shows something else than at the previous step: all of its table is new.
    fn renew(&mut self, row: usize, sequences: &mut SequenceTable) {
        self.is_new[row] = true;
        sequences.rows[self.rows[row] as usize].mark(0);
    }
}

impl BlockManager {
    /// Makes a batch without rows over two sets of buffers, and writes "no rows" into both. O(sets).
    ///
    /// The same two sets, in the same order, are lent again to each [`step`](Self::step_batch).
    ///
    /// # Errors
    /// [`Error::Argument`] if a buffer has another size than `shape` says, or a size does not fit an int32.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// assert_eq!(memory[1].block_tables, [-1; 6]);
    /// assert_eq!(manager.batch_sequence_ids(batch)?, []);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn create_batch(&mut self, shape: BatchShape, sets: &mut [BatchBuffers<'_>; 2]) -> Result<BatchId> {
        shape.check_limits()?;
        shape.check(sets)?;
        let id = BatchId(self.batches.next_id);
        self.batches.next_id += 1;
        let mut batch = Batch::new(id, shape);
        batch.show_nothing(sets);
        self.batches.all.push(batch);
        Ok(id)
    }

    /// Forgets a batch; its sequences are rows of none from then on. O(rows).
    ///
    /// # Errors
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.add_to_batch(batch, 7)?;
    /// manager.drop_batch(batch)?;
    /// manager.release_sequence(7)?;
    /// assert!(manager.drop_batch(batch).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn drop_batch(&mut self, batch: BatchId) -> Result<()> {
        let at = self.batches.find(batch)?;
        let dropped = self.batches.all.swap_remove(at);
        for sequence_row in dropped.rows {
            self.batches.places[sequence_row as usize] = None;
        }
        Ok(())
    }

    /// Makes a sequence the last row of a batch; returns which row that is. The next step shows it. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::State`] if it is a row of a batch already, the batch is full, or there is
    /// no such batch; [`Error::SequenceTooLong`] if the buffers have no room for its table.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// assert_eq!(manager.add_to_batch(batch, 7)?, 0);
    /// let refused = manager.add_to_batch(batch, 7).unwrap_err();
    /// assert_eq!(refused.to_string(), "sequence 7 is row 0 of a batch already");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn add_to_batch(&mut self, batch: BatchId, sequence_id: SequenceId) -> Result<usize> {
        let at = self.batches.find(batch)?;
        let sequence_row = self.sequences.find(sequence_id)?;
        let Batches { all, places, .. } = &mut self.batches;
        let batch = &mut all[at];
        if places.len() <= sequence_row as usize {
            places.resize(self.sequences.rows.len(), None);
        }
        let place = &mut places[sequence_row as usize];
        let row = batch.rows.len();
        let refusal = match place {
            Some(Place { row, .. }) => format!("sequence {sequence_id} is row {row} of a batch already"),
            None if row == batch.shape.max_rows => format!("the batch is full: {row} rows"),
            None => {
                let length = self.sequences.rows[sequence_row as usize].length;
                batch.check_fits(self.config.block_size(), sequence_id, length)?;
                *place = Some(Place { batch: batch.id, row: row as u32 });
                batch.rows.push(sequence_row);
                batch.room = (0, 0);
                batch.is_new.push(true);
                batch.renew(row, &mut self.sequences);
                return Ok(row);
            }
        };
        Err(Error::State { reason: refusal })
    }

    /// Takes a sequence out of a batch; the last row moves into the hole. Returns the row that it had, and the sequence
    /// that has it now: `None` if it was the last. O(1); the next step writes the row that moved.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::State`] if it is no row of this batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// for id in [7, 8] {
    ///     manager.create_sequence(id)?;
    ///     manager.add_to_batch(batch, id)?;
    /// }
    /// assert_eq!(manager.remove_from_batch(batch, 7)?, (0, Some(8)));
    /// assert_eq!(manager.remove_from_batch(batch, 8)?, (0, None));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn remove_from_batch(
        &mut self,
        batch: BatchId,
        sequence_id: SequenceId,
    ) -> Result<(usize, Option<SequenceId>)> {
        let at = self.batches.find(batch)?;
        let sequence_row = self.sequences.find(sequence_id)?;
        let Some(place) = self.batches.place(sequence_row).filter(|place| place.batch == batch) else {
            return Err(Error::State { reason: format!("sequence {sequence_id} is no row of this batch") });
        };
        let Batches { all, places, .. } = &mut self.batches;
        let (batch, row) = (&mut all[at], place.row as usize);
        places[sequence_row as usize] = None;
        batch.rows.swap_remove(row);
        batch.is_new.swap_remove(row);
        let Some(&moved) = batch.rows.get(row) else { return Ok((row, None)) };
        places[moved as usize] = Some(place);
        batch.renew(row, &mut self.sequences);
        Ok((row, Some(self.sequences.ids[moved as usize])))
    }

    /// Says that what the sets and the device's table show is unknown, as somebody wrote over them. Each set is written
    /// in full at its next turn, every row counts as new, and the next step says to upload the table. O(rows).
    ///
    /// # Errors
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// memory[0].block_tables.fill(77);
    /// manager.invalidate_batch(batch)?;
    /// let step = manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), None, None)?;
    /// assert!(step.upload_table);
    /// assert_eq!(memory[0].block_tables, [-1; 6]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn invalidate_batch(&mut self, batch: BatchId) -> Result<()> {
        let at = self.batches.find(batch)?;
        let batch = &mut self.batches.all[at];
        for row in 0..batch.rows.len() {
            batch.renew(row, &mut self.sequences);
        }
        for shown in &mut batch.shown {
            shown.num_blocks.fill(batch.shape.max_blocks as u32);
            shown.num_rows = batch.shape.max_rows;
            shown.num_tokens = batch.shape.max_tokens;
            shown.one_each = None;
        }
        batch.is_invalid = true;
        Ok(())
    }

    /// The sequences of a batch, by row. O(rows).
    ///
    /// # Errors
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// manager.create_sequence(7)?;
    /// manager.add_to_batch(batch, 7)?;
    /// assert_eq!(manager.batch_sequence_ids(batch)?, [7]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn batch_sequence_ids(&self, batch: BatchId) -> Result<Vec<SequenceId>> {
        let batch = &self.batches.all[self.batches.find(batch)?];
        Ok(batch.rows.iter().map(|&row| self.sequences.ids[row as usize]).collect())
    }

    /// Rows of a batch in use: `0..num_rows`. O(1).
    ///
    /// # Errors
    /// [`Error::State`] if there is no such batch.
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape, BlockManager, Config};
    /// # let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// # let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 4 };
    /// # let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    /// # let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend))?;
    /// assert_eq!(manager.batch_num_rows(batch)?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn batch_num_rows(&self, batch: BatchId) -> Result<usize> {
        Ok(self.batches.all[self.batches.find(batch)?].rows.len())
    }
}
