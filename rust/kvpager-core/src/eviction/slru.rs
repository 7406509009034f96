//! Segmented LRU of R. Karedla, J. S. Love and B. G. Wherry, "Caching strategies to improve disk system performance",
//! IEEE Computer 27(3), 1994.
//!
//! What was never hit stays in a *probation* list; what was hit enters a *protected* one, which holds at most two
//! thirds of the pool; its overflow, oldest first, enters the young end of probation. Victims come from probation
//! first, so one scan over many new prompts can't flush what is in use again and again.
//!
//! Prefix-closed: a hit marks the whole matched prefix, so a marked child has a marked parent; within a list the child
//! entered first; a demotion takes the oldest, so a child is demoted before its parent and stands before it in
//! probation; and a child in probation under a protected parent goes first anyway. So no parent ever stands before its
//! child.

use super::{AuditedPool, Eviction};
use crate::ids::BlockId;
use crate::links::{Links, List};

/// Hit since it entered the index, or since it was demoted.
const MARKED: u8 = 1;
/// In the protected list.
const PROTECTED: u8 = 2;

/// Segmented least recently used.
#[derive(Clone, Debug)]
pub(crate) struct Slru {
    probation: List,
    protected: List,
    /// Most blocks in the protected list.
    capacity: u32,
    /// Of each block: [`MARKED`], [`PROTECTED`].
    marks: Vec<u8>,
}

impl Slru {
    fn is_marked(&self, block: BlockId) -> bool {
        self.marks[block as usize] & MARKED != 0
    }

    fn is_protected(&self, block: BlockId) -> bool {
        self.marks[block as usize] & PROTECTED != 0
    }
}

impl Eviction for Slru {
    const BYTES_PER_BLOCK: usize = size_of::<u8>();

    fn new(num_blocks: u32) -> Self {
        Self {
            probation: List::new(),
            protected: List::new(),
            capacity: (u64::from(num_blocks) * 2 / 3) as u32,
            marks: vec![0; num_blocks as usize],
        }
    }

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

    fn order(&self, links: &Links) -> Vec<BlockId> {
        self.probation.iter(links).chain(self.protected.iter(links)).collect()
    }

    fn audit(&self, pool: &AuditedPool<'_>, faults: &mut Vec<String>) {
        let is_known = |block: BlockId| (block as usize) < self.marks.len();
        for block in self.protected.iter(pool.links).filter(|&block| is_known(block)) {
            if !self.is_protected(block) || !self.is_marked(block) {
                faults.push(format!("block {block}: protected, but not marked so"));
            }
        }
        for block in self.probation.iter(pool.links).filter(|&block| is_known(block)) {
            if self.is_protected(block) || self.is_marked(block) {
                faults.push(format!("block {block}: on probation, but marked as hit"));
            }
        }
        if self.protected.len() > self.capacity {
            let (len, capacity) = (self.protected.len(), self.capacity);
            faults.push(format!("protected blocks: {len}, at most {capacity} may be"));
        }
        for block in 0..pool.used {
            if self.is_marked(block) && !(pool.is_indexed)(block) {
                faults.push(format!("block {block}: marked as hit, but not indexed"));
            }
        }
        for &(block, parent) in pool.parents.iter().filter(|&&(block, parent)| is_known(block.max(parent))) {
            if self.is_marked(block) && !self.is_marked(parent) {
                faults.push(format!("block {block}: marked as hit, but its parent {parent} is not"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slru_keeps_what_was_hit_and_demotes_the_oldest() {
        let (mut links, mut slru) = (Links::new(6), Slru::new(3)); // two in the protected list
        slru.marks.resize(6, 0);
        for block in [0, 1, 2] {
            slru.hit(block);
            slru.insert(&mut links, block);
        }
        assert_eq!(slru.order(&links), [0, 1, 2]); // 0 is on probation again
        assert!(!slru.is_marked(0) && slru.is_protected(1) && slru.is_protected(2));
        for block in [3, 4] {
            slru.insert(&mut links, block); // never hit
        }
        assert_eq!(slru.order(&links), [0, 3, 4, 1, 2]);
        slru.remove(&mut links, 1);
        assert!(slru.is_marked(1) && !slru.is_protected(1));
        let victims: Vec<_> = std::iter::from_fn(|| slru.pop_victim(&mut links)).collect();
        assert_eq!((victims, slru.len()), (vec![0, 3, 4, 2], 0));
        slru.forget(2);
        assert!(!slru.is_marked(2));
    }
}
