//! The ledger of copy-on-write: which destination waits for the bytes of which source.
//!
//! Invariants: a destination is live with ref count 1, is never a source and never shared; a source counts each
//! pair that reads it. So sources and destinations are disjoint, and the pairs may be copied in any order.
//!
//! Costs: owing, dropping and looking are O(1), taking is O(pairs). The pairs are a list threaded through the pool's
//! links in the order in which they came to be owed; nothing is hashed or allocated.

use crate::ids::BlockId;
use crate::links::List;
use crate::pool::{Pool, Recount};

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct CopyLedger {
    /// Of each block: 1 + the source of the copy owed into it, 0 if none is.
    source_plus_one: Vec<u32>,
    destinations: List,
    /// Pairs that came to be owed since creation.
    num_owed_ever: u64,
}

impl CopyLedger {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self { source_plus_one: vec![0; num_blocks as usize], destinations: List::new(), num_owed_ever: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.destinations.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn num_owed_ever(&self) -> u64 {
        self.num_owed_ever
    }

    /// The source whose bytes `block` waits for.
    pub(crate) fn source_of(&self, block: BlockId) -> Option<BlockId> {
        self.source_plus_one[block as usize].checked_sub(1)
    }

    pub(crate) fn owe(&mut self, pool: &mut Pool, source: BlockId, destination: BlockId) {
        pool.add_reader(source);
        self.source_plus_one[destination as usize] = source + 1;
        self.destinations.push_back(pool.links_mut(), destination);
        self.num_owed_ever += 1;
    }

    /// Forgets the pair into `block`, if there is one: the block is about to lose its holder. A source that has no
    /// holder and no other reader becomes free.
    #[inline]
    pub(crate) fn drop_into(&mut self, pool: &mut Pool, block: BlockId) {
        if let Some(source) = self.source_of(block) {
            self.source_plus_one[block as usize] = 0;
            self.destinations.remove(pool.links_mut(), block);
            pool.drop_reader(source);
        }
    }

    /// The owed pairs, oldest first.
    pub(crate) fn pairs<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = (BlockId, BlockId)> + 'a {
        self.destinations
            .iter(pool.links())
            .filter_map(|destination| Some((self.source_of(destination)?, destination)))
    }

    /// Hands over every pair, oldest first, and lets go of the sources.
    pub(crate) fn take(&mut self, pool: &mut Pool) -> Vec<(BlockId, BlockId)> {
        let pairs: Vec<_> = self.pairs(pool).collect();
        while self.destinations.pop_front(pool.links_mut()).is_some() {}
        for &(source, destination) in &pairs {
            self.source_plus_one[destination as usize] = 0;
            pool.source_taken(source);
        }
        pool.release_fenced();
        pairs
    }

    /// Notes in `recount` which blocks the pairs read, then adds a line for each pair with a bad end.
    pub(crate) fn audit(&self, pool: &Pool, recount: &mut Recount, faults: &mut Vec<String>) {
        let pairs: Vec<(BlockId, BlockId)> = self.pairs(pool).collect();
        if pairs.len() != self.len() as usize {
            faults.push(format!("owed copies: {} pairs linked, {} counted", pairs.len(), self.len()));
        }
        if self.num_owed_ever < u64::from(self.len()) {
            let (counted, owed) = (self.num_owed_ever, self.len());
            faults.push(format!("counter `num_copies`: {counted}, but {owed} pairs are owed"));
        }
        for &(source, _) in &pairs {
            if let Some(found) = recount.of_mut(source) {
                found.readers += 1;
            }
        }
        for &(source, destination) in &pairs {
            let pair = format!("owed copy {source} → {destination}");
            let Some(found) = recount.of(destination) else {
                faults.push(format!("{pair}: the destination was never handed out"));
                continue;
            };
            if found.holders != 1 {
                faults.push(format!("{pair}: the destination has {} holders, not 1", found.holders));
            }
            if pool.is_held(destination) {
                faults.push(format!("{pair}: the destination is held by a caller"));
            }
            if pool.is_indexed(destination) {
                faults.push(format!("{pair}: the destination is indexed"));
            }
            if found.readers > 0 {
                faults.push(format!("{pair}: the destination is a source too"));
            }
            match recount.of(source) {
                None => faults.push(format!("{pair}: the source was never handed out")),
                Some(found) if found.returned > 0 => faults.push(format!("{pair}: the source is free")),
                Some(found) if found.cached > 0 => faults.push(format!("{pair}: the source can be evicted")),
                Some(_) => {}
            }
        }
    }

    /// Breaks a counter, for the tests of the audit.
    #[cfg(test)]
    pub(crate) fn forget_count(&mut self) {
        self.num_owed_ever = 0;
    }
}
