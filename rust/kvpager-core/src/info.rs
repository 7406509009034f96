//! One block as people want to see it: state, holders, what it is filled with.

use crate::ids::{BlockId, SequenceId};

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
    /// Whether a caller holds it, from [`allocate_block`](crate::BlockManager::allocate_block).
    pub is_held: bool,
    /// Whether the prefix index names it.
    pub is_indexed: bool,
    /// Its positions that hold a token: all if indexed, else as far as the furthest table fills it.
    pub num_filled: u64,
    /// Of a cached block: how many are evicted before it.
    pub eviction_rank: Option<usize>,
}
