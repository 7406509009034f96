//! The ledger of copy-on-write: which destination waits for the bytes of which source.
//!
//! Invariants: a destination is live with ref count 1, is never a source and never shared; a source is pinned once for
//! each pair that reads it. So sources and destinations are disjoint, and the pairs may be copied in any order.
//!
//! Costs: owing, dropping and looking are O(1), taking is O(pairs). The pairs are a list threaded through the pool's
//! links in the order in which they came to be owed; nothing is hashed or allocated.

use crate::BlockId;
use crate::links::List;
use crate::pool::Pool;

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct CopyLedger {
    /// Of each block: 1 + the source of the copy owed into it, 0 if none is.
    source_plus_one: Vec<u32>,
    destinations: List,
    /// Pairs that came to be owed since creation.
    pub(crate) num_owed_ever: u64,
}

impl CopyLedger {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self { source_plus_one: vec![0; num_blocks as usize], destinations: List::new(), num_owed_ever: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.destinations.len()
    }

    /// The source whose bytes `block` waits for.
    pub(crate) fn source_of(&self, block: BlockId) -> Option<BlockId> {
        self.source_plus_one[block as usize].checked_sub(1)
    }

    pub(crate) fn owe(&mut self, pool: &mut Pool, source: BlockId, destination: BlockId) {
        pool.pin(source);
        self.source_plus_one[destination as usize] = source + 1;
        self.destinations.push_back(&mut pool.links, destination);
        self.num_owed_ever += 1;
    }

    /// Forgets the pair into `block`, if there is one: the block is about to lose its holder. A source that has no
    /// holder and no other reader becomes free.
    #[inline]
    pub(crate) fn drop_into(&mut self, pool: &mut Pool, block: BlockId) {
        if let Some(source) = self.source_of(block) {
            self.source_plus_one[block as usize] = 0;
            self.destinations.remove(&mut pool.links, block);
            pool.unpin(source);
        }
    }

    /// The owed pairs, oldest first.
    pub(crate) fn pairs<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = (BlockId, BlockId)> + 'a {
        self.destinations
            .iter(&pool.links)
            .filter_map(|destination| Some((self.source_of(destination)?, destination)))
    }

    /// Hands over every pair, oldest first, and lets go of the sources.
    pub(crate) fn take(&mut self, pool: &mut Pool) -> Vec<(BlockId, BlockId)> {
        let pairs: Vec<_> = self.pairs(pool).collect();
        while self.destinations.pop_front(&mut pool.links).is_some() {}
        for &(source, destination) in &pairs {
            self.source_plus_one[destination as usize] = 0;
            pool.source_taken(source);
        }
        pool.release_fenced();
        pairs
    }
}
