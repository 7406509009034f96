//! What a manager tells people about itself: counts, the free list, fragmentation, single blocks. Reads only.
//!
//! The counters are kept as things happen, so reading them is O(1); the rest says what it costs.

use rustc_hash::FxHashMap;

use super::BlockManager;
use crate::error::Result;
use crate::ids::{BlockId, SequenceId};
use crate::info::{BlockInfo, BlockState};
use crate::stats::Stats;

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
            live: u64::from(self.pool.num_live()),
            cached: u64::from(self.pool.num_cached()),
            fenced: u64::from(self.pool.num_fenced()),
            free: u64::from(self.pool.num_free()),
            num_sequences: self.sequences.len() as u64,
            num_copies: self.copies.num_owed_ever(),
            peak_live: u64::from(self.pool.peak_live()),
            indexed: u64::from(self.pool.index().num_nodes()),
            pinned: self.pins.num_blocks() as u64,
            num_hit_tokens: self.hits.found(),
            num_queried_tokens: self.hits.queried(),
            num_resumed_tokens: self.hits.resumed(),
            num_evictions: self.pool.num_evictions(),
        }
    }

    /// Token positions that hold no token: of one sequence's blocks, O(1); with `None`, of all live blocks, each
    /// physical block once, whoever fills it furthest, O(table entries + pinned blocks). A block held by a caller holds
    /// no token, one that is indexed is full.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(1)?;
    /// manager.append_tokens(1, 10, None, &mut Vec::new())?;
    /// manager.allocate_block()?;
    /// assert_eq!(manager.internal_fragmentation_tokens(Some(1))?, 2);
    /// assert_eq!(manager.internal_fragmentation_tokens(None)?, 6);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn internal_fragmentation_tokens(&self, sequence_id: Option<SequenceId>) -> Result<u64> {
        let block_size = self.config.block_size();
        if let Some(sequence_id) = sequence_id {
            let sequence = self.sequences.get(sequence_id)?;
            return Ok(sequence.table.len() as u64 * block_size - sequence.length());
        }
        let mut num_filled = 0;
        let mut shared: FxHashMap<BlockId, u64> = FxHashMap::default();
        for sequence in self.sequences.iter() {
            let mut remaining = sequence.length();
            for &block in sequence.table {
                let in_row = remaining.min(block_size);
                remaining -= in_row;
                let filled = if self.pool.is_indexed(block) { block_size } else { in_row };
                if self.pool.ref_count(block) == 1 {
                    num_filled += filled;
                } else {
                    let most = shared.entry(block).or_default();
                    *most = filled.max(*most);
                }
            }
        }
        for block in self.pins.blocks().filter(|&block| self.pool.is_indexed(block)) {
            shared.insert(block, block_size);
        }
        num_filled += shared.values().sum::<u64>();
        Ok(u64::from(self.pool.num_live()) * block_size - num_filled)
    }

    /// Everything about one block. O(table entries + cached blocks).
    ///
    /// # Errors
    /// [`crate::Error::Argument`] if the pool has no such block.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, BlockState, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(7)?;
    /// manager.append_tokens(7, 6, None, &mut Vec::new())?;
    /// let info = manager.block_info(1)?;
    /// assert_eq!((info.state, info.owners, info.num_filled), (BlockState::Live, vec![7], 2));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn block_info(&self, block: BlockId) -> Result<BlockInfo> {
        self.check_block(block)?;
        let block_size = self.config.block_size();
        let is_indexed = self.pool.is_indexed(block);
        let mut owners = Vec::new();
        let mut num_filled = if is_indexed { block_size } else { 0 };
        for sequence in self.sequences.iter() {
            if let Some(logical) = sequence.table.iter().position(|&entry| entry == block) {
                owners.push(sequence.id);
                let filled = (sequence.length() - logical as u64 * block_size).min(block_size);
                num_filled = num_filled.max(filled);
            }
        }
        owners.sort_unstable();
        let state = self.pool.state(block);
        Ok(BlockInfo {
            block_id: block,
            state,
            ref_count: self.pool.ref_count(block),
            owners,
            num_pins: self.pins.on(block),
            is_held: self.pool.is_held(block),
            is_indexed,
            num_filled,
            eviction_rank: if state == BlockState::Cached { self.pool.eviction_rank(block) } else { None },
        })
    }

    /// The state of every block, block 0 first. O(N).
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, BlockState, Config};
    /// let mut manager = BlockManager::new(Config::new(2, 4)?)?;
    /// manager.allocate_block()?;
    /// assert_eq!(manager.block_states(), [BlockState::Live, BlockState::Free]);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn block_states(&self) -> Vec<BlockState> {
        (0..self.config.num_blocks()).map(|block| self.pool.state(block)).collect()
    }
}
