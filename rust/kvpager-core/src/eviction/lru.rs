//! Least recently used: one list in the order of entering.
//!
//! Prefix-closed: the child entered first, so it is evicted first.

use super::{AuditedPool, Eviction};
use crate::ids::BlockId;
use crate::links::{Links, List};

/// Least recently used.
#[derive(Clone, Debug)]
pub(crate) struct Lru {
    list: List,
}

impl Eviction for Lru {
    const BYTES_PER_BLOCK: usize = 0;

    fn new(_num_blocks: u32) -> Self {
        Self { list: List::new() }
    }

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

    fn order(&self, links: &Links) -> Vec<BlockId> {
        self.list.iter(links).collect()
    }

    fn audit(&self, _pool: &AuditedPool<'_>, _faults: &mut Vec<String>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_evicts_in_the_order_of_entering() {
        let (mut links, mut lru) = (Links::new(4), Lru::new(4));
        for block in [2, 0, 3] {
            lru.insert(&mut links, block);
        }
        lru.remove(&mut links, 0);
        lru.hit(0);
        lru.insert(&mut links, 0);
        assert_eq!((lru.order(&links), lru.len()), (vec![2, 3, 0], 3));
        assert_eq!(lru.pop_victim(&mut links), Some(2));
    }
}
