//! The block pool: ref counts, the free list, the cached and the fenced blocks, and the one place where the state of a
//! block is decided.
//!
//! Invariants:
//! * live: ref ≥ 1; fenced: ref 0 and read by an untaken copy or (with fences) freed in an epoch that is not retired,
//!   listed in the order in which they reached ref 0; cached: the rest of what the prefix index names, ordered by the
//!   eviction policy; free: the rest;
//! * free blocks are `returned` (a stack) and everything from `watermark` on, which has never been used. The order of
//!   hand-out is the stack from its top, then the watermark upwards, then the victims of eviction: last freed first, a
//!   fresh pool gives 0, 1, 2, …;
//! * `HELD` marks blocks that a caller took outside any sequence: one of their ref counts is that hold.
//!
//! Costs: every operation is O(1) and allocates nothing. The arrays start zeroed, so the memory of a large pool is
//! touched only as its blocks come into use.

use crate::eviction::Policy;
use crate::fences::Fences;
use crate::hash::Hash;
use crate::index::{self, Gap, Index, Parent};
use crate::links::{Links, List};
use crate::{BlockId, Config, Error, EvictionPolicy, Result, TokenId};

/// A caller took the block outside any sequence.
pub(crate) const HELD: u8 = 1;
/// The block has a node in the prefix index.
pub(crate) const INDEXED: u8 = 2;
/// The block is in the fenced list.
pub(crate) const FENCED: u8 = 4;
/// While fenced: its epoch is that of a copy taken out of it, later than the one in which it reached ref 0.
pub(crate) const TAKEN: u8 = 8;

/// Victims that are looked at before the first is evicted: what the nearest cache holds for sure.
const MOST_LOOKED_AT: u64 = 128;

/// Bytes of bookkeeping for each block without the index: ref count, pins, two links, owed source, stack entry (u32
/// each) and flags.
const BYTES_PER_BLOCK: usize = 6 * size_of::<u32>() + size_of::<u8>();

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) ref_counts: Vec<u32>,
    /// Untaken copies that read the block.
    pub(crate) pins: Vec<u32>,
    /// [`HELD`], [`INDEXED`], [`FENCED`], [`TAKEN`].
    pub(crate) flags: Vec<u8>,
    pub(crate) returned: Vec<BlockId>,
    /// First block that has never been handed out.
    pub(crate) watermark: u32,
    pub(crate) links: Links,
    pub(crate) fences: Fences,
    pub(crate) cached: Policy,
    pub(crate) index: Index,
    /// During a batch: tails with children in the index when it began. They are copied before a write, even if what
    /// hangs on them is evicted meanwhile, so that the demand is what was settled.
    pub(crate) copy_first: Vec<BlockId>,
    pub(crate) live: u32,
    pub(crate) peak_live: u32,
    pub(crate) num_evictions: u64,
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
            pins: vec![0; num_blocks],
            flags: vec![0; num_blocks],
            returned: Vec::with_capacity(num_blocks),
            watermark: 0,
            links: Links::new(config.num_blocks()),
            fences: Fences::new(config),
            cached: Policy::new(config),
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
        self.returned.len() as u32 + (self.num_blocks() - self.watermark)
    }

    /// Blocks that can be handed out now: the free ones first, then by eviction the cached ones.
    #[inline]
    pub(crate) fn num_available(&self) -> u32 {
        self.num_free() + self.cached.len()
    }

    pub(crate) fn num_fenced(&self) -> u32 {
        self.fences.list.len()
    }

    #[inline]
    pub(crate) fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block as usize]
    }

    #[inline]
    pub(crate) fn has(&self, block: BlockId, flag: u8) -> bool {
        self.flags[block as usize] & flag != 0
    }

    /// Whether a node of the index hangs on `block`: then it is copied before a write, whoever holds it.
    #[inline]
    pub(crate) fn has_children(&self, block: BlockId) -> bool {
        self.has(block, INDEXED) && !self.index.is_leaf(block)
    }

    /// Whether the one holder among `ref_count` who writes now must leave `block` for a copy.
    #[inline]
    pub(crate) fn must_copy(&self, block: BlockId) -> bool {
        self.ref_count(block) > 1
            || self.has_children(block)
            || (!self.copy_first.is_empty() && self.copy_first.contains(&block))
    }

    /// Hands out a block with ref count 1. The caller has settled that there is one.
    #[inline]
    pub(crate) fn take(&mut self) -> BlockId {
        let block = match self.returned.pop() {
            Some(block) => block,
            None if self.watermark < self.num_blocks() => {
                self.watermark += 1;
                self.watermark - 1
            }
            None => self.evict(),
        };
        self.ref_counts[block as usize] = 1;
        self.live += 1;
        self.peak_live = self.peak_live.max(self.live);
        block
    }

    /// Looks at what the index has of the next victims, as many as there are no free blocks for, so that the cache misses
    /// of their evictions run side by side.
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
        self.unindex(victim);
        self.num_evictions += 1;
        victim
    }

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
            if self.flags[block as usize] & FENCED != 0 {
                self.fences.list.remove(&mut self.links, block);
                self.flags[block as usize] &= !(FENCED | TAKEN);
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
            if self.fences.are_on || self.pins[block as usize] > 0 {
                self.fence(block);
            } else {
                self.let_go(block);
            }
        }
    }

    /// `block` has no holder, and nothing that is under way touches it.
    #[inline]
    pub(crate) fn let_go(&mut self, block: BlockId) {
        if self.flags[block as usize] & INDEXED != 0 {
            self.cached.insert(&mut self.links, block);
        } else {
            self.returned.push(block);
        }
    }

    /// Makes `block`, which is live, a node of the index.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        gap: Gap,
        block: BlockId,
        parent: &Parent,
        hash: Hash,
        token_ids: &[TokenId],
        key: u32,
    ) -> Parent {
        self.index.tokens_mut(block).copy_from_slice(token_ids);
        self.insert_in_place(gap, block, parent, hash, key)
    }

    /// [`insert`](Self::insert) where the index has the tokens already.
    #[inline]
    pub(crate) fn insert_in_place(
        &mut self,
        gap: Gap,
        block: BlockId,
        parent: &Parent,
        hash: Hash,
        key: u32,
    ) -> Parent {
        self.flags[block as usize] |= INDEXED;
        self.index.insert(gap, block, parent, hash, key)
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
        for block in 0..self.watermark {
            if self.has(block, INDEXED) {
                self.flags[block as usize] &= !INDEXED;
                self.cached.forget(block);
            }
        }
        self.index.clear();
    }

    /// The blocks that can be handed out, in the order of hand-out. O(free + cached).
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let free = self.returned.iter().rev().copied().chain(self.watermark..self.num_blocks());
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
    per_block = per_block.checked_add(usize::from(config.eviction_policy() == EvictionPolicy::Slru))?;
    per_block.checked_mul(config.num_blocks() as usize)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn a_block_costs_at_most_96_bytes() {
        let config = Config::new(1_000, 16).unwrap();
        assert_eq!(bytes_for(&config), Some(25_000));
        let all =
            config.with_prefix_caching(true).with_fences(true).with_eviction_policy(EvictionPolicy::Slru);
        let token_bytes = 1_000 * 16 * size_of::<TokenId>();
        assert!(bytes_for(&all).unwrap() - token_bytes <= 96_000);
    }
}
