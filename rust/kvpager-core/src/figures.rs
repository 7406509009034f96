//! What a manager tells people about itself: counts, the free list, fragmentation. Reads only.
//!
//! The counters are kept as things happen, so reading them is O(1); the rest says what it costs.

use rustc_hash::FxHashMap;

use crate::pool::INDEXED;
use crate::{BlockId, BlockManager, Result, SequenceId, Stats};

impl BlockManager {
    /// Blocks that can be handed out now: free and cached ones. O(1).
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
        self.pool.num_available()
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

    /// The blocks that can be handed out, in the order of hand-out, for people and lessons: the free ones, then the
    /// cached ones as they would be evicted. O(N).
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
            cached: u64::from(self.pool.cached.len()),
            fenced: u64::from(self.pool.num_fenced()),
            free: u64::from(self.pool.num_free()),
            num_sequences: self.sequences.len() as u64,
            num_copies: self.copies.num_owed_ever,
            peak_live: u64::from(self.pool.peak_live),
            indexed: u64::from(self.pool.index.num_nodes),
            pinned: self.pins.count_of.len() as u64,
            num_hit_tokens: self.hits.found,
            num_queried_tokens: self.hits.queried,
            num_resumed_tokens: self.hits.resumed,
            num_evictions: self.pool.num_evictions,
        }
    }

    /// Token positions of live blocks that hold no token, each physical block once, whoever fills it furthest; a block
    /// held by a caller holds none, one that is indexed is full. O(table entries + pinned blocks).
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
            for &block in sequence.table {
                let in_row = remaining.min(block_size);
                remaining -= in_row;
                let filled = if self.pool.has(block, INDEXED) { block_size } else { in_row };
                if self.pool.ref_count(block) == 1 {
                    num_filled += filled;
                } else {
                    let most = shared.entry(block).or_default();
                    *most = filled.max(*most);
                }
            }
        }
        for &block in self.pins.count_of.keys() {
            if self.pool.has(block, INDEXED) {
                shared.insert(block, block_size);
            }
        }
        num_filled += shared.values().sum::<u64>();
        u64::from(self.pool.live) * block_size - num_filled
    }

    /// Token positions of one sequence's blocks that it holds no token in. O(1).
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
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
}
