//! The hot path: settling the demand of appends and handing out their slots.
//!
//! An append never fails half-way. Demand is settled first: an upper bound that needs no look at the sequences is
//! compared with the free blocks, and only when the pool is nearly empty is the exact demand counted, by playing the
//! appends through on scratch memory that is kept between calls. Then blocks are taken and nothing can refuse.
//!
//! Costs: O(tokens) for every call, at most one hash lookup per mention of a sequence (none where the batch before
//! named it at the same place), no heap allocation once the scratch and the caller's vector have grown to the size of
//! the batch.

use rustc_hash::FxHashMap;

use crate::copies::CopyLedger;
use crate::manager::BlockManager;
use crate::pool::Pool;
use crate::sequence::Sequence;
use crate::{BlockId, Config, Error, Result, SequenceId, Slot};

/// Memory of the batched calls, kept so that a step allocates nothing. Between calls `planned` is all zero and
/// `leaving` is empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    /// Of each mention in the batch: the row of its sequence. Kept as guesses for the next batch.
    pub(crate) rows: Vec<u32>,
    /// Of each row of the sequence table: tokens that earlier mentions of the batch append.
    planned: Vec<u64>,
    /// Of a shared tail: holders that have left it for a copy earlier in the batch.
    leaving: FxHashMap<BlockId, u32>,
}

impl BlockManager {
    /// Appends one token and returns its slot. O(1).
    ///
    /// A position that opens a block takes one. A tail that others hold too is copied before the write: it takes a
    /// block, which replaces the table's last entry, and the pair is owed (see [`take_copies`](Self::take_copies)).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::OutOfBlocks`] if the append takes a block and none is free.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.append_token(1)?, 0);
    /// assert_eq!(manager.append_token(1)?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[inline]
    pub fn append_token(&mut self, sequence_id: SequenceId) -> Result<Slot> {
        let row = self.sequences.find(sequence_id)? as usize;
        let sequence = &mut self.sequences.rows[row];
        if sequence.open == 0 {
            let needed = demand(&self.config, &self.pool, sequence, 1);
            if needed > u64::from(self.pool.num_free()) {
                return Err(self.pool.out_of_blocks(needed, None));
            }
            open_tail(&self.config, &mut self.pool, &mut self.copies, sequence);
        }
        Ok(sequence.advance(1))
    }

    /// Appends a run of tokens (a prompt, a chunk, drafts) and adds their slots to `slots`. O(tokens).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::OutOfBlocks`] with the blocks that the whole run takes;
    /// [`Error::Argument`] if there is no memory for the slots.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// let mut slots = Vec::new();
    /// manager.append_tokens(1, 5, &mut slots)?;
    /// assert_eq!(slots, [0, 1, 2, 3, 4]);
    /// assert_eq!(
    ///     manager.append_tokens(1, 4, &mut slots).unwrap_err().to_string(),
    ///     "need 1 blocks, 0 free of 2",
    /// );
    /// assert_eq!(manager.sequence_length(1)?, 5);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_tokens(&mut self, sequence_id: SequenceId, n: u64, slots: &mut Vec<Slot>) -> Result<()> {
        let row = self.sequences.find(sequence_id)? as usize;
        let sequence = &mut self.sequences.rows[row];
        let needed = demand(&self.config, &self.pool, sequence, n);
        if needed > u64::from(self.pool.num_free()) {
            return Err(self.pool.out_of_blocks(needed, None));
        }
        reserve_slots(slots, n, "n")?;
        append_run(&self.config, &mut self.pool, &mut self.copies, sequence, n, slots);
        Ok(())
    }

    /// Appends `counts[i]` tokens (one each, if `None`) to `ids[i]`, in order, and adds their slots to `slots`.
    /// An id named twice appends twice. O(tokens), at most one hash lookup per id.
    ///
    /// # Errors
    /// Nothing is appended to any sequence if one can't be: [`Error::Argument`] if `counts` has another length than
    /// `ids` or there is no memory for the slots; [`Error::UnknownSequence`] for the first id that names none;
    /// [`Error::OutOfBlocks`] with the blocks the whole batch takes and the first row that lacks one.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config, Error};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.create_sequence(2)?;
    /// let mut slots = Vec::new();
    /// manager.append_batch(&[1, 2, 1], Some(&[2, 1, 2]), &mut slots)?;
    /// assert_eq!(slots, [0, 1, 4, 2, 3]);
    ///
    /// let refused = manager.append_batch(&[2, 1], None, &mut slots);
    /// assert_eq!(refused, Err(Error::OutOfBlocks { needed: 1, free: 0, fenced: 0, total: 2, row: Some(1) }));
    /// assert_eq!(manager.sequence_length(2)?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_batch(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        self.find_rows(ids, counts)?;
        self.append_found(counts, slots)
    }

    /// [`append_batch`](Self::append_batch) for the sequences whose rows stand in `scratch.rows`, one count for each.
    pub(crate) fn append_found(&mut self, counts: Option<&[u64]>, slots: &mut Vec<Slot>) -> Result<()> {
        let num_tokens = self.settle_found(counts)?;
        reserve_slots(slots, num_tokens, "counts")?;

        let Self { config, pool, copies, sequences, scratch } = self;
        match counts {
            None => slots.extend(scratch.rows.iter().map(|&row| {
                let sequence = &mut sequences.rows[row as usize];
                if sequence.open == 0 {
                    open_tail(config, pool, copies, sequence);
                }
                sequence.advance(1)
            })),
            Some(counts) => {
                for (&row, &count) in scratch.rows.iter().zip(counts) {
                    append_run(config, pool, copies, &mut sequences.rows[row as usize], count, slots);
                }
            }
        }
        Ok(())
    }

    /// What [`append_batch`](Self::append_batch) would answer, without appending: how many slots, or why not. O(ids).
    ///
    /// # Errors
    /// Those of [`append_batch`](Self::append_batch).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.settle_batch(&[1, 1], Some(&[3, 5])), Ok(8));
    /// assert!(manager.settle_batch(&[1, 1], Some(&[3, 6])).is_err());
    /// assert_eq!(manager.sequence_length(1)?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn settle_batch(&mut self, ids: &[SequenceId], counts: Option<&[u64]>) -> Result<u64> {
        self.find_rows(ids, counts)?;
        self.settle_found(counts)
    }

    /// Finds the sequences of a batch and leaves their rows in `scratch.rows`.
    fn find_rows(&mut self, ids: &[SequenceId], counts: Option<&[u64]>) -> Result<()> {
        if let Some(counts) = counts.filter(|counts| counts.len() != ids.len()) {
            return Err(Error::argument("counts", format!("{} counts, one per id", ids.len()), counts.len()));
        }
        self.scratch.rows.resize(ids.len(), u32::MAX);
        for (row, &sequence_id) in self.scratch.rows.iter_mut().zip(ids) {
            *row = self.sequences.find_near(sequence_id, *row)?;
        }
        Ok(())
    }

    /// Settles the demand of the sequences in `scratch.rows`; returns how many slots they get.
    fn settle_found(&mut self, counts: Option<&[u64]>) -> Result<u64> {
        let num_rows = self.scratch.rows.len();
        let free = u64::from(self.pool.num_free());
        if demand_bound(&self.config, num_rows, counts) > free {
            self.settle_exactly(counts, free)?;
        }
        Ok(counts.map_or(num_rows as u64, |counts| counts.iter().sum()))
    }

    /// Plays the batch in `scratch.rows` through without changing a table. The demand is exact: of `r` holders of a
    /// tail that all append to it, `r − 1` copy it and the last one writes in place.
    fn settle_exactly(&mut self, counts: Option<&[u64]>, free: u64) -> Result<()> {
        let Self { config, pool, sequences, scratch, .. } = self;
        let Scratch { rows, planned, leaving } = scratch;
        planned.resize(sequences.rows.len(), 0);
        let mut needed = 0_u64;
        let mut first_lacking = None;
        for (index, &row) in rows.iter().enumerate() {
            let count = counts.map_or(1, |counts| counts[index]);
            let sequence = &sequences.rows[row as usize];
            let already = &mut planned[row as usize];
            let written = already.saturating_add(count);
            if written > sequence.open {
                let length = sequence.length.saturating_add(*already);
                if *already == 0 && !length.is_multiple_of(config.block_size()) {
                    // The first write into a tail that may be shared; later ones find it our own.
                    let tail = sequence.table[sequence.table.len() - 1];
                    let ref_count = pool.ref_count(tail);
                    if ref_count > 1 {
                        let left = leaving.entry(tail).or_default();
                        if ref_count - *left > 1 {
                            *left += 1;
                            needed = needed.saturating_add(1);
                        }
                    }
                }
                let opened = config.blocks_for(length.saturating_add(count)) - config.blocks_for(length);
                needed = needed.saturating_add(opened);
            }
            *already = written;
            if needed > free && first_lacking.is_none() {
                first_lacking = Some(index);
            }
        }
        for &row in rows.iter() {
            planned[row as usize] = 0;
        }
        leaving.clear();
        if first_lacking.is_some() { Err(pool.out_of_blocks(needed, first_lacking)) } else { Ok(()) }
    }
}

/// No batch takes more: a run of `n` tokens opens at most ⌈n / S⌉ blocks and copies at most one, a single token does
/// one or the other. Needs no look at the sequences.
#[inline]
fn demand_bound(config: &Config, num_ids: usize, counts: Option<&[u64]>) -> u64 {
    let Some(counts) = counts else { return num_ids as u64 };
    counts.iter().fold(0, |sum: u64, &count| {
        let copies = u64::from(count > 1);
        sum.saturating_add(config.blocks_for(count)).saturating_add(copies)
    })
}

/// Blocks that appending `num_tokens` to one sequence takes, exactly.
fn demand(config: &Config, pool: &Pool, sequence: &Sequence, num_tokens: u64) -> u64 {
    let (length, open) = (sequence.length, sequence.open);
    if num_tokens <= open {
        return 0;
    }
    let opened = config.blocks_for(length.saturating_add(num_tokens)) - config.blocks_for(length);
    let copied = open == 0
        && !length.is_multiple_of(config.block_size())
        && sequence.table.last().is_some_and(|&tail| pool.ref_count(tail) > 1);
    opened.saturating_add(u64::from(copied))
}

/// Makes the position at `length` and the rest of its block writable by this sequence alone: opens a block, or leaves a
/// shared tail for a copy, or finds that the tail is its own. The demand has been settled.
#[inline]
fn open_tail(config: &Config, pool: &mut Pool, copies: &mut CopyLedger, sequence: &mut Sequence) {
    let offset = sequence.length % config.block_size();
    let block = match sequence.table.last() {
        Some(&tail) if offset != 0 => {
            if pool.ref_count(tail) > 1 {
                let copy = pool.take();
                // The old entry is replaced: the copy is not a further block of the sequence.
                sequence.table.replace(sequence.table.len() - 1, copy);
                copies.owe(pool, tail, copy);
                pool.drop_ref(tail);
                copy
            } else {
                tail
            }
        }
        _ => {
            let block = pool.take();
            sequence.table.push(block);
            block
        }
    };
    sequence.open = config.block_size() - offset;
    sequence.next_slot = config.slot(block, offset);
}

/// Appends a settled run.
#[inline]
fn append_run(
    config: &Config,
    pool: &mut Pool,
    copies: &mut CopyLedger,
    sequence: &mut Sequence,
    num_tokens: u64,
    slots: &mut Vec<Slot>,
) {
    let mut remaining = num_tokens;
    while remaining > 0 {
        if sequence.open == 0 {
            open_tail(config, pool, copies, sequence);
        }
        let taken = remaining.min(sequence.open);
        let first = sequence.advance(taken);
        slots.extend(first..first + taken as Slot);
        remaining -= taken;
    }
}

/// Room for the slots of a settled call, or a refusal before anything is changed.
pub(crate) fn reserve_slots(slots: &mut Vec<Slot>, num_slots: u64, argument: &'static str) -> Result<()> {
    let reserved = usize::try_from(num_slots).is_ok_and(|num_slots| slots.try_reserve(num_slots).is_ok());
    if reserved {
        return Ok(());
    }
    Err(Error::argument(argument, "as many tokens as memory holds slots for", format!("{num_slots} tokens")))
}
