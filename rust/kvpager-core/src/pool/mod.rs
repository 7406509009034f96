//! The block pool: ref counts, the free list, the cached and the fenced blocks, and the one place where the state of a
//! block is decided.
//!
//! Invariants:
//! * live: ref ≥ 1; fenced: ref 0 and read by an untaken copy or (with fences) freed in an epoch that is not retired,
//!   listed in the order in which they reached ref 0; cached: the rest of what the prefix index names, ordered by the
//!   eviction policy; free: the rest;
//! * free blocks are `returned` (a stack) and everything from `first_unused` on, never handed out yet. Blocks come
//!   down the stack (last freed first), up from `first_unused` (at first 0, 1, 2, …), then from eviction;
//! * `HELD` marks blocks that a caller took outside any sequence: one of their ref counts is that hold.
//!
//! Costs: every operation is O(1) and allocates nothing. The arrays start zeroed, so the memory of a large pool is
//! touched only as its blocks come into use.

mod audit;
mod fences;

#[cfg(test)]
pub(crate) use audit::Planted;
pub(crate) use audit::Recount;
use fences::Fences;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::eviction::Policy;
use crate::ids::{BlockId, TokenId};
use crate::index::{self, Content, Gap, Index, Parent};
use crate::info::BlockState;
use crate::links::{Links, List};

/// A caller took the block outside any sequence.
const HELD: u8 = 1;
/// The block has a node in the prefix index.
const INDEXED: u8 = 2;
/// The block is in the fenced list.
const FENCED: u8 = 4;
/// While fenced: its epoch is that of a copy taken out of it, later than the one in which it reached ref 0.
const TAKEN: u8 = 8;

/// Victims that are looked at before the first is evicted: what the nearest cache holds for sure.
const MOST_LOOKED_AT: u64 = 128;

/// Bytes of bookkeeping for each block without the index: ref count, readers, two links, owed source, stack entry (u32
/// each) and flags.
const BYTES_PER_BLOCK: usize = 6 * size_of::<u32>() + size_of::<u8>();

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    ref_counts: Vec<u32>,
    /// Untaken copies that read the block.
    num_readers: Vec<u32>,
    /// [`HELD`], [`INDEXED`], [`FENCED`], [`TAKEN`].
    flags: Vec<u8>,
    returned: Vec<BlockId>,
    /// First block that has never been handed out.
    first_unused: u32,
    links: Links,
    fences: Fences,
    cached: Policy,
    index: Index,
    /// During a batch: tails with children in the index when it began. They are copied before a write, even if what
    /// hangs on them is evicted meanwhile, so that the demand is what was settled.
    copy_first: Vec<BlockId>,
    live: u32,
    peak_live: u32,
    num_evictions: u64,
}

impl Pool {
    /// Reserves the arrays. Refuses a pool whose bookkeeping the allocator can't promise, instead of aborting.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let num_blocks = config.num_blocks() as usize;
        let wanted = bytes_for(config);
        if wanted.is_none_or(|wanted| Vec::<u8>::new().try_reserve_exact(wanted).is_err()) {
            let wanted = wanted.map_or_else(|| "2^64".to_owned(), |wanted| wanted.to_string());
            let reason = format!(
                "`num_physical_blocks`: no memory for the {wanted} bytes that keep {num_blocks} blocks"
            );
            return Err(Error::Config { reason });
        }
        Ok(Self {
            ref_counts: vec![0; num_blocks],
            num_readers: vec![0; num_blocks],
            flags: vec![0; num_blocks],
            returned: Vec::with_capacity(num_blocks),
            first_unused: 0,
            links: Links::new(config.num_blocks()),
            fences: Fences::new(config),
            cached: Policy::new(config.eviction_policy(), config.num_blocks()),
            index: Index::new(config),
            copy_first: Vec::new(),
            live: 0,
            peak_live: 0,
            num_evictions: 0,
        })
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    /// Blocks that nobody holds, reads or could find again.
    #[inline]
    pub(crate) fn num_free(&self) -> u32 {
        self.returned.len() as u32 + (self.num_blocks() - self.first_unused)
    }

    /// Blocks that can be handed out now: the free ones first, then by eviction the cached ones.
    #[inline]
    pub(crate) fn num_available(&self) -> u32 {
        self.num_free() + self.cached.len()
    }

    pub(crate) fn num_fenced(&self) -> u32 {
        self.fences.len()
    }

    pub(crate) fn num_cached(&self) -> u32 {
        self.cached.len()
    }

    /// Blocks with at least one holder.
    #[inline]
    pub(crate) fn num_live(&self) -> u32 {
        self.live
    }

    pub(crate) fn peak_live(&self) -> u32 {
        self.peak_live
    }

    pub(crate) fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// The links of all lists of blocks; the ledger of copies has its list there, too.
    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    pub(crate) fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }

    #[inline]
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// For keys and namespaces; nodes come and go through the pool.
    #[inline]
    pub(crate) fn index_mut(&mut self) -> &mut Index {
        &mut self.index
    }

    // ---- one block -------------------------------------------------------------------------------------------------

    #[inline]
    pub(crate) fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block as usize]
    }

    #[inline]
    fn has(&self, block: BlockId, flag: u8) -> bool {
        self.flags[block as usize] & flag != 0
    }

    /// Whether a caller took the block outside any sequence.
    pub(crate) fn is_held(&self, block: BlockId) -> bool {
        self.has(block, HELD)
    }

    /// Whether the index has a node for the block.
    #[inline]
    pub(crate) fn is_indexed(&self, block: BlockId) -> bool {
        self.has(block, INDEXED)
    }

    /// What the block is at this moment.
    #[inline]
    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        if self.ref_count(block) > 0 {
            BlockState::Live
        } else if self.has(block, FENCED) {
            BlockState::Fenced
        } else if self.has(block, INDEXED) {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }

    /// Of a cached block: how many are evicted before it. O(cached).
    pub(crate) fn eviction_rank(&self, block: BlockId) -> Option<usize> {
        self.cached.order(&self.links).iter().position(|&cached| cached == block)
    }

    /// Whether a node of the index hangs on `block`: then it is copied before a write, whoever holds it.
    #[inline]
    pub(crate) fn has_children(&self, block: BlockId) -> bool {
        self.has(block, INDEXED) && !self.index.is_leaf(block)
    }

    /// Whether a holder who writes into `block` now must write into a copy of it.
    #[inline]
    pub(crate) fn must_copy(&self, block: BlockId) -> bool {
        self.ref_count(block) > 1
            || self.has_children(block)
            || (!self.copy_first.is_empty() && self.copy_first.contains(&block))
    }

    /// Until [`end_batch`](Self::end_batch): `block`, a tail with children in the index now, is copied before a write.
    pub(crate) fn copy_first(&mut self, block: BlockId) {
        self.copy_first.push(block);
    }

    /// The batched append is done.
    #[inline]
    pub(crate) fn end_batch(&mut self) {
        self.copy_first.clear();
    }

    // ---- hand-out --------------------------------------------------------------------------------------------------

    /// Hands out a block with ref count 1. The caller has settled that there is one.
    #[inline]
    pub(crate) fn take(&mut self) -> BlockId {
        let block = match self.returned.pop() {
            Some(block) => block,
            None if self.first_unused < self.num_blocks() => {
                self.first_unused += 1;
                self.first_unused - 1
            }
            None => self.evict(),
        };
        self.ref_counts[block as usize] = 1;
        self.live += 1;
        self.peak_live = self.peak_live.max(self.live);
        block
    }

    /// Looks at what the index has of the next victims, as many as there are no free blocks for, so that the cache
    /// misses of their evictions run side by side.
    pub(crate) fn look_at_victims(&self, num_blocks: u64) {
        let num_victims = num_blocks.saturating_sub(u64::from(self.num_free()));
        if num_victims == 0 {
            return;
        }
        let (mut next, mut looked_at) = (self.cached.first(), 0);
        for _ in 0..num_victims.min(MOST_LOOKED_AT) {
            let Some(victim) = next else { break };
            looked_at ^= self.index.look_at(victim);
            next = List::after(&self.links, victim);
        }
        std::hint::black_box(looked_at);
    }

    /// Takes the next victim's space.
    fn evict(&mut self) -> BlockId {
        let victim = self.cached.pop_victim(&mut self.links);
        let victim = victim.expect("a block was taken that the call had not settled");
        self.cached.evicted(self.index.tokens_of(victim));
        self.unindex(victim);
        self.num_evictions += 1;
        victim
    }

    /// Hands out a block to a caller, outside any sequence.
    pub(crate) fn hold(&mut self) -> BlockId {
        let block = self.take();
        self.flags[block as usize] |= HELD;
        block
    }

    /// Takes a block back that a caller holds.
    pub(crate) fn let_go_of_held(&mut self, block: BlockId) {
        self.flags[block as usize] &= !HELD;
        self.drop_ref(block);
    }

    // ---- holders ---------------------------------------------------------------------------------------------------

    /// One more table names a live block.
    #[inline]
    pub(crate) fn share(&mut self, block: BlockId) {
        self.ref_counts[block as usize] += 1;
    }

    /// One more holder of an indexed block, which may have none: a hit makes it live again.
    #[inline]
    pub(crate) fn attach(&mut self, block: BlockId) {
        let ref_count = &mut self.ref_counts[block as usize];
        *ref_count += 1;
        if *ref_count == 1 {
            self.live += 1;
            self.peak_live = self.peak_live.max(self.live);
            if self.has(block, FENCED) {
                self.leave_fence(block);
            } else {
                self.cached.remove(&mut self.links, block);
            }
        }
    }

    /// One holder fewer. The last one gone, the block's next state is decided here and nowhere else.
    #[inline]
    pub(crate) fn drop_ref(&mut self, block: BlockId) {
        let ref_count = &mut self.ref_counts[block as usize];
        *ref_count -= 1;
        if *ref_count == 0 {
            self.live -= 1;
            if self.fences.are_on() || self.num_readers[block as usize] > 0 {
                self.fence(block);
            } else {
                self.let_go(block);
            }
        }
    }

    /// `block` has no holder, and nothing that is under way touches it.
    #[inline]
    fn let_go(&mut self, block: BlockId) {
        if self.flags[block as usize] & INDEXED != 0 {
            self.cached.insert(&mut self.links, block);
        } else {
            self.returned.push(block);
        }
    }

    /// An admission has found the content of `block`, which is live now.
    #[inline]
    pub(crate) fn hit(&mut self, block: BlockId) {
        self.cached.hit(block);
    }

    // ---- nodes -----------------------------------------------------------------------------------------------------

    /// Makes `block`, which is live, a node of the index at the gap that was found for its content.
    #[inline]
    pub(crate) fn insert(&mut self, gap: Gap, block: BlockId, content: &Content<'_>) -> Parent {
        self.flags[block as usize] |= INDEXED;
        self.cached.indexed(block, content.parent.block(), content.token_ids);
        self.index.insert(gap, block, content)
    }

    /// Drops the node of `block`, which has no children and is in no list of the policy.
    #[inline]
    pub(crate) fn unindex(&mut self, block: BlockId) {
        self.flags[block as usize] &= !INDEXED;
        self.cached.forget(block);
        self.index.remove(block);
    }

    /// Drops every node. Cached blocks become free in the order of eviction.
    pub(crate) fn unindex_all(&mut self) {
        while let Some(block) = self.cached.pop_victim(&mut self.links) {
            self.returned.push(block);
        }
        for block in 0..self.first_unused {
            if self.has(block, INDEXED) {
                self.flags[block as usize] &= !INDEXED;
                self.cached.forget(block);
            }
        }
        self.cached.forget_evicted();
        self.index.clear();
    }

    /// The blocks that can be handed out, in the order of hand-out. O(free + cached).
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let free = self.returned.iter().rev().copied().chain(self.first_unused..self.num_blocks());
        free.chain(self.cached.order(&self.links))
    }

    /// The typed refusal of a demand that the available blocks don't meet.
    #[cold]
    pub(crate) fn out_of_blocks(&self, needed: u64, row: Option<usize>) -> Error {
        Error::OutOfBlocks {
            needed,
            free: u64::from(self.num_available()),
            fenced: u64::from(self.num_fenced()),
            total: u64::from(self.num_blocks()),
            row,
            watermark: 0,
        }
    }
}

/// Bytes that the arrays of such a pool reserve.
fn bytes_for(config: &Config) -> Option<usize> {
    let mut per_block = BYTES_PER_BLOCK;
    if config.prefix_caching() {
        let token_bytes = usize::try_from(config.block_size()).ok()?.checked_mul(size_of::<TokenId>())?;
        per_block = (per_block + index::BYTES_PER_BLOCK).checked_add(token_bytes)?;
    }
    per_block = per_block.checked_add(Fences::bytes_per_block(config))?;
    per_block = per_block.checked_add(config.eviction_policy().bytes_per_block())?;
    per_block.checked_mul(config.num_blocks() as usize)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::eviction::EvictionPolicy;

    #[test]
    fn a_block_costs_at_most_96_bytes() {
        let config = Config::new(1_000, 16).unwrap();
        assert_eq!(bytes_for(&config), Some(25_000));
        let token_bytes = 1_000 * 16 * size_of::<TokenId>();
        for &policy in EvictionPolicy::ALL {
            let all = config.with_prefix_caching(true).with_fences(true).with_eviction_policy(policy);
            assert!(bytes_for(&all).unwrap() - token_bytes <= 96_000, "{policy:?}");
        }
    }
}
