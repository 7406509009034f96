//! The public face: one manager of one pool. It owns the pool, the table of sequences and the ledger of copies, and
//! changes them together; the appends stand in `append`, the audit in `audit`.
//!
//! Each method says what it costs, what it refuses, and has an example that runs.

use rustc_hash::FxHashMap;

use crate::append::{Scratch, reserve_slots};
use crate::config::MAX_SEQUENCE_ID;
use crate::copies::CopyLedger;
use crate::pool::Pool;
use crate::sequence::{Sequence, SequenceTable};
use crate::{BlockId, Config, Error, Result, SequenceId, Slot, Stats};

/// Maps the tokens of many sequences to the blocks of one pool. See the [crate] documentation for the design.
#[derive(Clone, Debug)]
pub struct BlockManager {
    pub(crate) config: Config,
    pub(crate) pool: Pool,
    pub(crate) copies: CopyLedger,
    pub(crate) sequences: SequenceTable,
    pub(crate) scratch: Scratch,
}

impl BlockManager {
    /// An empty pool of the given shape. Touches O(1) memory; 25 bytes a block are reserved.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no memory for the bookkeeping.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let manager = BlockManager::new(Config::new(4, 16)?)?;
    /// assert_eq!(manager.free_blocks(), [0, 1, 2, 3]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn new(config: Config) -> Result<Self> {
        Ok(Self {
            config,
            pool: Pool::new(&config)?,
            copies: CopyLedger::new(config.num_blocks()),
            sequences: SequenceTable::default(),
            scratch: Scratch::default(),
        })
    }

    /// The shape of the pool. O(1).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let manager = BlockManager::new(Config::new(4, 16)?)?;
    /// assert_eq!((manager.config().num_blocks(), manager.config().block_size()), (4, 16));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    // ---- sequences -------------------------------------------------------------------------------------------------

    /// Makes an empty sequence, which holds no block yet. O(1).
    ///
    /// # Errors
    /// [`Error::DuplicateSequence`]; [`Error::Argument`] if the id is above 2⁶³ − 1.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config, Error};
    /// let mut manager = BlockManager::new(Config::new(4, 16)?)?;
    /// manager.create_sequence(7)?;
    /// assert_eq!(manager.create_sequence(7), Err(Error::DuplicateSequence { sequence_id: 7 }));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn create_sequence(&mut self, sequence_id: SequenceId) -> Result<()> {
        self.check_new_id(sequence_id, "sequence_id")?;
        self.sequences.insert(sequence_id);
        Ok(())
    }

    /// Gives every block of the sequence back, last block first, and forgets the id. O(blocks).
    ///
    /// A block that others hold stays live; one that an untaken copy reads is fenced until the copy is taken. A copy
    /// owed into one of its blocks is dropped.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], also for a second release.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 2)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 3, &mut Vec::new())?;
    /// manager.release_sequence(1)?;
    /// assert_eq!(manager.free_blocks(), [0, 1, 2, 3]); // 1 was given back before 0
    /// assert!(manager.release_sequence(1).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn release_sequence(&mut self, sequence_id: SequenceId) -> Result<()> {
        let row = self.sequences.find(sequence_id)?;
        self.give_back(row, 0);
        self.sequences.remove(row);
        Ok(())
    }

    /// Rolls the sequence back to its first `num_tokens` tokens. Surplus blocks are given back, last first; a shared
    /// tail is copied by the next append only. O(blocks given back).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if the sequence is shorter.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 9, &mut Vec::new())?;
    /// manager.truncate_sequence(1, 5)?;
    /// assert_eq!(manager.block_table(1)?, [0, 1]);
    /// assert_eq!(manager.append_token(1)?, 5);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn truncate_sequence(&mut self, sequence_id: SequenceId, num_tokens: u64) -> Result<()> {
        let row = self.sequences.find(sequence_id)?;
        let length = self.sequences.rows[row as usize].length;
        if num_tokens > length {
            return Err(Error::argument("num_tokens", format!("0 to {length} tokens"), num_tokens));
        }
        self.give_back(row, self.config.blocks_for(num_tokens) as usize);
        let sequence = &mut self.sequences.rows[row as usize];
        sequence.length = num_tokens;
        sequence.open = 0; // the new tail may be shared
        Ok(())
    }

    /// Makes `child` from the first `num_tokens` tokens of `parent` (all of them, if `None`) by sharing the blocks
    /// that hold them, the partly filled last one too. No block is taken; the first of them to write a shared tail
    /// copies it. O(blocks).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for the parent; [`Error::DuplicateSequence`] or [`Error::Argument`] for the child's
    /// id; [`Error::Argument`] if the parent is shorter; [`Error::State`] if a block that would be shared still waits
    /// for an untaken copy: the child would read what is not written.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 6, &mut Vec::new())?;
    /// manager.fork_sequence(1, 2, Some(3))?;
    /// assert_eq!(manager.block_table(2)?, [0]);
    /// assert_eq!(manager.ref_count(0)?, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn fork_sequence(
        &mut self,
        parent: SequenceId,
        child: SequenceId,
        num_tokens: Option<u64>,
    ) -> Result<()> {
        let parent_row = self.sequences.find(parent)? as usize;
        self.check_new_id(child, "child")?;
        let parent_length = self.sequences.rows[parent_row].length;
        let num_tokens = num_tokens.unwrap_or(parent_length);
        if num_tokens > parent_length {
            return Err(Error::argument("num_tokens", format!("0 to {parent_length} tokens"), num_tokens));
        }
        let num_shared = self.config.blocks_for(num_tokens) as usize;
        self.check_no_copy_owed(parent, &self.sequences.rows[parent_row].table[..num_shared])?;

        let child_row = self.sequences.insert(child) as usize;
        let mut table = std::mem::take(&mut self.sequences.rows[child_row].table);
        let source = &mut self.sequences.rows[parent_row];
        table.extend_from_slice(&source.table[..num_shared]);
        source.open = 0; // its tail may be shared from now on
        for &block in &table {
            self.pool.share(block);
        }
        let sequence = &mut self.sequences.rows[child_row];
        (sequence.length, sequence.table) = (num_tokens, table);
        Ok(())
    }

    /// Says that the keys and values of the first `num_tokens` tokens are written. Without a prefix index every token
    /// counts as computed when it is appended, so this only checks. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] unless `num_tokens` is the length.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_token(1)?;
    /// manager.commit(1, 1)?;
    /// assert!(manager.commit(1, 2).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn commit(&self, sequence_id: SequenceId, num_tokens: u64) -> Result<()> {
        let length = self.sequences.get(sequence_id)?.length;
        // From the computed tokens to the length: here the two are one.
        if num_tokens == length {
            return Ok(());
        }
        Err(Error::argument("num_tokens", format!("{length} to {length} tokens"), num_tokens))
    }

    /// Hands over the owed copies as `(source, destination)` pairs, oldest first, and forgets them. To be run before
    /// the next write, in any order. Sources that nobody holds any more become free, in the order in which they lost
    /// their last holder. O(pairs).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_token(1)?;
    /// manager.fork_sequence(1, 2, None)?;
    /// manager.append_token(1)?;
    /// assert_eq!(manager.take_copies(), [(0, 1)]);
    /// assert_eq!(manager.take_copies(), []);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn take_copies(&mut self) -> Vec<(BlockId, BlockId)> {
        self.copies.take(&mut self.pool)
    }

    // ---- translation -----------------------------------------------------------------------------------------------

    /// The block and the offset in it of an existing token. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Slot`] past the length.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 6, &mut Vec::new())?;
    /// assert_eq!(manager.locate(1, 5)?, (1, 1));
    /// assert_eq!(manager.locate(1, 6).unwrap_err().to_string(), "position 6 is past the 6 tokens of sequence 1");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn locate(&self, sequence_id: SequenceId, position: u64) -> Result<(BlockId, u64)> {
        let sequence = self.sequences.get(sequence_id)?;
        if position >= sequence.length {
            let length = sequence.length;
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
    /// manager.append_tokens(1, 6, &mut Vec::new())?;
    /// let mut slots = Vec::new();
    /// manager.slots(1, 3, 6, &mut slots)?;
    /// assert_eq!(slots, [3, 4, 5]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn slots(&self, sequence_id: SequenceId, start: u64, stop: u64, slots: &mut Vec<Slot>) -> Result<()> {
        let sequence = self.sequences.get(sequence_id)?;
        if start > stop || stop > sequence.length {
            let length = sequence.length;
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
        self.sequences.get(sequence_id).map(|sequence| sequence.length)
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
    /// manager.append_tokens(1, 9, &mut Vec::new())?;
    /// assert_eq!(manager.block_table(1)?, [0, 1, 2]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn block_table(&self, sequence_id: SequenceId) -> Result<&[BlockId]> {
        self.sequences.get(sequence_id).map(|sequence| sequence.table.as_slice())
    }

    /// The ids of all sequences, in the order of creation. O(n log n).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(9)?;
    /// manager.create_sequence(3)?;
    /// assert_eq!(manager.sequence_ids(), [9, 3]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn sequence_ids(&self) -> Vec<SequenceId> {
        let mut sequences: Vec<&Sequence> = self.sequences.iter().collect();
        sequences.sort_unstable_by_key(|sequence| sequence.serial);
        sequences.iter().map(|sequence| sequence.id).collect()
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
    /// manager.append_tokens(1, 9, &mut Vec::new())?;
    /// assert_eq!(manager.longest_table(&[1])?, 3);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn longest_table(&self, ids: &[SequenceId]) -> Result<usize> {
        ids.iter().try_fold(0, |longest, &id| Ok(longest.max(self.block_table(id)?.len())))
    }

    /// Writes the tables of a batch into `out` [ids, `max_blocks`], row by row, each padded with −1.
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
    /// manager.append_tokens(1, 5, &mut Vec::new())?;
    /// let mut tables = [0; 3];
    /// manager.write_block_tables(&[1], 3, &mut tables)?;
    /// assert_eq!(tables, [0, 1, -1]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn write_block_tables(&self, ids: &[SequenceId], max_blocks: usize, out: &mut [i32]) -> Result<()> {
        if ids.len().checked_mul(max_blocks) != Some(out.len()) {
            let wanted = format!("{} × {max_blocks} entries", ids.len());
            return Err(Error::argument("out", wanted, out.len()));
        }
        let longest = self.longest_table(ids)?;
        if longest > max_blocks {
            return Err(Error::argument(
                "max_blocks",
                format!("at least {longest}, the longest table"),
                max_blocks,
            ));
        }
        if max_blocks == 0 {
            return Ok(());
        }
        for (row, &id) in out.chunks_exact_mut(max_blocks).zip(ids) {
            let table = self.block_table(id)?;
            let (entries, padding) = row.split_at_mut(table.len());
            for (entry, &block) in entries.iter_mut().zip(table) {
                *entry = block as i32;
            }
            padding.fill(-1);
        }
        Ok(())
    }

    /// Writes the lengths of a batch into `out` [ids]. O(ids).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if `out` has another size or a length does not fit an int32.
    /// `out` may have been written up to the offending row.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 5, &mut Vec::new())?;
    /// let mut lengths = [0];
    /// manager.write_seq_lens(&[1], &mut lengths)?;
    /// assert_eq!(lengths, [5]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn write_seq_lens(&self, ids: &[SequenceId], out: &mut [i32]) -> Result<()> {
        if ids.len() != out.len() {
            return Err(Error::argument("out", format!("{} entries", ids.len()), out.len()));
        }
        for (entry, &id) in out.iter_mut().zip(ids) {
            let length = self.sequence_length(id)?;
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

    // ---- blocks held by the caller ---------------------------------------------------------------------------------

    /// Takes a block outside any sequence; the caller holds it until [`free_block`](Self::free_block). O(1).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`].
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// assert_eq!(manager.allocate_block()?, 0);
    /// assert_eq!(manager.allocate_block()?, 1);
    /// assert_eq!(manager.allocate_block().unwrap_err().to_string(), "need 1 blocks, 0 free of 2");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn allocate_block(&mut self) -> Result<BlockId> {
        if self.pool.num_free() == 0 {
            return Err(self.pool.out_of_blocks(1, None));
        }
        let block = self.pool.take();
        self.pool.held[block as usize] = true;
        Ok(block)
    }

    /// Gives back a block that [`allocate_block`](Self::allocate_block) handed out. O(1).
    ///
    /// # Errors
    /// [`Error::Argument`] if the pool has no such block; [`Error::State`] if no caller holds it: never allocated,
    /// freed already, or a sequence's.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// let block = manager.allocate_block()?;
    /// manager.free_block(block)?;
    /// assert_eq!(manager.free_block(block).unwrap_err().to_string(), "block 0 is not held by a caller");
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn free_block(&mut self, block: BlockId) -> Result<()> {
        self.check_block(block)?;
        if !std::mem::take(&mut self.pool.held[block as usize]) {
            return Err(Error::State { reason: format!("block {block} is not held by a caller") });
        }
        self.pool.drop_ref(block);
        Ok(())
    }

    /// Holders of a block: table entries that name it, plus a caller who allocated it. O(1).
    ///
    /// # Errors
    /// [`Error::Argument`] if the pool has no such block.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let manager = BlockManager::new(Config::new(2, 4)?)?;
    /// assert_eq!(manager.ref_count(1)?, 0);
    /// assert!(manager.ref_count(2).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn ref_count(&self, block: BlockId) -> Result<u32> {
        self.check_block(block)?;
        Ok(self.pool.ref_count(block))
    }

    // ---- figures ---------------------------------------------------------------------------------------------------

    /// Blocks that can be handed out now. O(1).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.allocate_block()?;
    /// assert_eq!(manager.num_free_blocks(), 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn num_free_blocks(&self) -> u32 {
        self.pool.num_free()
    }

    /// Sequences that exist. O(1).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.create_sequence(1)?;
    /// assert_eq!(manager.num_sequences(), 1);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// The free blocks in the order of hand-out, for people and lessons. O(N).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// for _ in 0..4 {
    ///     manager.allocate_block()?;
    /// }
    /// for block in [2, 0, 3] {
    ///     manager.free_block(block)?;
    /// }
    /// assert_eq!(manager.free_blocks(), [3, 0, 2]); // last freed first
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn free_blocks(&self) -> Vec<BlockId> {
        self.pool.free_blocks().collect()
    }

    /// The counters. O(1).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.allocate_block()?;
    /// let stats = manager.stats();
    /// assert_eq!((stats.live, stats.free, stats.peak_live), (1, 3, 1));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            num_blocks: u64::from(self.config.num_blocks()),
            live: u64::from(self.pool.live),
            cached: 0,
            fenced: u64::from(self.pool.num_fenced()),
            free: u64::from(self.pool.num_free()),
            num_sequences: self.sequences.len() as u64,
            num_copies: self.copies.num_owed_ever,
            peak_live: u64::from(self.pool.peak_live),
        }
    }

    /// Token positions of live blocks that hold no token, each physical block once, whoever fills it furthest; a block
    /// held by a caller holds none. O(table entries).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 10, &mut Vec::new())?;
    /// assert_eq!(manager.internal_fragmentation_tokens(), 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn internal_fragmentation_tokens(&self) -> u64 {
        let block_size = self.config.block_size();
        let mut num_filled = 0;
        let mut shared: FxHashMap<BlockId, u64> = FxHashMap::default();
        for sequence in self.sequences.iter() {
            let mut remaining = sequence.length;
            for &block in &sequence.table {
                let filled = remaining.min(block_size);
                remaining -= filled;
                if self.pool.ref_count(block) == 1 {
                    num_filled += filled;
                } else {
                    let most = shared.entry(block).or_default();
                    *most = filled.max(*most);
                }
            }
        }
        num_filled += shared.values().sum::<u64>();
        u64::from(self.pool.live) * block_size - num_filled
    }

    /// Token positions of one sequence's blocks that it holds no token in. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 10, &mut Vec::new())?;
    /// assert_eq!(manager.sequence_fragmentation_tokens(1)?, 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn sequence_fragmentation_tokens(&self, sequence_id: SequenceId) -> Result<u64> {
        let sequence = self.sequences.get(sequence_id)?;
        Ok(sequence.table.len() as u64 * self.config.block_size() - sequence.length)
    }

    // ---- shared steps ----------------------------------------------------------------------------------------------

    fn check_new_id(&self, sequence_id: SequenceId, argument: &'static str) -> Result<()> {
        if sequence_id > MAX_SEQUENCE_ID {
            return Err(Error::argument(argument, format!("an id from 0 to {MAX_SEQUENCE_ID}"), sequence_id));
        }
        if self.sequences.contains(sequence_id) {
            return Err(Error::DuplicateSequence { sequence_id });
        }
        Ok(())
    }

    fn check_block(&self, block: BlockId) -> Result<()> {
        let last = self.config.num_blocks() - 1;
        if block > last {
            return Err(Error::argument("block_id", format!("a block from 0 to {last}"), block));
        }
        Ok(())
    }

    fn check_no_copy_owed(&self, parent: SequenceId, blocks: &[BlockId]) -> Result<()> {
        if self.copies.len() == 0 {
            return Ok(());
        }
        for &block in blocks {
            if let Some(source) = self.copies.source_of(block) {
                let reason = format!(
                    "sequence {parent} can't be forked here: block {block} still waits for its copy of block {source} \
                     (run `take_copies` first)"
                );
                return Err(Error::State { reason });
            }
        }
        Ok(())
    }

    /// Gives back the blocks of a row from logical block `keep` on, last first. Sources of copies that are dropped with
    /// their destinations lost their holders before these blocks do, so they become free first. (There is at most one:
    /// a table never holds two untaken destinations, as only the tail is copied and no block behind an untaken
    /// destination can be shared.)
    fn give_back(&mut self, row: u32, keep: usize) {
        let surplus = &self.sequences.rows[row as usize].table[keep..];
        if self.copies.len() > 0 {
            for &block in surplus {
                self.copies.drop_into(&mut self.pool, block);
            }
        }
        for &block in surplus.iter().rev() {
            self.pool.drop_ref(block);
        }
        self.sequences.rows[row as usize].table.truncate(keep);
    }
}
