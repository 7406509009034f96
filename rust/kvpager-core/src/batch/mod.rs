//! `DecodeBatch`, the hot path: the metadata of a batch that persists from step to step.
//!
//! A batch is a list of *rows*, each a sequence, shown in two caller-owned *buffer sets* that take turns: while a
//! device still reads the set of step `n`, step `n + 1` is prepared in the other. A step appends to every row, brings
//! the set whose turn it is up to date by writing what it has missed, and lists the table entries that differ from the
//! previous step, which used the other set.
//!
//! What changed is known without looking: a block table keeps the lowest column that was changed since the batch last
//! showed it (the mark of its counters in `sequences`, whoever changes it). So a row without a new block costs its
//! length and slot.
//!
//! Invariants, audited:
//! * a sequence is a row of one batch at most, and `row_of` says of which;
//! * below its mark, and everywhere without one, a row's table is what the previous step showed;
//! * a set shows what its last turn wrote; what the step since then changed stands in `missed`.
//!
//! Costs: a step O(rows + tokens + entries changed), nothing allocated; coming, going and looking O(1).
//!
//! Here: the parts of a batch, and how it and its rows come and go. `show` writes the sets, `audit` recounts. The
//! manager's `batches` and `batch_step` are what callers see of it.

mod audit;
mod buffers;
mod show;

#[cfg(test)]
pub(crate) use audit::PlantedFault;
pub use buffers::{BatchBuffers, BatchMemory, BatchShape};

use crate::error::{Error, Result};
use crate::ids::{SequenceId, Slot};
use crate::sequences::{Place, SequenceTable};

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
    row_blocks: Vec<u32>,
    /// Rows in use; empty tables and length 0 behind them.
    num_rows: usize,
    /// Slots in use; −1 behind them.
    num_tokens: usize,
}

/// One batch; see the module header.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    id: BatchId,
    shape: BatchShape,
    /// Of each row: where its sequence lives.
    rows: Vec<Place>,
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
    /// Memory for the slots of a step.
    slots: Vec<Slot>,
}

/// Where a sequence is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BatchRow {
    batch: BatchId,
    row: u32,
}

/// The batches of one manager.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batches {
    all: Vec<Batch>,
    /// By place of the table of sequences.
    row_of: Vec<Option<BatchRow>>,
    next_id: u32,
}

impl Batches {
    fn find(&self, batch: BatchId) -> Result<usize> {
        let found = self.all.iter().position(|candidate| candidate.id == batch);
        found
            .ok_or_else(|| Error::State { reason: "no such batch: dropped, or another manager's".to_owned() })
    }

    pub(crate) fn get(&self, batch: BatchId) -> Result<&Batch> {
        self.find(batch).map(|at| &self.all[at])
    }

    pub(crate) fn get_mut(&mut self, batch: BatchId) -> Result<&mut Batch> {
        self.find(batch).map(|at| &mut self.all[at])
    }

    fn row(&self, place: Place) -> Option<BatchRow> {
        self.row_of.get(place.index()).copied().flatten()
    }

    /// A sequence that a batch shows can't be released.
    #[inline]
    pub(crate) fn check_free(&self, place: Place, sequence_id: SequenceId) -> Result<()> {
        let Some(BatchRow { row, .. }) = self.row(place) else { return Ok(()) };
        Err(Error::State {
            reason: format!("sequence {sequence_id} is row {row} of a batch, remove it first"),
        })
    }

    /// A new batch without rows; both sets show that.
    pub(crate) fn create(&mut self, shape: BatchShape, sets: &mut [BatchBuffers<'_>; 2]) -> Result<BatchId> {
        shape.check_limits()?;
        shape.check(sets)?;
        let id = BatchId(self.next_id);
        self.next_id += 1;
        let mut batch = Batch::new(id, shape);
        batch.show_nothing(sets);
        self.all.push(batch);
        Ok(id)
    }

    /// Forgets a batch.
    pub(crate) fn drop(&mut self, batch: BatchId) -> Result<()> {
        let at = self.find(batch)?;
        for place in self.all.swap_remove(at).rows {
            self.row_of[place.index()] = None;
        }
        Ok(())
    }

    /// Makes a sequence the last row of a batch.
    pub(crate) fn add(
        &mut self,
        batch: BatchId,
        place: Place,
        sequences: &mut SequenceTable,
        block_size: u64,
    ) -> Result<usize> {
        let at = self.find(batch)?;
        let (batch, sequence_id) = (&mut self.all[at], sequences.id(place));
        if self.row_of.len() <= place.index() {
            self.row_of.resize(sequences.num_places(), None);
        }
        let shown = &mut self.row_of[place.index()];
        let row = batch.rows.len();
        let refusal = match shown {
            Some(BatchRow { row, .. }) => format!("sequence {sequence_id} is row {row} of a batch already"),
            None if row == batch.shape.max_rows => format!("the batch is full: {row} rows"),
            None => {
                batch.check_fits(block_size, sequence_id, sequences.counters(place).length())?;
                *shown = Some(BatchRow { batch: batch.id, row: row as u32 });
                batch.rows.push(place);
                batch.is_new.push(true);
                batch.renew(row, sequences);
                return Ok(row);
            }
        };
        Err(Error::State { reason: refusal })
    }

    /// Takes a sequence out of a batch; the row it had, and the place of the sequence that has it now.
    pub(crate) fn remove(
        &mut self,
        batch: BatchId,
        place: Place,
        sequences: &mut SequenceTable,
    ) -> Result<(usize, Option<Place>)> {
        let at = self.find(batch)?;
        let Some(shown) = self.row(place).filter(|shown| shown.batch == batch) else {
            let sequence_id = sequences.id(place);
            return Err(Error::State { reason: format!("sequence {sequence_id} is no row of this batch") });
        };
        let (batch, row) = (&mut self.all[at], shown.row as usize);
        self.row_of[place.index()] = None;
        batch.rows.swap_remove(row);
        batch.is_new.swap_remove(row);
        let Some(&moved) = batch.rows.get(row) else { return Ok((row, None)) };
        self.row_of[moved.index()] = Some(shown);
        batch.renew(row, sequences);
        Ok((row, Some(moved)))
    }
}

impl Batch {
    fn new(id: BatchId, shape: BatchShape) -> Self {
        let everything = Shown {
            row_blocks: vec![shape.max_blocks as u32; shape.max_rows],
            num_rows: shape.max_rows,
            num_tokens: shape.max_tokens,
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
            slots: Vec::with_capacity(shape.max_tokens),
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

    /// Finds the first row that a step would let outgrow the buffers.
    pub(crate) fn check_step_fits(
        &self,
        sequences: &SequenceTable,
        counts: Option<&[u64]>,
        block_size: u64,
    ) -> Result<()> {
        let longest = self.longest(block_size);
        let length = |place: &Place| sequences.counters(*place).length();
        if counts.is_none() && self.rows.iter().all(|place| length(place) < longest) {
            return Ok(()); // what most steps are
        }
        for (at, place) in self.rows.iter().enumerate() {
            let num_tokens = length(place).saturating_add(counts.map_or(1, |counts| counts[at]));
            self.check_fits(block_size, sequences.id(*place), num_tokens)?;
        }
        Ok(())
    }

    /// Tokens that a row has room for.
    #[inline]
    fn longest(&self, block_size: u64) -> u64 {
        block_size.saturating_mul(self.shape.max_blocks as u64).min(i32::MAX as u64)
    }

    /// Where the sequence of each row lives.
    pub(crate) fn rows(&self) -> &[Place] {
        &self.rows
    }

    /// The same, lent to a call that needs them while the batch changes; to be given back.
    pub(crate) fn lend_rows(&mut self, places: &mut Vec<Place>) {
        std::mem::swap(&mut self.rows, places);
    }

    /// The two sets have the shape of the batch.
    #[inline]
    pub(crate) fn check_sets(&self, sets: &[BatchBuffers<'_>; 2]) -> Result<()> {
        self.shape.check(sets)
    }

    /// Tokens that a step appends.
    pub(crate) fn count_tokens(&self, counts: Option<&[u64]>) -> Result<u64> {
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

    /// Memory for the slots of a step, empty; to be given back to [`show`](Self::show).
    #[inline]
    pub(crate) fn take_slots(&mut self) -> Vec<Slot> {
        let mut slots = std::mem::take(&mut self.slots);
        slots.clear();
        slots
    }

    /// Gives the memory of [`take_slots`](Self::take_slots) back.
    #[inline]
    pub(crate) fn give_back_slots(&mut self, slots: Vec<Slot>) {
        self.slots = slots;
    }

    /// Nothing is known any more about what the sets and the device show.
    pub(crate) fn invalidate(&mut self, sequences: &mut SequenceTable) {
        for row in 0..self.rows.len() {
            self.renew(row, sequences);
        }
        for shown in &mut self.shown {
            shown.row_blocks.fill(self.shape.max_blocks as u32);
            shown.num_rows = self.shape.max_rows;
            shown.num_tokens = self.shape.max_tokens;
        }
        self.is_invalid = true;
    }

    /// The row shows something else than at the previous step: all of its table is new.
    fn renew(&mut self, row: usize, sequences: &mut SequenceTable) {
        self.is_new[row] = true;
        sequences.counters_mut(self.rows[row]).mark(0);
    }
}
