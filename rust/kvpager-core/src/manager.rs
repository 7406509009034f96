//! The public face: one manager of one pool. It owns the pool, the table of sequences and the ledger of copies, and
//! changes them together. Here: sequences come, fork, shrink and go, and blocks are held outside of them. The appends
//! stand in `append`, prompts in `admission`, commits in `commit`, pins in `pins`, epochs in `fences`, everything that only reads in `lookup` and `figures`, the audit in `audit`.
//!
//! Each method says what it costs, what it refuses, and has an example that runs.

use crate::admission::Matching;
use crate::append::Scratch;
use crate::batch::Batches;
use crate::config::MAX_SEQUENCE_ID;
use crate::copies::CopyLedger;
use crate::pins::Pins;
use crate::pool::{HELD, Pool};
use crate::sequence::SequenceTable;
use crate::stats::Hits;
use crate::{BlockId, Config, Error, Result, SequenceId};

/// Maps the tokens of many sequences to the blocks of one pool. See the [crate] documentation for the design.
#[derive(Clone, Debug)]
pub struct BlockManager {
    pub(crate) config: Config,
    pub(crate) pool: Pool,
    pub(crate) copies: CopyLedger,
    pub(crate) sequences: SequenceTable,
    pub(crate) pins: Pins,
    pub(crate) hits: Hits,
    pub(crate) scratch: Scratch,
    pub(crate) matching: Matching,
    pub(crate) batches: Batches,
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
    /// manager.append_tokens(1, 3, &mut Vec::new())?;
    /// manager.release_sequence(1)?;
    /// assert_eq!(manager.free_blocks(), [0, 1, 2, 3]); // 1 was given back before 0
    /// assert!(manager.release_sequence(1).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn release_sequence(&mut self, sequence_id: SequenceId) -> Result<()> {
        let row = self.sequences.find(sequence_id)?;
        self.batches.check_free(row, sequence_id)?;
        self.give_back(row, 0);
        let namespace = self.sequences.chains[row as usize].namespace;
        self.pool.index.namespaces.release(namespace);
        self.sequences.remove(row);
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
    /// manager.append_tokens(1, 9, &mut Vec::new())?;
    /// manager.truncate_sequence(1, 5)?;
    /// assert_eq!(manager.block_table(1)?, [0, 1]);
    /// assert_eq!(manager.append_token(1)?, 5);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn truncate_sequence(&mut self, sequence_id: SequenceId, n: u64) -> Result<()> {
        let row = self.sequences.find(sequence_id)?;
        let length = self.sequences.rows[row as usize].length;
        if n > length {
            return Err(Error::argument("n", format!("0 to {length} tokens"), n));
        }
        self.close_direct(row);
        self.give_back(row, self.config.blocks_for(n) as usize);
        let sequence = &mut self.sequences.rows[row as usize];
        sequence.length = n;
        sequence.computed = sequence.computed.min(n);
        sequence.close_run(); // the new tail may be shared
        let (pool, block_size) = (&self.pool, self.config.block_size());
        let SequenceTable { tables, chains, .. } = &mut self.sequences;
        let table = &tables[row as usize];
        chains[row as usize].truncate(n, block_size, || pool.index.tokens_of(table[table.len() - 1]));
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
        Self::check_id(child, "child")?;
        self.check_new(child)?;
        let parent_length = self.sequences.rows[parent_row].length;
        let num_tokens = num_tokens.unwrap_or(parent_length);
        if num_tokens > parent_length {
            return Err(Error::argument("num_tokens", format!("0 to {parent_length} tokens"), num_tokens));
        }
        let num_shared = self.config.blocks_for(num_tokens) as usize;
        self.check_no_copy_owed(parent, &self.sequences.tables[parent_row][..num_shared])?;
        self.check_all_computed(parent_row as u32, num_shared)?;

        self.close_direct(parent_row as u32);
        let child_row = self.sequences.insert(child) as usize;
        let SequenceTable { rows, tables, chains, .. } = &mut self.sequences;
        rows[parent_row].close_run(); // its tail may be shared from now on
        let sequence = &mut rows[child_row];
        sequence.length = num_tokens;
        sequence.computed = num_tokens;
        sequence.close_run();
        let [source, table] = pair(tables, parent_row, child_row);
        table.extend_from_slice(sequence, &source[..num_shared]);
        for &block in &**table {
            self.pool.share(block);
        }
        let [parent_chain, chain] = pair(chains, parent_row, child_row);
        let index = &self.pool.index;
        let cut = || index.tokens_of(table[num_shared - 1]);
        chain.fork_from(parent_chain, num_tokens, self.config.block_size(), cut);
        self.pool.index.namespaces.share(chain.namespace);
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
        let block = self.pool.take();
        self.pool.flags[block as usize] |= HELD;
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
        if !self.pool.has(block, HELD) {
            return Err(Error::State { reason: format!("block {block} is not held by a caller") });
        }
        self.pool.flags[block as usize] &= !HELD;
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

    // ---- shared steps ----------------------------------------------------------------------------------------------

    pub(crate) fn check_id(sequence_id: SequenceId, argument: &'static str) -> Result<()> {
        if sequence_id > MAX_SEQUENCE_ID {
            return Err(Error::argument(argument, "an id in 0..2^63-1", sequence_id));
        }
        Ok(())
    }

    pub(crate) fn check_new(&self, sequence_id: SequenceId) -> Result<()> {
        if self.sequences.contains(sequence_id) {
            return Err(Error::DuplicateSequence { sequence_id });
        }
        Ok(())
    }

    pub(crate) fn check_block(&self, block: BlockId) -> Result<()> {
        let last = self.config.num_blocks() - 1;
        if block > last {
            return Err(Error::argument("block_id", format!("a block in 0..{last}"), block));
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

    /// With the index, a fork would read what is not written if a shared block held an uncommitted position.
    fn check_all_computed(&self, row: u32, num_shared: usize) -> Result<()> {
        let sequence = self.sequences.view(row);
        let computed = self.computed(row);
        let shared = (num_shared as u64).saturating_mul(self.config.block_size());
        if sequence.length.min(shared) <= computed {
            return Ok(());
        }
        let block = sequence.table[(computed / self.config.block_size()) as usize];
        let reason = format!(
            "sequence {} can't be forked here: block {block} holds tokens that are not committed",
            sequence.id
        );
        Err(Error::State { reason })
    }

    /// Gives back the blocks of a row from logical block `keep` on, last first. Sources of copies that are dropped with
    /// their destinations lost their holders before these blocks do, so they become free first. (There is at most one:
    /// a table never holds two untaken destinations, as only the tail is copied and no block behind an untaken
    /// destination can be shared.)
    fn give_back(&mut self, row: u32, keep: usize) {
        let SequenceTable { rows, tables, .. } = &mut self.sequences;
        let table = &mut tables[row as usize];
        let surplus = &table[keep..];
        if self.copies.len() > 0 {
            for &block in surplus {
                self.copies.drop_into(&mut self.pool, block);
            }
        }
        for &block in surplus.iter().rev() {
            self.pool.drop_ref(block);
        }
        table.truncate(&mut rows[row as usize], keep);
    }
}

/// Two different rows at once.
fn pair<T>(rows: &mut [T], first: usize, second: usize) -> [&mut T; 2] {
    rows.get_disjoint_mut([first, second]).expect("two different rows of the table")
}
