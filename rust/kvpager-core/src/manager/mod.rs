//! The public face: one manager of one pool. It owns the data structures of the lower floor and changes them together.
//!
//! Here: sequences come, fork, shrink and go, and blocks are held outside of them. Prompts come in by `admission`,
//! tokens by `append`, what is written is said by `commit`; `demand` settles what any of them takes. `batches` and
//! `batch_step` drive a persistent batch. `pins` hold what is cached, `epochs` fence what is in flight. `questions` and
//! `figures` only read, `audit` recounts everything. `scratch` is their memory.
//!
//! Each method says what it costs, what it refuses, and has an example that runs.

mod admission;
mod append;
mod audit;
mod batch_step;
mod batches;
mod commit;
mod demand;
mod epochs;
mod figures;
mod pins;
mod questions;
mod scratch;

pub use admission::{Admission, AdmitOptions};
pub use batches::BatchMut;
use scratch::{Matching, Scratch};

use crate::batch::Batches;
use crate::config::{Config, MAX_SEQUENCE_ID};
use crate::copies::CopyLedger;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId};
use crate::pins::Pins;
use crate::place::Writer;
use crate::pool::Pool;
use crate::sequences::{Place, SequenceTable};
use crate::stats::Hits;

/// Maps the tokens of many sequences to the blocks of one pool. See the [crate] documentation for the design.
#[derive(Clone, Debug)]
pub struct BlockManager {
    config: Config,
    pool: Pool,
    copies: CopyLedger,
    sequences: SequenceTable,
    pins: Pins,
    hits: Hits,
    scratch: Scratch,
    matching: Matching,
    batches: Batches,
}

impl BlockManager {
    /// An empty pool of the given shape. Touches O(1) memory. At most 96 bytes a block are reserved, 25 without the
    /// index, and 4·S for the token ids of the index.
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
            pins: Pins::default(),
            hits: Hits::default(),
            scratch: Scratch::default(),
            matching: Matching::default(),
            batches: Batches::default(),
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
        Self::check_id(sequence_id, "sequence_id")?;
        self.check_new(sequence_id)?;
        self.sequences.insert(sequence_id);
        Ok(())
    }

    /// Gives every block of the sequence back, last block first, and forgets the id. O(blocks).
    ///
    /// A block that others hold stays live; one that an untaken copy reads is fenced until the copy is taken. A copy
    /// owed into one of its blocks is dropped.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], also for a second release; [`Error::State`] while it is a row of a batch.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 2)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 3, None, &mut Vec::new())?;
    /// manager.release_sequence(1)?;
    /// assert_eq!(manager.free_blocks(), [0, 1, 2, 3]); // 1 was given back before 0
    /// assert!(manager.release_sequence(1).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn release_sequence(&mut self, sequence_id: SequenceId) -> Result<()> {
        let place = self.sequences.find(sequence_id)?;
        self.batches.check_free(place, sequence_id)?;
        self.give_back(place, 0);
        self.pool.index_mut().release_namespace(self.sequences.chain(place).namespace());
        self.sequences.remove(place);
        Ok(())
    }

    /// Rolls the sequence back to its first `n` tokens. Surplus blocks are given back, last first; a shared
    /// tail is copied by the next append only. O(blocks given back).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Argument`] if the sequence is shorter.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 9, None, &mut Vec::new())?;
    /// manager.truncate_sequence(1, 5)?;
    /// assert_eq!(manager.block_table(1)?, [0, 1]);
    /// assert_eq!(manager.append_token(1, None)?, 5);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn truncate_sequence(&mut self, sequence_id: SequenceId, n: u64) -> Result<()> {
        let place = self.sequences.find(sequence_id)?;
        let length = self.sequences.counters(place).length();
        if n > length {
            return Err(Error::argument("n", format!("0 to {length} tokens"), n));
        }
        self.give_back(place, self.config.blocks_for(n) as usize);
        let index = self.pool.index();
        self.sequences.truncate(place, n, self.config.block_size(), |block| index.tokens_of(block));
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
    /// manager.append_tokens(1, 6, None, &mut Vec::new())?;
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
        let place = self.sequences.find(parent)?;
        Self::check_id(child, "child")?;
        self.check_new(child)?;
        let length = self.sequences.counters(place).length();
        let num_tokens = num_tokens.unwrap_or(length);
        if num_tokens > length {
            return Err(Error::argument("num_tokens", format!("0 to {length} tokens"), num_tokens));
        }
        let num_shared = self.config.blocks_for(num_tokens) as usize;
        self.check_no_copy_owed(parent, &self.sequences.table(place)[..num_shared])?;
        self.check_all_computed(place, num_shared)?;

        let child = self.sequences.insert(child);
        let (index, block_size) = (self.pool.index(), self.config.block_size());
        let cut = |block| index.tokens_of(block);
        self.sequences.fork((place, child), num_tokens, num_shared, block_size, cut);
        for &block in self.sequences.table(child) {
            self.pool.share(block);
        }
        self.pool.index_mut().share_namespace(self.sequences.chain(child).namespace());
        Ok(())
    }

    /// Hands over the owed copies as `(source, destination)` pairs, oldest first, and forgets them. To be run before
    /// the next write, in any order. Sources that nobody holds any more become free, in the order in which they lost
    /// their last holder. O(pairs).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(8, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_token(1, None)?;
    /// manager.fork_sequence(1, 2, None)?;
    /// manager.append_token(1, None)?;
    /// assert_eq!(manager.take_copies(), [(0, 1)]);
    /// assert_eq!(manager.take_copies(), []);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn take_copies(&mut self) -> Vec<(BlockId, BlockId)> {
        self.copies.take(&mut self.pool)
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
        if self.pool.num_available() == 0 {
            return Err(self.pool.out_of_blocks(1, None));
        }
        Ok(self.pool.hold())
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
        if !self.pool.is_held(block) {
            return Err(Error::State { reason: format!("block {block} is not held by a caller") });
        }
        self.pool.let_go_of_held(block);
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

    // ---- shared steps ----------------------------------------------------------------------------------------------

    fn check_id(sequence_id: SequenceId, argument: &'static str) -> Result<()> {
        if sequence_id > MAX_SEQUENCE_ID {
            return Err(Error::argument(argument, "an id in 0..2^63-1", sequence_id));
        }
        Ok(())
    }

    fn check_new(&self, sequence_id: SequenceId) -> Result<()> {
        if self.sequences.contains(sequence_id) {
            return Err(Error::DuplicateSequence { sequence_id });
        }
        Ok(())
    }

    fn check_block(&self, block: BlockId) -> Result<()> {
        let last = self.config.num_blocks() - 1;
        if block > last {
            return Err(Error::argument("block_id", format!("a block in 0..{last}"), block));
        }
        Ok(())
    }

    fn check_no_copy_owed(&self, parent: SequenceId, blocks: &[BlockId]) -> Result<()> {
        if self.copies.is_empty() {
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

    /// With the index, a fork would read what is not written if a shared block held an uncommitted position.
    fn check_all_computed(&self, place: Place, num_shared: usize) -> Result<()> {
        let sequence = self.sequences.view(place);
        let computed = self.computed(place);
        let shared = (num_shared as u64).saturating_mul(self.config.block_size());
        if sequence.length().min(shared) <= computed {
            return Ok(());
        }
        let block = sequence.table[(computed / self.config.block_size()) as usize];
        let reason = format!(
            "sequence {} can't be forked here: block {block} holds tokens that are not committed",
            sequence.id
        );
        Err(Error::State { reason })
    }

    /// Gives back the blocks of a sequence from logical block `keep` on, last first. Sources of copies that are dropped
    /// with their destinations lost their holders before these blocks do, so they become free first. (There is at most
    /// one: a table never holds two untaken destinations, as only the tail is copied and no block behind an untaken
    /// destination can be shared.)
    fn give_back(&mut self, place: Place, keep: usize) {
        let surplus = &self.sequences.table(place)[keep..];
        if !self.copies.is_empty() {
            for &block in surplus {
                self.copies.drop_into(&mut self.pool, block);
            }
        }
        for &block in surplus.iter().rev() {
            self.pool.drop_ref(block);
        }
        self.sequences.truncate_table(place, keep);
    }

    /// Tokens of the sequence whose keys and values are known to be written: without the index, all.
    #[inline]
    fn computed(&self, place: Place) -> u64 {
        let counters = self.sequences.counters(place);
        if self.config.prefix_caching() { counters.computed() } else { counters.length() }
    }

    /// What an append changes.
    #[inline]
    fn writer(&mut self) -> Writer<'_> {
        let Self { config, pool, copies, sequences, .. } = self;
        Writer { config, pool, copies, sequences }
    }
}
