//! Which cached block goes first when space is needed.
//!
//! A policy orders the cached blocks (indexed, without a holder, not fenced). It is told when a block becomes cached,
//! when a hit takes it out, and when it loses its node; it answers with the next victim. All O(1), through the links
//! that the pool's lists share.
//!
//! Both policies keep the cached set prefix-closed, that is, a victim never has a child in the index. It rests on what
//! every caller does: a holder of a block holds all blocks before it; blocks are given back last first; and a block
//! leaves the fence no later than its parent (an untaken copy out of it is owed to a sequence that holds the parent).
//! So a child always *enters* before its parent does, and it enters again only after a hit that took the parent too.
//!
//! * **LRU** ([`Lru`]): one list in the order of entering. The child entered first, so it is evicted first.
//! * **SLRU** ([`Slru`]): segmented LRU of R. Karedla, J. S. Love and B. G. Wherry, "Caching strategies to improve disk
//!   system performance", IEEE Computer 27(3), 1994. What was never hit stays in a *probation* list; what was hit
//!   enters a *protected* one, which holds at most two thirds of the pool; its overflow, oldest first, enters the young
//!   end of probation. Victims come from probation first, so one scan over many new prompts can't flush what is in use
//!   again and again. Prefix-closed: a hit marks the whole matched prefix, so a marked child has a marked parent; within
//!   a list the child entered first; a demotion takes the oldest, so a child is demoted before its parent and stands
//!   before it in probation; and a child in probation under a protected parent goes first anyway. So no parent ever
//!   stands before its child.

use crate::config::EvictionPolicy;
use crate::links::{Links, List};
use crate::{BlockId, Config};

/// What the pool asks of an order of eviction. Every operation is O(1) and allocates nothing.
pub(crate) trait Eviction {
    /// `block` has become cached.
    fn insert(&mut self, links: &mut Links, block: BlockId);
    /// A cached `block` is live again, or lost its node.
    fn remove(&mut self, links: &mut Links, block: BlockId);
    /// Takes the next victim out.
    fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId>;
    /// The next victim, or one of the next: those behind it in its list follow it.
    fn first(&self) -> Option<BlockId>;
    /// An admission has matched `block`, which is live now.
    fn hit(&mut self, block: BlockId);
    /// `block` has lost its node and is in no list.
    fn forget(&mut self, block: BlockId);
    /// Cached blocks.
    fn len(&self) -> u32;
    /// The cached blocks, the next victim first. O(cached).
    fn order<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = BlockId> + 'a;
}

/// Least recently used.
#[derive(Clone, Debug)]
pub(crate) struct Lru {
    pub(crate) list: List,
}

impl Eviction for Lru {
    #[inline]
    fn insert(&mut self, links: &mut Links, block: BlockId) {
        self.list.push_back(links, block);
    }

    #[inline]
    fn remove(&mut self, links: &mut Links, block: BlockId) {
        self.list.remove(links, block);
    }

    #[inline]
    fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId> {
        self.list.pop_front(links)
    }

    #[inline]
    fn first(&self) -> Option<BlockId> {
        self.list.first()
    }

    #[inline]
    fn hit(&mut self, _block: BlockId) {}

    #[inline]
    fn forget(&mut self, _block: BlockId) {}

    fn len(&self) -> u32 {
        self.list.len()
    }

    fn order<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = BlockId> + 'a {
        self.list.iter(links)
    }
}

/// Hit since it entered the index, or since it was demoted.
const MARKED: u8 = 1;
/// In the protected list.
const PROTECTED: u8 = 2;

/// Segmented least recently used.
#[derive(Clone, Debug)]
pub(crate) struct Slru {
    pub(crate) probation: List,
    pub(crate) protected: List,
    /// Most blocks in the protected list.
    pub(crate) capacity: u32,
    /// Of each block: [`MARKED`], [`PROTECTED`].
    pub(crate) marks: Vec<u8>,
}

impl Slru {
    fn new(num_blocks: u32) -> Self {
        Self {
            probation: List::new(),
            protected: List::new(),
            capacity: (u64::from(num_blocks) * 2 / 3) as u32,
            marks: vec![0; num_blocks as usize],
        }
    }

    pub(crate) fn is_marked(&self, block: BlockId) -> bool {
        self.marks[block as usize] & MARKED != 0
    }

    pub(crate) fn is_protected(&self, block: BlockId) -> bool {
        self.marks[block as usize] & PROTECTED != 0
    }
}

impl Eviction for Slru {
    fn insert(&mut self, links: &mut Links, block: BlockId) {
        let marks = &mut self.marks[block as usize];
        if *marks & MARKED == 0 {
            self.probation.push_back(links, block);
            return;
        }
        *marks |= PROTECTED;
        self.protected.push_back(links, block);
        if self.protected.len() > self.capacity
            && let Some(oldest) = self.protected.pop_front(links)
        {
            self.marks[oldest as usize] = 0;
            self.probation.push_back(links, oldest);
        }
    }

    fn remove(&mut self, links: &mut Links, block: BlockId) {
        if self.is_protected(block) {
            self.marks[block as usize] &= !PROTECTED;
            self.protected.remove(links, block);
        } else {
            self.probation.remove(links, block);
        }
    }

    fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId> {
        self.probation.pop_front(links).or_else(|| {
            let victim = self.protected.pop_front(links)?;
            self.marks[victim as usize] &= !PROTECTED;
            Some(victim)
        })
    }

    fn first(&self) -> Option<BlockId> {
        self.probation.first().or_else(|| self.protected.first())
    }

    fn hit(&mut self, block: BlockId) {
        self.marks[block as usize] |= MARKED;
    }

    fn forget(&mut self, block: BlockId) {
        self.marks[block as usize] = 0;
    }

    fn len(&self) -> u32 {
        self.probation.len() + self.protected.len()
    }

    fn order<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = BlockId> + 'a {
        self.probation.iter(links).chain(self.protected.iter(links))
    }
}

/// The policy of a pool. An enum: the choice is one predictable branch on the hot path.
#[derive(Clone, Debug)]
pub(crate) enum Policy {
    Lru(Lru),
    Slru(Slru),
}

/// Calls the policy that there is.
macro_rules! each {
    ($policy:expr, $inner:ident => $call:expr) => {
        match $policy {
            Policy::Lru($inner) => $call,
            Policy::Slru($inner) => $call,
        }
    };
}

impl Policy {
    pub(crate) fn new(config: &Config) -> Self {
        match config.eviction_policy() {
            EvictionPolicy::Lru => Self::Lru(Lru { list: List::new() }),
            EvictionPolicy::Slru => Self::Slru(Slru::new(config.num_blocks())),
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, links: &mut Links, block: BlockId) {
        each!(self, policy => policy.insert(links, block));
    }

    #[inline]
    pub(crate) fn remove(&mut self, links: &mut Links, block: BlockId) {
        each!(self, policy => policy.remove(links, block));
    }

    #[inline]
    pub(crate) fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId> {
        each!(self, policy => policy.pop_victim(links))
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<BlockId> {
        each!(self, policy => policy.first())
    }

    #[inline]
    pub(crate) fn hit(&mut self, block: BlockId) {
        each!(self, policy => policy.hit(block));
    }

    #[inline]
    pub(crate) fn forget(&mut self, block: BlockId) {
        each!(self, policy => policy.forget(block));
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        each!(self, policy => policy.len())
    }

    pub(crate) fn order(&self, links: &Links) -> Vec<BlockId> {
        each!(self, policy => policy.order(links).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(policy: &impl Eviction, links: &Links) -> Vec<BlockId> {
        policy.order(links).collect()
    }

    #[test]
    fn lru_evicts_in_the_order_of_entering() {
        let (mut links, mut lru) = (Links::new(4), Lru { list: List::new() });
        for block in [2, 0, 3] {
            lru.insert(&mut links, block);
        }
        lru.remove(&mut links, 0);
        lru.hit(0);
        lru.insert(&mut links, 0);
        assert_eq!((order(&lru, &links), lru.len()), (vec![2, 3, 0], 3));
        assert_eq!(lru.pop_victim(&mut links), Some(2));
    }

    #[test]
    fn slru_keeps_what_was_hit_and_demotes_the_oldest() {
        let (mut links, mut slru) = (Links::new(6), Slru::new(3)); // two in the protected list
        slru.marks.resize(6, 0);
        for block in [0, 1, 2] {
            slru.hit(block);
            slru.insert(&mut links, block);
        }
        assert_eq!(order(&slru, &links), [0, 1, 2]); // 0 is on probation again
        assert!(!slru.is_marked(0) && slru.is_protected(1) && slru.is_protected(2));
        for block in [3, 4] {
            slru.insert(&mut links, block); // never hit
        }
        assert_eq!(order(&slru, &links), [0, 3, 4, 1, 2]);
        slru.remove(&mut links, 1);
        assert!(slru.is_marked(1) && !slru.is_protected(1));
        let victims: Vec<_> = std::iter::from_fn(|| slru.pop_victim(&mut links)).collect();
        assert_eq!((victims, slru.len()), (vec![0, 3, 4, 2], 0));
        slru.forget(2);
        assert!(!slru.is_marked(2));
    }
}
