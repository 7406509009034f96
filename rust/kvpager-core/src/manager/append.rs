//! Appends: new tokens get their slots.
//!
//! An append never fails half-way: `demand` settles first what it takes, then blocks are taken and nothing can refuse.
//!
//! Costs: O(tokens) for every call, at most one hash lookup per mention of a sequence (none where the batch before
//! named it at the same place), no heap allocation once the scratch and the caller's vector have grown to the size of
//! the batch.

use super::BlockManager;
use super::demand::{count_tokens, too_long};
use crate::error::{Error, Result};
use crate::ids::{SequenceId, Slot, TokenId};
use crate::place::Writer;
use crate::prompt::{check_num_ids, check_token_ids};
use crate::sequences::Place;

impl BlockManager {
    /// Appends one token, with its id if it is known, and returns its slot. O(1).
    ///
    /// A position that opens a block takes one. A tail that others hold too is copied before the write: it takes a
    /// block, which replaces the table's last entry, and the pair is owed (see [`take_copies`](Self::take_copies)).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::OutOfBlocks`] if the append takes a block and none is free;
    /// [`Error::Argument`] for a bad id, or one that differs from the prompt's at its position.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.append_token(1, None)?, 0);
    /// assert_eq!(manager.append_token(1, Some(70))?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[inline]
    pub fn append_token(&mut self, sequence_id: SequenceId, token_id: Option<TokenId>) -> Result<Slot> {
        let token_ids = token_id.as_slice();
        check_token_ids(token_ids, "token_id")?;
        let place = self.sequences.find(sequence_id)?;
        self.settle_one(place, 1, token_ids, "token_id")?;
        self.sequences.append_ids(place, token_ids);
        Ok(self.writer().append_one(place))
    }

    /// Appends a run of `n` tokens (a prompt, a chunk, drafts), with their ids if they are known, and adds their slots
    /// to `slots`. O(tokens).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::OutOfBlocks`] with the blocks that the whole run takes;
    /// [`Error::Argument`] if `token_ids` are not `n`, for a bad id, or one that differs from the prompt's at its
    /// position, or if there is no memory for the slots.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// let mut slots = Vec::new();
    /// manager.append_tokens(1, 3, Some(&[70, 71, 72]), &mut slots)?;
    /// manager.append_tokens(1, 2, None, &mut slots)?;
    /// assert_eq!(slots, [0, 1, 2, 3, 4]);
    /// assert_eq!(
    ///     manager.append_tokens(1, 4, None, &mut slots).unwrap_err().to_string(),
    ///     "need 1 blocks, 0 free of 2",
    /// );
    /// assert_eq!(manager.sequence_length(1)?, 5);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_tokens(
        &mut self,
        sequence_id: SequenceId,
        n: u64,
        token_ids: Option<&[TokenId]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        let argument = if token_ids.is_some() { "token_ids" } else { "n" };
        if let Some(token_ids) = token_ids {
            check_token_ids(token_ids, argument)?;
            check_num_ids(n, "one for each new token", token_ids)?;
        }
        let token_ids = token_ids.unwrap_or_default();
        let place = self.sequences.find(sequence_id)?;
        self.settle_one(place, n, token_ids, argument)?;
        reserve_slots(slots, n, argument)?;
        self.sequences.append_ids(place, token_ids);
        self.writer().append(place, n, slots);
        Ok(())
    }

    /// Refuses what one sequence can't get.
    #[inline]
    fn settle_one(
        &mut self,
        place: Place,
        n: u64,
        token_ids: &[TokenId],
        argument: &'static str,
    ) -> Result<()> {
        let length = self.sequences.counters(place).length();
        self.check_kept_ids(place, length, token_ids, argument)?;
        let length = length.saturating_add(n);
        if n > 0 && length > self.config.max_sequence_length() {
            return Err(too_long(&self.config, self.sequences.id(place), length));
        }
        let needed = self.writer().demand(place, n);
        if needed > u64::from(self.pool.num_available()) {
            return Err(self.pool.out_of_blocks(needed, None));
        }
        Ok(())
    }

    /// Appends `counts[i]` tokens (one each, if `None`) to `ids[i]`, in order, and adds their slots to `slots`.
    /// `token_ids`, if they are known, has one for each new token, row after row. An id named twice appends twice.
    /// O(tokens), at most one hash lookup per id.
    ///
    /// # Errors
    /// Nothing is appended to any sequence if one can't be: [`Error::Argument`] if `counts` has another length than
    /// `ids`, `token_ids` another than all tokens, for a bad token id or one that differs from a prompt's at its
    /// position, or if there is no memory for the slots; [`Error::UnknownSequence`] for the first id that names none;
    /// [`Error::OutOfBlocks`] with the blocks the whole batch takes and the first row that lacks one.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config, Error};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.create_sequence(2)?;
    /// let mut slots = Vec::new();
    /// manager.append_batch(&[1, 2, 1], Some(&[2, 1, 2]), None, &mut slots)?;
    /// assert_eq!(slots, [0, 1, 4, 2, 3]);
    ///
    /// let refused = manager.append_batch(&[2, 1], None, None, &mut slots);
    /// let reason = Error::OutOfBlocks { needed: 1, free: 0, fenced: 0, total: 2, row: Some(1), watermark: 0 };
    /// assert_eq!(refused, Err(reason));
    /// assert_eq!(manager.sequence_length(2)?, 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn append_batch(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        self.find_batch(ids, counts, token_ids)?;
        self.append_found(counts, token_ids, slots)
    }

    /// What [`append_batch`](Self::append_batch) would answer, without appending: how many slots, or why not. For
    /// callers whose own memory for the slots turned out to be wrong: what is wrong with the batch is said first.
    /// O(tokens).
    ///
    /// # Errors
    /// Those of [`append_batch`](Self::append_batch).
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
        self.find_batch(ids, counts, token_ids)?;
        self.settle_found(counts, token_ids)
    }

    /// Checks the values and lengths of a batch's arguments and leaves its places in the scratch.
    fn find_batch(
        &mut self,
        ids: &[SequenceId],
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<()> {
        check_token_ids(token_ids.unwrap_or_default(), "token_ids")?;
        if let Some(counts) = counts.filter(|counts| counts.len() != ids.len()) {
            return Err(Error::argument("counts", format!("{} counts, one per id", ids.len()), counts.len()));
        }
        if let Some(token_ids) = token_ids {
            check_num_ids(count_tokens(ids.len(), counts), "one for each new token", token_ids)?;
        }
        self.scratch.find(&self.sequences, ids)
    }

    /// The append of a batch whose places stand in the scratch, one count for each and sound token ids, one for each
    /// new token.
    pub(super) fn append_found(
        &mut self,
        counts: Option<&[u64]>,
        token_ids: Option<&[TokenId]>,
        slots: &mut Vec<Slot>,
    ) -> Result<()> {
        let num_tokens = self.settle_found(counts, token_ids)?;
        reserve_slots(slots, num_tokens, "counts")?;
        self.note_parents(counts);

        let Self { config, pool, copies, sequences, scratch, .. } = self;
        let mut writer = Writer { config, pool, copies, sequences };
        let mut token_ids = token_ids;
        if counts.is_none() && token_ids.is_none() {
            // What most steps are. The length is known, so no slot asks for room.
            slots.extend(scratch.places.iter().map(|&place| writer.append_one(place)));
            pool.end_batch();
            return Ok(());
        }
        for (at, &place) in scratch.places.iter().enumerate() {
            let count = counts.map_or(1, |counts| counts[at]);
            if let Some(rest) = &mut token_ids {
                // Ids are kept before the lengths move on.
                let (of_row, behind) = rest.split_at(count as usize);
                *rest = behind;
                writer.sequences.append_ids(place, of_row);
            }
            writer.append(place, count, slots);
        }
        pool.end_batch();
        Ok(())
    }
}

/// Room for the slots of a settled call, or a refusal before anything is changed.
pub(super) fn reserve_slots(slots: &mut Vec<Slot>, num_slots: u64, argument: &'static str) -> Result<()> {
    let reserved = usize::try_from(num_slots).is_ok_and(|num_slots| slots.try_reserve(num_slots).is_ok());
    if reserved {
        return Ok(());
    }
    Err(Error::argument(argument, "as many tokens as memory holds slots for", format!("{num_slots} tokens")))
}
