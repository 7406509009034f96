//! One block, or all of them, as people want to see them: state, holders, what they are filled with. Reads only.

use crate::pool::{FENCED, HELD, INDEXED};
use crate::{BlockId, BlockManager, Result, SequenceId};

/// What a block is at this moment; every block is exactly one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Has at least one holder.
    Live,
    /// Has no holder, but an untaken copy or work in flight may still touch it.
    Fenced,
    /// Has neither, and the prefix index can find its content.
    Cached,
    /// Is none of these.
    Free,
}

impl BlockState {
    /// The word for it. O(1).
    ///
    /// ```
    /// # use kvpager_core::BlockState;
    /// assert_eq!(BlockState::Cached.as_str(), "cached");
    /// ```
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Fenced => "fenced",
            Self::Cached => "cached",
            Self::Free => "free",
        }
    }
}

/// All about one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// The block.
    pub block_id: BlockId,
    /// Its state.
    pub state: BlockState,
    /// Holders: table entries, pins, and a caller who allocated it.
    pub ref_count: u32,
    /// The sequences whose tables name it, ascending.
    pub owners: Vec<SequenceId>,
    /// Pins that hold it.
    pub num_pins: u32,
    /// Whether a caller holds it, from [`BlockManager::allocate_block`].
    pub is_held: bool,
    /// Whether the prefix index names it.
    pub is_indexed: bool,
    /// Its positions that hold a token: all if indexed, else as far as the furthest table fills it.
    pub num_filled: u64,
    /// Of a cached block: how many are evicted before it.
    pub eviction_rank: Option<usize>,
}

impl BlockManager {
    /// Everything about one block. O(table entries + cached blocks).
    ///
    /// # Errors
    /// [`crate::Error::Argument`] if the pool has no such block.
    ///
    /// ```
    /// # use kvpager_core::{BlockManager, BlockState, Config};
    /// let mut manager = BlockManager::new(Config::new(4, 4)?)?;
    /// manager.create_sequence(7)?;
    /// manager.append_tokens(7, 6, &mut Vec::new())?;
    /// let info = manager.block_info(1)?;
    /// assert_eq!((info.state, info.owners, info.num_filled), (BlockState::Live, vec![7], 2));
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn block_info(&self, block: BlockId) -> Result<BlockInfo> {
        self.check_block(block)?;
        let block_size = self.config.block_size();
        let is_indexed = self.pool.has(block, INDEXED);
        let mut owners = Vec::new();
        let mut num_filled = if is_indexed { block_size } else { 0 };
        for sequence in self.sequences.iter() {
            if let Some(logical) = sequence.table.iter().position(|&entry| entry == block) {
                owners.push(sequence.id);
                let filled = (sequence.length - logical as u64 * block_size).min(block_size);
                num_filled = num_filled.max(filled);
            }
        }
        owners.sort_unstable();
        let state = self.block_state(block);
        let rank = || self.pool.cached.order(&self.pool.links).iter().position(|&cached| cached == block);
        Ok(BlockInfo {
            block_id: block,
            state,
            ref_count: self.pool.ref_count(block),
            owners,
            num_pins: self.pins.on(block),
            is_held: self.pool.has(block, HELD),
            is_indexed,
            num_filled,
            eviction_rank: if state == BlockState::Cached { rank() } else { None },
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
        (0..self.config.num_blocks()).map(|block| self.block_state(block)).collect()
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        if self.pool.ref_count(block) > 0 {
            BlockState::Live
        } else if self.pool.has(block, FENCED) {
            BlockState::Fenced
        } else if self.pool.has(block, INDEXED) {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }
}
