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

use crate::admission::check_token_ids;
use crate::copies::CopyLedger;
use crate::manager::BlockManager;
use crate::pool::{INDEXED, Pool};
use crate::sequence::{Sequence, SequenceTable};
use crate::{BlockId, Config, Error, Result, SequenceId, Slot, TokenId};

/// Memory of the batched calls, kept so that a step allocates nothing. Between calls `planned` is all zero and
/// `leaving` is empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    /// Of each mention in the batch: the row of its sequence. Kept as guesses for the next batch.
    pub(crate) rows: Vec<u32>,
    /// Of each row of the sequence table: tokens that earlier mentions of the batch append (or commit to).
    pub(crate) planned: Vec<u64>,
    /// Rows that filled a block in a commit.
    pub(crate) filled: Vec<u32>,
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
        let row = self.sequences.find(sequence_id)?;
        self.append_one(row)
    }

    /// [`append_token`](Self::append_token) of a token whose id is known. O(1).
    ///
    /// # Errors
    /// Those of [`append_token`](Self::append_token); [`Error::Argument`] for a bad id, or one that differs from the
    /// prompt's at its position.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.append_token_id(1, 70)?, 0);
    /// assert_eq!(manager.append_token_id(1, 71)?, 1);
    /// manager.commit(1, 2)?;
    /// assert_eq!(manager.stats().indexed, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_token_id(&mut self, sequence_id: SequenceId, token_id: TokenId) -> Result<Slot> {
        check_token_ids(&[token_id], "token_id")?;
        let row = self.sequences.find(sequence_id)?;
        let position = self.sequences.rows[row as usize].length;
        self.check_kept_ids(row, position, &[token_id], "token_id")?;
        let slot = self.append_one(row)?;
        self.sequences.chains[row as usize].append_one(position, token_id);
        Ok(slot)
    }

    #[inline]
    fn append_one(&mut self, row: u32) -> Result<Slot> {
        let sequence = &mut self.sequences.rows[row as usize];
        if sequence.length >= self.config.max_sequence_length() {
            return Err(too_long(&self.config, sequence, sequence.length + 1));
        }
        if sequence.open == 0 {
            let needed = demand(&self.config, &self.pool, sequence, 1);
            if needed > u64::from(self.pool.num_available()) {
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
        let row = self.sequences.find(sequence_id)?;
        self.append_many(row, n, slots, "n")
    }

    /// [`append_tokens`](Self::append_tokens) of tokens whose ids are known. O(tokens).
    ///
    /// # Errors
    /// Those of [`append_tokens`](Self::append_tokens); [`Error::Argument`] for a bad id, or one that differs from the
    /// prompt's at its position.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.create_sequence(1)?;
    /// let mut slots = Vec::new();
    /// manager.append_token_ids(1, &[70, 71, 72], &mut slots)?;
    /// assert_eq!(slots, [0, 1, 2]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_token_ids(
        &mut self,
        sequence_id: SequenceId,
        token_ids: &[TokenId],
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        check_token_ids(token_ids, "token_ids")?;
        let row = self.sequences.find(sequence_id)?;
        let position = self.sequences.rows[row as usize].length;
        self.check_kept_ids(row, position, token_ids, "token_ids")?;
        self.append_many(row, token_ids.len() as u64, slots, "token_ids")?;
        if !token_ids.is_empty() {
            self.sequences.chains[row as usize].append(position, token_ids);
        }
        Ok(())
    }

    fn append_many(&mut self, row: u32, n: u64, slots: &mut Vec<Slot>, argument: &'static str) -> Result<()> {
        let sequence = &mut self.sequences.rows[row as usize];
        let length = sequence.length.saturating_add(n);
        if n > 0 && length > self.config.max_sequence_length() {
            return Err(too_long(&self.config, sequence, length));
        }
        let needed = demand(&self.config, &self.pool, sequence, n);
        if needed > u64::from(self.pool.num_available()) {
            return Err(self.pool.out_of_blocks(needed, None));
        }
        reserve_slots(slots, n, argument)?;
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
    /// assert_eq!(refused, Err(Error::OutOfBlocks { needed: 1, free: 0, fenced: 0, total: 2, row: Some(1), watermark: 0 }));
    /// assert_eq!(manager.sequence_length(2)?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_batch(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        Self::check_batch(ids, counts, None)?;
        self.find_rows(ids)?;
        self.append_found(counts, None, slots)
    }

    /// [`append_batch`](Self::append_batch) of tokens whose ids are known: `token_ids` has one for each new token, row
    /// after row. O(tokens).
    ///
    /// # Errors
    /// Those of [`append_batch`](Self::append_batch); [`Error::Argument`] for a bad id, another number of ids, or one
    /// that differs from a prompt's at its position.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 2)?.with_prefix_caching(true))?;
    /// manager.create_sequence(1)?;
    /// manager.create_sequence(2)?;
    /// let mut slots = Vec::new();
    /// manager.append_batch_ids(&[1, 2], Some(&[2, 1]), &[5, 6, 7], &mut slots)?;
    /// assert_eq!(slots, [0, 1, 2]);
    /// manager.commit_batch(&[1, 2], &[2, 1], None)?;
    /// assert_eq!(manager.stats().indexed, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_batch_ids(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        token_ids: &[TokenId],
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        Self::check_batch(ids, counts, Some(token_ids))?;
        self.find_rows(ids)?;
        self.append_found(counts, Some(token_ids), slots)
    }

    /// The append of a batch whose rows stand in `scratch.rows`, one count for each and sound token ids, one for each
    /// new token.
    pub(crate) fn append_found(
        &mut self,
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        let num_tokens = self.settle_found(counts, token_ids)?;
        reserve_slots(slots, num_tokens, "counts")?;
        self.note_parents(counts);

        let Self { config, pool, copies, sequences, scratch, .. } = self;
        let SequenceTable { rows, chains, .. } = sequences;
        // Ids are kept before the lengths move on.
        if let (Some(token_ids), None) = (token_ids, counts) {
            slots.extend(scratch.rows.iter().zip(token_ids).map(|(&row, &token_id)| {
                let sequence = &mut rows[row as usize];
                if sequence.open == 0 {
                    open_tail(config, pool, copies, sequence);
                }
                chains[row as usize].append_one(sequence.length, token_id);
                sequence.advance(1)
            }));
        } else if let (Some(mut token_ids), Some(counts)) = (token_ids, counts) {
            for (&row, &count) in scratch.rows.iter().zip(counts) {
                let (of_row, rest) = token_ids.split_at(count as usize);
                token_ids = rest;
                let sequence = &mut rows[row as usize];
                if count > 0 {
                    chains[row as usize].append(sequence.length, of_row);
                }
                append_run(config, pool, copies, sequence, count, slots);
            }
        } else if let Some(counts) = counts {
            for (&row, &count) in scratch.rows.iter().zip(counts) {
                append_run(config, pool, copies, &mut rows[row as usize], count, slots);
            }
        } else {
            slots.extend(scratch.rows.iter().map(|&row| {
                let sequence = &mut rows[row as usize];
                if sequence.open == 0 {
                    open_tail(config, pool, copies, sequence);
                }
                sequence.advance(1)
            }));
        }
        pool.copy_first.clear();
        Ok(())
    }

    /// What [`append_batch`](Self::append_batch) (with `token_ids`:
    /// [`append_batch_ids`](Self::append_batch_ids)) would answer, without appending: how many slots, or why not.
    /// O(tokens).
    ///
    /// # Errors
    /// Those of the two.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.settle_batch(&[1, 1], Some(&[3, 5]), None), Ok(8));
    /// assert!(manager.settle_batch(&[1, 1], Some(&[3, 6]), None).is_err());
    /// assert_eq!(manager.sequence_length(1)?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn settle_batch(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<u64> {
        Self::check_batch(ids, counts, token_ids)?;
        self.find_rows(ids)?;
        self.settle_found(counts, token_ids)
    }

    /// The values and lengths of a batch's arguments.
    fn check_batch(ids: &[SequenceId], counts: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<()> {
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        if let Some(counts) = counts.filter(|counts| counts.len() != ids.len()) {
            return Err(Error::argument("counts", format!("{} counts, one per id", ids.len()), counts.len()));
        }
        if let Some(token_ids) = token_ids {
            check_num_ids(count_tokens(ids.len(), counts), token_ids)?;
        }
        Ok(())
    }

    /// Finds the sequences of a batch and leaves their rows in `scratch.rows`.
    #[inline]
    pub(crate) fn find_rows(&mut self, ids: &[SequenceId]) -> Result<()> {
        self.scratch.rows.resize(ids.len(), u32::MAX);
        for (row, &sequence_id) in self.scratch.rows.iter_mut().zip(ids) {
            *row = self.sequences.find_near(sequence_id, *row)?;
        }
        Ok(())
    }

    /// Settles the demand of the sequences in `scratch.rows`; returns how many slots they get.
    fn settle_found(&mut self, counts: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Result<u64> {
        if let Some(token_ids) = token_ids {
            self.check_kept_batch(counts, token_ids)?;
        }
        if self.config.max_sequence_length() < u64::MAX {
            self.check_lengths(counts)?;
        }
        let num_rows = self.scratch.rows.len();
        let free = u64::from(self.pool.num_available());
        if demand_bound(&self.config, num_rows, counts) > free {
            self.settle_exactly(counts, free)?;
        }
        Ok(count_tokens(num_rows, counts))
    }

    /// Before a settled batch: finds the tails that have children in the index now, so that each is copied by whoever
    /// appends to it, as settled, even if the batch itself evicts the children first.
    #[inline]
    fn note_parents(&mut self, counts: Option<&[u64]>) {
        let Self { config, pool, sequences, scratch, .. } = self;
        if pool.cached.len() == 0
            || demand_bound(config, scratch.rows.len(), counts) <= u64::from(pool.num_free())
        {
            return; // nothing will be evicted
        }
        for (at, &row) in scratch.rows.iter().enumerate() {
            let sequence = &sequences.rows[row as usize];
            let appends = counts.is_none_or(|counts| counts[at] > 0);
            if sequence.open == 0 && appends && !sequence.length.is_multiple_of(config.block_size()) {
                let tail = sequence.table[sequence.table.len() - 1];
                if pool.has_children(tail) {
                    pool.copy_first.push(tail);
                }
            }
        }
    }

    /// An id that is given for a token of a prompt must be the prompt's.
    #[inline]
    fn check_kept_ids(
        &self,
        row: u32,
        position: u64,
        token_ids: &[TokenId],
        argument: &'static str,
    ) -> Result<()> {
        let chain = &self.sequences.chains[row as usize];
        if !chain.has_ids_past(position) {
            return Ok(());
        }
        match chain.first_conflict(position, token_ids) {
            None => Ok(()),
            Some((position, kept, got)) => {
                let id = self.sequences.rows[row as usize].id;
                let wanted = format!("{kept}, the prompt's id at position {position} of sequence {id}");
                Err(Error::argument(argument, wanted, got))
            }
        }
    }

    fn check_kept_batch(&mut self, counts: Option<&[u64]>, token_ids: &[TokenId]) -> Result<()> {
        let SequenceTable { rows, chains, .. } = &self.sequences;
        let is_past = |&row: &u32| chains[row as usize].has_ids_past(rows[row as usize].length);
        if !self.scratch.rows.iter().any(is_past) {
            return Ok(());
        }
        let mut token_ids = token_ids;
        self.play(counts, |manager, row, length, count| {
            let (of_row, rest) = token_ids.split_at(count as usize);
            token_ids = rest;
            manager.check_kept_ids(row, length, of_row, "token_ids")
        })
    }

    fn check_lengths(&mut self, counts: Option<&[u64]>) -> Result<()> {
        self.play(counts, |manager, row, length, count| {
            let length = length.saturating_add(count);
            if count > 0 && length > manager.config.max_sequence_length() {
                return Err(too_long(&manager.config, &manager.sequences.rows[row as usize], length));
            }
            Ok(())
        })
    }

    /// Calls `check(row, length before, count)` for each mention of the batch in `scratch.rows`, in order.
    fn play(
        &mut self,
        counts: Option<&[u64]>,
        mut check: impl FnMut(&Self, u32, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let Scratch { rows, mut planned, filled, leaving } = std::mem::take(&mut self.scratch);
        planned.resize(self.sequences.rows.len(), 0);
        let mut checked = Ok(());
        for (at, &row) in rows.iter().enumerate() {
            let count = counts.map_or(1, |counts| counts[at]);
            let length = self.sequences.rows[row as usize].length.saturating_add(planned[row as usize]);
            checked = check(self, row, length, count);
            if checked.is_err() {
                break;
            }
            planned[row as usize] = planned[row as usize].saturating_add(count);
        }
        for &row in &rows {
            planned[row as usize] = 0;
        }
        self.scratch = Scratch { rows, planned, filled, leaving };
        checked
    }

    /// Plays the batch in `scratch.rows` through without changing a table. The demand is exact: of `r` holders of a
    /// tail that all append to it, `r − 1` copy it and the last one writes in place; a tail with children in the index
    /// is copied by all.
    fn settle_exactly(&mut self, counts: Option<&[u64]>, free: u64) -> Result<()> {
        let Self { config, pool, sequences, scratch, .. } = self;
        let Scratch { rows, planned, leaving, .. } = scratch;
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
                    if pool.has_children(tail) {
                        needed = needed.saturating_add(1); // every holder copies it, the last one too
                    } else if ref_count > 1 {
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
/// one or the other. Needs no look at the sequences, and one division: Σ ⌈n / S⌉ ≤ ⌊Σ n / S⌋ + runs.
#[inline]
fn demand_bound(config: &Config, num_ids: usize, counts: Option<&[u64]>) -> u64 {
    let Some(counts) = counts else { return num_ids as u64 };
    let (mut num_tokens, mut num_opened_or_copied) = (0_u64, 0);
    for &count in counts {
        num_tokens = num_tokens.saturating_add(count);
        num_opened_or_copied += u64::from(count > 0) + u64::from(count > 1);
    }
    (num_tokens / config.block_size()).saturating_add(num_opened_or_copied)
}

/// Tokens that a batch appends.
fn count_tokens(num_rows: usize, counts: Option<&[u64]>) -> u64 {
    counts.map_or(num_rows as u64, |counts| counts.iter().fold(0, |sum, &count| sum.saturating_add(count)))
}

pub(crate) fn check_num_ids(num_tokens: u64, token_ids: &[TokenId]) -> Result<()> {
    if token_ids.len() as u64 == num_tokens {
        return Ok(());
    }
    let wanted = format!("{num_tokens} ids, one for each new token");
    Err(Error::argument("token_ids", wanted, format!("{} ids", token_ids.len())))
}

/// The refusal of `num_tokens` in one sequence.
#[cold]
fn too_long(config: &Config, sequence: &Sequence, num_tokens: u64) -> Error {
    let (id, most) = (sequence.id, config.max_sequence_length());
    let reason = format!("sequence {id}: {num_tokens} tokens, `max_sequence_length` is {most}");
    Error::SequenceTooLong { reason }
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
        && sequence.table.last().is_some_and(|&tail| pool.must_copy(tail));
    opened.saturating_add(u64::from(copied))
}

/// Makes the position at `length` and the rest of its block writable by this sequence alone: opens a block, or leaves a
/// shared tail, or one with children in the index, for a copy, or finds that the tail is its own, which then leaves the
/// index. The demand has been settled.
#[inline]
fn open_tail(config: &Config, pool: &mut Pool, copies: &mut CopyLedger, sequence: &mut Sequence) {
    let offset = sequence.length % config.block_size();
    let block = match sequence.table.last() {
        Some(&tail) if offset != 0 => {
            if pool.must_copy(tail) {
                let copy = pool.take();
                // The old entry is replaced: the copy is not a further block of the sequence.
                sequence.table.replace(sequence.table.len() - 1, copy);
                copies.owe(pool, tail, copy);
                pool.drop_ref(tail);
                copy
            } else {
                if pool.has(tail, INDEXED) {
                    pool.unindex(tail);
                }
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
pub(crate) fn append_run(
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
