//! What an append would take, and whether it may: checked and settled before anything changes.
//!
//! An upper bound that needs no look at the sequences is compared with the blocks at hand; only when the pool is nearly
//! empty is the exact demand counted, by playing the batch through on scratch memory that is kept between calls.
//!
//! Costs: O(rows), O(ids) where a prompt's ids are compared, nothing allocated once warm.

use super::BlockManager;
use super::scratch::Scratch;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::{SequenceId, TokenId};
use crate::sequences::Place;

impl BlockManager {
    /// Settles the demand of the sequences in `scratch.places`; returns how many slots they get.
    pub(super) fn settle_found(
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
        let num_rows = self.scratch.places.len();
        let free = u64::from(self.pool.num_available());
        if demand_bound(&self.config, num_rows, counts) > free {
            self.settle_exactly(counts, free)?;
        }
        Ok(count_tokens(num_rows, counts))
    }

    /// Before a settled batch: finds the tails that have children in the index now, so that each is copied by whoever
    /// appends to it, as settled, even if the batch itself evicts the children first.
    #[inline]
    pub(super) fn note_parents(&mut self, counts: Option<&[u64]>) {
        let Self { config, pool, sequences, scratch, .. } = self;
        if pool.num_cached() == 0
            || demand_bound(config, scratch.places.len(), counts) <= u64::from(pool.num_free())
        {
            return; // nothing will be evicted
        }
        for (at, &place) in scratch.places.iter().enumerate() {
            let sequence = sequences.view(place);
            let appends = counts.is_none_or(|counts| counts[at] > 0);
            if sequence.open() == 0 && appends && !sequence.length().is_multiple_of(config.block_size()) {
                let tail = sequence.table.last().copied();
                if let Some(tail) = tail.filter(|&tail| pool.has_children(tail)) {
                    pool.copy_first(tail);
                }
            }
        }
    }

    /// An id that is given for a token of a prompt must be the prompt's.
    #[inline]
    pub(super) fn check_kept_ids(
        &self,
        place: Place,
        position: u64,
        token_ids: &[TokenId],
        argument: &'static str,
    ) -> Result<()> {
        let chain = self.sequences.chain(place);
        if !chain.has_ids_past(position) {
            return Ok(());
        }
        match chain.first_conflict(position, token_ids) {
            None => Ok(()),
            Some((position, kept, got)) => {
                let id = self.sequences.id(place);
                let wanted = format!("{kept}, the prompt's id at position {position} of sequence {id}");
                Err(Error::argument(argument, wanted, got))
            }
        }
    }

    fn check_kept_batch(&mut self, counts: Option<&[u64]>, token_ids: &[TokenId]) -> Result<()> {
        let is_past = |&place: &Place| {
            self.sequences.chain(place).has_ids_past(self.sequences.counters(place).length())
        };
        if !self.scratch.places.iter().any(is_past) {
            return Ok(());
        }
        let mut token_ids = token_ids;
        self.play(counts, |manager, place, length, count| {
            let (of_row, rest) = token_ids.split_at(count as usize);
            token_ids = rest;
            manager.check_kept_ids(place, length, of_row, "token_ids")
        })
    }

    fn check_lengths(&mut self, counts: Option<&[u64]>) -> Result<()> {
        self.play(counts, |manager, place, length, count| {
            let length = length.saturating_add(count);
            if count > 0 && length > manager.config.max_sequence_length() {
                return Err(too_long(&manager.config, manager.sequences.id(place), length));
            }
            Ok(())
        })
    }

    /// Calls `check(place, length before, count)` for each mention of the batch in `scratch.places`, in order.
    fn play(
        &mut self,
        counts: Option<&[u64]>,
        mut check: impl FnMut(&Self, Place, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let Scratch { places, planned, .. } = &mut scratch;
        planned.resize(self.sequences.num_places(), 0);
        let mut checked = Ok(());
        for (at, &place) in places.iter().enumerate() {
            let count = counts.map_or(1, |counts| counts[at]);
            let already = &mut planned[place.index()];
            let length = self.sequences.counters(place).length().saturating_add(*already);
            *already = already.saturating_add(count);
            checked = check(self, place, length, count);
            if checked.is_err() {
                break;
            }
        }
        scratch.forget_plans();
        self.scratch = scratch;
        checked
    }

    /// Plays the batch in `scratch.places` through without changing a table. The demand is exact: of `r` holders of a
    /// tail that all append to it, `r − 1` copy it and the last one writes in place; a tail with children in the index
    /// is copied by all.
    fn settle_exactly(&mut self, counts: Option<&[u64]>, free: u64) -> Result<()> {
        let Self { config, pool, sequences, scratch, .. } = self;
        let Scratch { places, planned, leaving, .. } = scratch;
        planned.resize(sequences.num_places(), 0);
        let mut needed = 0_u64;
        let mut first_lacking = None;
        for (index, &place) in places.iter().enumerate() {
            let count = counts.map_or(1, |counts| counts[index]);
            let sequence = sequences.view(place);
            let already = &mut planned[place.index()];
            let written = already.saturating_add(count);
            if written > sequence.open() {
                let length = sequence.length().saturating_add(*already);
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
        leaving.clear();
        scratch.forget_plans();
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
pub(super) fn count_tokens(num_rows: usize, counts: Option<&[u64]>) -> u64 {
    counts.map_or(num_rows as u64, |counts| counts.iter().fold(0, |sum, &count| sum.saturating_add(count)))
}

/// The refusal of `num_tokens` in one sequence.
#[cold]
pub(super) fn too_long(config: &Config, id: SequenceId, num_tokens: u64) -> Error {
    let most = config.max_sequence_length();
    let reason = format!("sequence {id}: {num_tokens} tokens, `max_sequence_length` is {most}");
    Error::SequenceTooLong { reason }
}
