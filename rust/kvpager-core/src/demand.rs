//! What an append would take, and whether it may: checked and settled before anything changes.
//!
//! An upper bound that needs no look at the sequences is compared with the blocks at hand; only when the pool is nearly
//! empty is the exact demand counted, by playing the batch through on scratch memory that is kept between calls.
//!
//! Costs: O(rows), O(ids) where a prompt's ids are compared, nothing allocated once warm.

use crate::append::Scratch;
use crate::manager::BlockManager;
use crate::pool::Pool;
use crate::sequence::{Sequence, SequenceTable};
use crate::{BlockId, Config, Error, Result, SequenceId, TokenId};

impl BlockManager {
    /// Settles the demand of the sequences in `scratch.rows`; returns how many slots they get.
    pub(crate) fn settle_found(
        &mut self,
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<u64> {
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
    pub(crate) fn note_parents(&mut self, counts: Option<&[u64]>) {
        let Self { config, pool, sequences, scratch, .. } = self;
        if pool.cached.len() == 0
            || demand_bound(config, scratch.rows.len(), counts) <= u64::from(pool.num_free())
        {
            return; // nothing will be evicted
        }
        for (at, &row) in scratch.rows.iter().enumerate() {
            let sequence = &sequences.rows[row as usize];
            let appends = counts.is_none_or(|counts| counts[at] > 0);
            if sequence.open() == 0 && appends && !sequence.length.is_multiple_of(config.block_size()) {
                let Some(&tail) = sequences.tables[row as usize].last() else { continue };
                if pool.has_children(tail) {
                    pool.copy_first.push(tail);
                }
            }
        }
    }

    /// An id that is given for a token of a prompt must be the prompt's.
    #[inline]
    pub(crate) fn check_kept_ids(
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
                let id = self.sequences.ids[row as usize];
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
                return Err(too_long(&manager.config, manager.sequences.ids[row as usize], length));
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
        let mut scratch = std::mem::take(&mut self.scratch);
        let Scratch { rows, planned, .. } = &mut scratch;
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
        for &row in &*rows {
            planned[row as usize] = 0;
        }
        self.scratch = scratch;
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
            if written > sequence.open() {
                let length = sequence.length.saturating_add(*already);
                if *already == 0 && !length.is_multiple_of(config.block_size()) {
                    // The first write into a tail that may be shared; later ones find it our own.
                    let table = &sequences.tables[row as usize];
                    let tail = table[table.len() - 1];
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
pub(crate) fn count_tokens(num_rows: usize, counts: Option<&[u64]>) -> u64 {
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
pub(crate) fn too_long(config: &Config, id: SequenceId, num_tokens: u64) -> Error {
    let most = config.max_sequence_length();
    let reason = format!("sequence {id}: {num_tokens} tokens, `max_sequence_length` is {most}");
    Error::SequenceTooLong { reason }
}

/// Blocks that appending `num_tokens` to one sequence takes, exactly.
pub(crate) fn demand(
    config: &Config,
    pool: &Pool,
    sequence: &Sequence,
    table: &[BlockId],
    num_tokens: u64,
) -> u64 {
    let (length, open) = (sequence.length, sequence.open());
    if num_tokens <= open {
        return 0;
    }
    let opened = config.blocks_for(length.saturating_add(num_tokens)) - config.blocks_for(length);
    let copied = open == 0
        && !length.is_multiple_of(config.block_size())
        && table.last().is_some_and(|&tail| pool.must_copy(tail));
    opened.saturating_add(u64::from(copied))
}
