//! The hot path: handing out the slots of appends.
//!
//! An append never fails half-way: `demand` settles first what it takes, then blocks are taken and nothing can refuse.
//!
//! Costs: O(tokens) for every call, at most one hash lookup per mention of a sequence (none where the batch before
//! named it at the same place), no heap allocation once the scratch and the caller's vector have grown to the size of
//! the batch.

use rustc_hash::FxHashMap;

use crate::admission::check_token_ids;
use crate::copies::CopyLedger;
use crate::demand::{check_num_ids, count_tokens, demand, too_long};
use crate::direct::close_direct;
use crate::hash::Hash;
use crate::index::Parent;
use crate::manager::BlockManager;
use crate::pool::{INDEXED, Pool};
use crate::sequence::{BlockTable, LONGEST_RUN, Sequence, SequenceTable};
use crate::{BlockId, Config, Error, Result, SequenceId, Slot, TokenId};

/// Memory of the batched calls, kept so that a step allocates nothing. Between calls `planned` is all zero and
/// `leaving` is empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    /// Of each mention in the batch: the row of its sequence. Kept as guesses for the next batch.
    pub(crate) rows: Vec<u32>,
    /// The ids that `rows` were found for while no sequence had come or gone since, if the number below says so.
    pub(crate) ids: Vec<SequenceId>,
    /// [`SequenceTable::num_changes`] at that time; none while `rows` are guesses.
    pub(crate) found_at: Option<u64>,
    /// Of each row of the sequence table: tokens that earlier mentions of the batch append (or commit to).
    pub(crate) planned: Vec<u64>,
    /// Rows that filled a block in a commit, and the number of tokens they were committed to then.
    pub(crate) filled: Vec<(u32, u64)>,
    /// Of some of these: the hash of the block and its parent, if its tokens lie with the index.
    pub(crate) hashes: Vec<Option<(Hash, Parent)>>,
    /// Of a shared tail: holders that have left it for a copy earlier in the batch.
    pub(crate) leaving: FxHashMap<BlockId, u32>,
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
        self.close_direct(row);
        self.sequences.chains[row as usize].append_one(position, token_id);
        Ok(slot)
    }

    #[inline]
    fn append_one(&mut self, row: u32) -> Result<Slot> {
        self.sequences.num_appends += 1;
        let length = self.sequences.rows[row as usize].length;
        if length >= self.config.max_sequence_length() {
            return Err(too_long(&self.config, self.sequences.ids[row as usize], length + 1));
        }
        let SequenceTable { rows, tables, .. } = &mut self.sequences;
        let (sequence, table) = (&mut rows[row as usize], &mut tables[row as usize]);
        if sequence.open() == 0 {
            let needed = demand(&self.config, &self.pool, sequence, table, 1);
            if needed > u64::from(self.pool.num_available()) {
                return Err(self.pool.out_of_blocks(needed, None));
            }
            open_tail(&self.config, &mut self.pool, &mut self.copies, sequence, table);
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
            self.close_direct(row);
            self.sequences.chains[row as usize].append(position, token_ids);
        }
        Ok(())
    }

    fn append_many(&mut self, row: u32, n: u64, slots: &mut Vec<Slot>, argument: &'static str) -> Result<()> {
        self.sequences.num_appends += 1;
        let SequenceTable { rows, tables, ids, .. } = &mut self.sequences;
        let (sequence, table) = (&mut rows[row as usize], &mut tables[row as usize]);
        let length = sequence.length.saturating_add(n);
        if n > 0 && length > self.config.max_sequence_length() {
            return Err(too_long(&self.config, ids[row as usize], length));
        }
        let needed = demand(&self.config, &self.pool, sequence, table, n);
        if needed > u64::from(self.pool.num_available()) {
            return Err(self.pool.out_of_blocks(needed, None));
        }
        reserve_slots(slots, n, argument)?;
        append_run(&self.config, &mut self.pool, &mut self.copies, (sequence, table), n, slots);
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
        self.sequences.num_appends += 1;

        let Self { config, pool, copies, sequences, scratch, .. } = self;
        let SequenceTable { rows, tables, chains, .. } = sequences;
        // Ids are kept before the lengths move on.
        if let (Some(token_ids), None) = (token_ids, counts) {
            slots.extend(scratch.rows.iter().zip(token_ids).map(|(&row, &token_id)| {
                let sequence = &mut rows[row as usize];
                if sequence.open() == 0 {
                    open_tail(config, pool, copies, sequence, &mut tables[row as usize]);
                }
                let chain = &mut chains[row as usize];
                close_direct(sequence, &tables[row as usize], chain, &pool.index);
                chain.append_one(sequence.length, token_id);
                sequence.advance(1)
            }));
        } else if let (Some(mut token_ids), Some(counts)) = (token_ids, counts) {
            for (&row, &count) in scratch.rows.iter().zip(counts) {
                let (of_row, rest) = token_ids.split_at(count as usize);
                token_ids = rest;
                let (sequence, table) = (&mut rows[row as usize], &mut tables[row as usize]);
                if count > 0 {
                    let chain = &mut chains[row as usize];
                    close_direct(sequence, table, chain, &pool.index);
                    chain.append(sequence.length, of_row);
                }
                append_run(config, pool, copies, (sequence, table), count, slots);
            }
        } else if let Some(counts) = counts {
            for (&row, &count) in scratch.rows.iter().zip(counts) {
                let sequence = (&mut rows[row as usize], &mut tables[row as usize]);
                append_run(config, pool, copies, sequence, count, slots);
            }
        } else {
            // A slice, and moved in, so that its bounds stay in registers.
            let rows = &mut rows[..];
            let pool = &mut *pool;
            slots.extend(scratch.rows.iter().map(move |&row| {
                let sequence = &mut rows[row as usize];
                if sequence.open() == 0 {
                    open_tail(config, pool, copies, sequence, &mut tables[row as usize]);
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
        // Mostly a batch names what the one before it named, and nothing came or went.
        if self.scratch.found_at == Some(self.sequences.num_changes) && self.scratch.ids == ids {
            return Ok(());
        }
        self.scratch.found_at = None;
        self.scratch.rows.resize(ids.len(), u32::MAX);
        for (row, &sequence_id) in self.scratch.rows.iter_mut().zip(ids) {
            *row = self.sequences.find_near(sequence_id, *row)?;
        }
        self.scratch.ids.clear();
        self.scratch.ids.extend_from_slice(ids);
        self.scratch.found_at = Some(self.sequences.num_changes);
        Ok(())
    }
}

/// Makes the position at `length` and the rest of its block writable by this sequence alone: opens a block, or leaves a
/// shared tail, or one with children in the index, for a copy, or finds that the tail is its own, which then leaves the
/// index. The demand has been settled.
#[inline]
pub(crate) fn open_tail(
    config: &Config,
    pool: &mut Pool,
    copies: &mut CopyLedger,
    sequence: &mut Sequence,
    table: &mut BlockTable,
) {
    let block_size = config.block_size();
    // Mostly the tail is full: no division.
    if table.len() as u64 * block_size == sequence.length {
        return open_block(config, pool, sequence, table);
    }
    let (last, offset) = (table.len() - 1, sequence.length % block_size);
    let mut block = table[last];
    if pool.must_copy(block) {
        let copy = pool.take();
        // The old entry is replaced: the copy is not a further block of the sequence.
        table.replace(sequence, last, copy);
        copies.owe(pool, block, copy);
        pool.drop_ref(block);
        block = copy;
    } else if pool.has(block, INDEXED) {
        pool.unindex(block);
    }
    sequence.open_run(block_size - offset, config.slot(block, offset));
}

/// Opens the next block of a sequence whose blocks are full.
#[inline]
fn open_block(config: &Config, pool: &mut Pool, sequence: &mut Sequence, table: &mut BlockTable) {
    let block = pool.take();
    table.push(sequence, block);
    sequence.open_run(config.block_size(), config.slot(block, 0));
}

/// Appends a settled run.
#[inline]
pub(crate) fn append_run(
    config: &Config,
    pool: &mut Pool,
    copies: &mut CopyLedger,
    (sequence, table): (&mut Sequence, &mut BlockTable),
    num_tokens: u64,
    slots: &mut Vec<Slot>,
) {
    let mut remaining = num_tokens;
    if remaining > 0 && sequence.open() == 0 {
        open_tail(config, pool, copies, sequence, table);
    }
    while remaining > 0 {
        if sequence.open() == 0 {
            if config.block_size() <= LONGEST_RUN {
                open_block(config, pool, sequence, table);
            } else {
                open_tail(config, pool, copies, sequence, table);
            }
        }
        let taken = remaining.min(sequence.open());
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
