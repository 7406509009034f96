//! Translation: from tokens to blocks and slots, and from many sequences to the arrays that kernels read. Reads only.
//!
//! Costs: O(1) to find a sequence or a token, O(what is written) otherwise.

use super::BlockManager;
use super::append::reserve_slots;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId, Slot};
use crate::sequences::Place;

impl BlockManager {
    /// The block and the offset in it of an existing token. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Slot`] past the length.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 6, None, &mut Vec::new())?;
    /// assert_eq!(manager.locate(1, 5)?, (1, 1));
    /// assert_eq!(manager.locate(1, 6).unwrap_err().to_string(), "position 6 is past the 6 tokens of sequence 1");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn locate(&self, sequence_id: SequenceId, position: u64) -> Result<(BlockId, u64)> {
        let sequence = self.sequences.get(sequence_id)?;
        if position >= sequence.length() {
            let length = sequence.length();
            let reason = format!("position {position} is past the {length} tokens of sequence {sequence_id}");
            return Err(Error::Slot { reason });
        }
        let block = sequence.table[(position / self.config.block_size()) as usize];
        Ok((block, position % self.config.block_size()))
    }

    /// Adds the slots of the existing tokens `start..stop` to `slots`. O(tokens).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Slot`] if the range runs backwards or past the length.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 6, None, &mut Vec::new())?;
    /// let mut slots = Vec::new();
    /// manager.slots(1, 3, 6, &mut slots)?;
    /// assert_eq!(slots, [3, 4, 5]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn slots(&self, sequence_id: SequenceId, start: u64, stop: u64, slots: &mut Vec<Slot>) -> Result<()> {
        let sequence = self.sequences.get(sequence_id)?;
        if start > stop || stop > sequence.length() {
            let length = sequence.length();
            let reason = format!(
                "positions {start} to {stop} are not a range of the {length} tokens of sequence {sequence_id}"
            );
            return Err(Error::Slot { reason });
        }
        reserve_slots(slots, stop - start, "stop")?;
        let block_size = self.config.block_size();
        let mut position = start;
        while position < stop {
            let offset = position % block_size;
            let run = (block_size - offset).min(stop - position);
            let first = self.config.slot(sequence.table[(position / block_size) as usize], offset);
            slots.extend(first..first + run as Slot);
            position += run;
        }
        Ok(())
    }

    /// Tokens that own a slot. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.sequence_length(1)?, 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn sequence_length(&self, sequence_id: SequenceId) -> Result<u64> {
        self.sequences.get(sequence_id).map(|sequence| sequence.length())
    }

    /// The block table: logical block → physical block. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 9, None, &mut Vec::new())?;
    /// assert_eq!(manager.block_table(1)?, [0, 1, 2]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn block_table(&self, sequence_id: SequenceId) -> Result<&[BlockId]> {
        self.sequences.get(sequence_id).map(|sequence| sequence.table)
    }

    /// The ids of all sequences, ascending. O(n log n).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(9)?;
    /// manager.create_sequence(3)?;
    /// assert_eq!(manager.sequence_ids(), [3, 9]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn sequence_ids(&self) -> Vec<SequenceId> {
        let mut ids: Vec<SequenceId> = self.sequences.iter().map(|sequence| sequence.id).collect();
        ids.sort_unstable();
        ids
    }

    /// The longest block table of a batch, in entries; 0 for an empty batch. O(ids).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for the first id that names none.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 9, None, &mut Vec::new())?;
    /// assert_eq!(manager.longest_table(&[1])?, 3);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn longest_table(&self, ids: &[SequenceId]) -> Result<usize> {
        let mut longest = 0;
        for (at, &id) in ids.iter().enumerate() {
            longest = longest.max(self.sequences.table(self.place_near(id, at)?).len());
        }
        Ok(longest)
    }

    /// Where the sequence named as number `at` of a batch lives, looked for where the last batch found its own.
    #[inline]
    fn place_near(&self, sequence_id: SequenceId, at: usize) -> Result<Place> {
        let guess = self.scratch.places.get(at).copied().unwrap_or(Place::NOWHERE);
        self.sequences.find_near(sequence_id, guess)
    }

    /// Writes the tables of a batch into `out`, ids × `max_blocks` entries, row by row, each padded with −1.
    /// O(ids × `max_blocks`).
    ///
    /// # Errors
    /// `out` is not touched on an error. [`Error::UnknownSequence`]; [`Error::Argument`] if `out` has another size
    /// than ids × `max_blocks` or a table is longer than `max_blocks`.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 5, None, &mut Vec::new())?;
    /// let mut tables = [0; 3];
    /// manager.write_block_tables(&[1], 3, &mut tables)?;
    /// assert_eq!(tables, [0, 1, -1]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn write_block_tables(&self, ids: &[SequenceId], max_blocks: usize, out: &mut [i32]) -> Result<()> {
        self.check_tables(ids, max_blocks, out.len())?;
        for (at, (row, &id)) in out.chunks_exact_mut(max_blocks.max(1)).zip(ids).enumerate() {
            let table = self.sequences.table(self.place_near(id, at)?);
            let (entries, padding) = row.split_at_mut(table.len());
            for (entry, &block) in entries.iter_mut().zip(table) {
                *entry = block as i32;
            }
            padding.fill(-1);
        }
        Ok(())
    }

    /// The tables of `ids` fit rows of `max_blocks` entries, `num_entries` in all.
    fn check_tables(&self, ids: &[SequenceId], max_blocks: usize, num_entries: usize) -> Result<()> {
        if ids.len().checked_mul(max_blocks) != Some(num_entries) {
            let wanted = format!("{} × {max_blocks} entries", ids.len());
            return Err(Error::argument("out", wanted, num_entries));
        }
        let longest = self.longest_table(ids)?;
        if longest > max_blocks {
            let wanted = format!("at least {longest}, the longest table");
            return Err(Error::argument("max_blocks", wanted, max_blocks));
        }
        Ok(())
    }

    /// Writes the lengths of a batch into `out`, one entry an id. O(ids).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if `out` has another size or a length does not fit an int32.
    /// `out` may have been written up to the offending row.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 5, None, &mut Vec::new())?;
    /// let mut lengths = [0];
    /// manager.write_seq_lens(&[1], &mut lengths)?;
    /// assert_eq!(lengths, [5]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn write_seq_lens(&self, ids: &[SequenceId], out: &mut [i32]) -> Result<()> {
        if ids.len() != out.len() {
            return Err(Error::argument("out", format!("{} entries", ids.len()), out.len()));
        }
        for (at, (entry, &id)) in out.iter_mut().zip(ids).enumerate() {
            let length = self.sequences.counters(self.place_near(id, at)?).length();
            *entry = i32::try_from(length).map_err(|_| {
                Error::argument(
                    "ids",
                    "lengths that fit an int32",
                    format!("{length} tokens in sequence {id}"),
                )
            })?;
        }
        Ok(())
    }
}
