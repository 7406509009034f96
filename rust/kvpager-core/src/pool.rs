//! The block pool: ref counts, the free list, and the one place where the state of a block is decided.
//!
//! Invariants:
//! * live: ref ≥ 1; fenced: ref 0 and pins ≥ 1, listed in the order in which they reached ref 0; free: the rest;
//! * free blocks are `returned` (a stack) and everything from `watermark` on, which has never been used. The order of
//!   hand-out is the stack from its top, then the watermark upwards: last freed first, a fresh pool gives 0, 1, 2, …;
//! * `held` marks blocks that a caller took outside any sequence: one of their ref counts is that hold.
//!
//! Costs: every operation is O(1) and allocates nothing. The arrays start zeroed, so the memory of a large pool is
//! touched only as its blocks come into use.

use crate::links::{Links, List};
use crate::{BlockId, Config, Error, Result};

/// Bytes of bookkeeping for each block: ref count, pins, two links, owed source, stack entry (u32 each), hold (one
/// bool).
const BYTES_PER_BLOCK: usize = 6 * size_of::<u32>() + size_of::<bool>();

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) ref_counts: Vec<u32>,
    /// Untaken copies that read the block.
    pub(crate) pins: Vec<u32>,
    pub(crate) held: Vec<bool>,
    pub(crate) returned: Vec<BlockId>,
    /// First block that has never been handed out.
    pub(crate) watermark: u32,
    pub(crate) links: Links,
    pub(crate) fenced: List,
    pub(crate) live: u32,
    pub(crate) peak_live: u32,
}

impl Pool {
    /// Reserves the arrays. Refuses a pool whose bookkeeping the allocator can't promise, instead of aborting.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let num_blocks = config.num_blocks() as usize;
        let wanted = num_blocks.saturating_mul(BYTES_PER_BLOCK);
        if Vec::<u8>::new().try_reserve_exact(wanted).is_err() {
            let reason = format!(
                "`num_physical_blocks`: no memory for the {wanted} bytes that keep {num_blocks} blocks"
            );
            return Err(Error::Config { reason });
        }
        Ok(Self {
            ref_counts: vec![0; num_blocks],
            pins: vec![0; num_blocks],
            held: vec![false; num_blocks],
            returned: Vec::with_capacity(num_blocks),
            watermark: 0,
            links: Links::new(config.num_blocks()),
            fenced: List::new(),
            live: 0,
            peak_live: 0,
        })
    }

    fn num_blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.returned.len() as u32 + (self.num_blocks() - self.watermark)
    }

    pub(crate) fn num_fenced(&self) -> u32 {
        self.fenced.len()
    }

    pub(crate) fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block as usize]
    }

    /// Hands out a block with ref count 1. The caller has settled that there is one.
    #[inline]
    pub(crate) fn take(&mut self) -> BlockId {
        let block = self.returned.pop().unwrap_or_else(|| {
            assert!(self.watermark < self.num_blocks(), "a block was taken that the call had not settled");
            self.watermark += 1;
            self.watermark - 1
        });
        self.ref_counts[block as usize] = 1;
        self.live += 1;
        self.peak_live = self.peak_live.max(self.live);
        block
    }

    /// One more table names a live block.
    pub(crate) fn share(&mut self, block: BlockId) {
        self.ref_counts[block as usize] += 1;
    }

    /// One holder fewer. The last one gone, the block's next state is decided here and nowhere else.
    #[inline]
    pub(crate) fn drop_ref(&mut self, block: BlockId) {
        let ref_count = &mut self.ref_counts[block as usize];
        *ref_count -= 1;
        if *ref_count == 0 {
            self.live -= 1;
            if self.pins[block as usize] > 0 {
                self.fenced.push_back(&mut self.links, block);
            } else {
                self.returned.push(block);
            }
        }
    }

    /// An untaken copy reads `block`: it must not be handed out meanwhile.
    pub(crate) fn pin(&mut self, block: BlockId) {
        self.pins[block as usize] += 1;
    }

    /// One untaken copy out of `block` was dropped; the last one gone, a fenced block becomes free.
    pub(crate) fn unpin(&mut self, block: BlockId) {
        self.pins[block as usize] -= 1;
        if self.pins[block as usize] == 0 && self.ref_counts[block as usize] == 0 {
            self.fenced.remove(&mut self.links, block);
            self.returned.push(block);
        }
    }

    /// All copies were taken: every fenced block becomes free, in the order in which they reached ref 0.
    /// The caller has set the pins to 0.
    pub(crate) fn release_fenced(&mut self) {
        while let Some(block) = self.fenced.pop_front(&mut self.links) {
            debug_assert_eq!(self.pins[block as usize], 0);
            self.returned.push(block);
        }
    }

    /// The free blocks in the order of hand-out. O(free).
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.returned.iter().rev().copied().chain(self.watermark..self.num_blocks())
    }

    /// The typed refusal of a demand that the free blocks don't meet.
    #[cold]
    pub(crate) fn out_of_blocks(&self, needed: u64, row: Option<usize>) -> Error {
        Error::OutOfBlocks {
            needed,
            free: u64::from(self.num_free()),
            fenced: u64::from(self.num_fenced()),
            total: u64::from(self.num_blocks()),
            row,
        }
    }
}
