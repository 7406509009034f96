//! The memory that a batch writes: lent by the caller for each call.

use crate::error::{Error, Result};

/// The room in one buffer set. Letters: B rows, M columns of a table, T tokens of a step, C changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// B: sequences at once.
    pub max_rows: usize,
    /// M: blocks of one sequence.
    pub max_blocks: usize,
    /// T: new tokens of one step.
    pub max_tokens: usize,
    /// C: table entries that one step can list.
    pub max_changes: usize,
}

impl BatchShape {
    /// Rows, columns and slots can be counted in int32.
    pub(super) fn check_limits(&self) -> Result<()> {
        let Self { max_rows, max_blocks, max_tokens, .. } = *self;
        for (argument, size) in
            [("block_tables", max_rows), ("block_tables", max_blocks), ("slot_mapping", max_tokens)]
        {
            if i32::try_from(size).is_err() {
                return Err(Error::argument(argument, "sizes that fit an int32", size));
            }
        }
        Ok(())
    }

    /// Both sets have this shape.
    #[inline]
    pub(super) fn check(&self, sets: &[BatchBuffers<'_>; 2]) -> Result<()> {
        let Self { max_rows, max_blocks, max_tokens, max_changes } = *self;
        let num_entries = max_rows.saturating_mul(max_blocks);
        let wanted = [num_entries, max_rows, max_rows + 1, max_tokens, max_changes.saturating_mul(3)];
        for set in sets {
            let have = set.lens();
            if have != wanted {
                return Err(wrong_lens(wanted, have));
            }
        }
        Ok(())
    }
}

#[cold]
fn wrong_lens(wanted: [usize; 5], have: [usize; 5]) -> Error {
    const NAMES: [&str; 5] = ["block_tables", "seq_lens", "query_start_loc", "slot_mapping", "changed"];
    let at = (0..5).find(|&at| wanted[at] != have[at]).unwrap_or(0);
    Error::argument(NAMES[at], format!("{} elements", wanted[at]), have[at])
}

/// One buffer set, lent: what the kernels of a step read.
#[derive(Debug)]
pub struct BatchBuffers<'a> {
    /// `block_tables [B, M]`: a row's blocks, −1 behind them.
    pub block_tables: &'a mut [i32],
    /// `seq_lens [B]`: tokens of each row, this step's included.
    pub seq_lens: &'a mut [i32],
    /// `query_start_loc [B+1]`: where a row's new tokens begin among all new tokens; the total behind the last row.
    pub query_start_loc: &'a mut [i32],
    /// `slot_mapping [T]`: the slots of the new tokens, −1 behind them.
    pub slot_mapping: &'a mut [i64],
    /// `changed [C, 3]`: (row, column, block) of the table entries that differ from the previous step.
    pub changed: &'a mut [i32],
}

impl BatchBuffers<'_> {
    #[inline]
    fn lens(&self) -> [usize; 5] {
        [
            self.block_tables.len(),
            self.seq_lens.len(),
            self.query_start_loc.len(),
            self.slot_mapping.len(),
            self.changed.len(),
        ]
    }
}

/// A buffer set that owns its memory, for callers without one of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchMemory {
    /// See [`BatchBuffers::block_tables`].
    pub block_tables: Vec<i32>,
    /// See [`BatchBuffers::seq_lens`].
    pub seq_lens: Vec<i32>,
    /// See [`BatchBuffers::query_start_loc`].
    pub query_start_loc: Vec<i32>,
    /// See [`BatchBuffers::slot_mapping`].
    pub slot_mapping: Vec<i64>,
    /// See [`BatchBuffers::changed`].
    pub changed: Vec<i32>,
}

impl BatchMemory {
    /// Memory of a shape, zeroed. O(its size).
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape};
    /// let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 5 };
    /// assert_eq!(BatchMemory::new(shape).changed.len(), 15);
    /// ```
    #[must_use]
    pub fn new(shape: BatchShape) -> Self {
        Self {
            block_tables: vec![0; shape.max_rows * shape.max_blocks],
            seq_lens: vec![0; shape.max_rows],
            query_start_loc: vec![0; shape.max_rows + 1],
            slot_mapping: vec![0; shape.max_tokens],
            changed: vec![0; shape.max_changes * 3],
        }
    }

    /// Lends it for a call. O(1).
    ///
    /// ```
    /// # use kvpager_core::{BatchMemory, BatchShape};
    /// let shape = BatchShape { max_rows: 2, max_blocks: 3, max_tokens: 4, max_changes: 5 };
    /// let mut memory = BatchMemory::new(shape);
    /// memory.lend().seq_lens[1] = 7;
    /// assert_eq!(memory.seq_lens, [0, 7]);
    /// ```
    pub fn lend(&mut self) -> BatchBuffers<'_> {
        BatchBuffers {
            block_tables: &mut self.block_tables,
            seq_lens: &mut self.seq_lens,
            query_start_loc: &mut self.query_start_loc,
            slot_mapping: &mut self.slot_mapping,
            changed: &mut self.changed,
        }
    }
}
