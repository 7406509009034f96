//! S3-FIFO of J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vinayak, "FIFO queues are all you need for cache eviction",
//! SOSP 2023: a *small* queue that most blocks pass through once, a *main* queue for those that were hit, and a *ghost*
//! that remembers what was evicted.
//!
//! A block counts its hits, up to three. Released without a hit it enters small; with one, main. Main holds at most
//! nine tenths of the pool: beyond that its hand looks at the oldest block. One that was hit goes round again with a
//! hit fewer (*lazy promotion*), one without goes to the young end of small. Victims come from small, so what is never
//! hit leaves soon (*quick demotion*). What is evicted is kept in the ghost by a fingerprint of its tokens; a block
//! with that fingerprint starts with a hit when it is indexed again.
//!
//! Where this differs from the paper: there, a block stays in its queue while it is read. Here the queues hold cached
//! blocks only, so a hit takes it out, and it enters the queue that it belongs to when its last holder goes. There,
//! main evicts; here it demotes to small, for only then a child goes before its parent. The ghost is a table with one
//! place for each block, which the next fingerprint for the same place overwrites: bounded, and nothing to sweep.
//!
//! # Prefix-closed
//!
//! Write f for the hits of a block, *main* for one that is in main or was when it was taken out. Of a parent p and its
//! child c, always: f(c) ≤ f(p), if c is main or f(c) > 0 so is p or f(p) > 0, and no list has p where it leaves first:
//!
//! * A hit marks the whole matched prefix, so it counts for p whenever it counts for c. The ghost gives c a hit only if
//!   p has one, or there is no p.
//! * Both in small: c entered first, for it was released first, or demoted first (see below). It is evicted first.
//! * c in small, p in main: small is evicted first, and p can enter it behind c only.
//! * c in main, p in small: impossible, for p was main or hit when c was, and p is demoted after c.
//! * Both in main: blocks leave it by (hits, place), the least first, and c stands before p in that order. It does
//!   when p enters, behind c and with f(c) ≤ f(p). The hand keeps it so: if it sends c round, f(c) − 1 < f(p); if it
//!   sends p round, p was the oldest, so f(c) < f(p) before, and f(c) ≤ f(p) − 1 with c before p now. If it demotes p,
//!   then f(p) is 0 and p the oldest, so c is not in main any more.
//!
//! Costs: O(1), amortised for the hand: each block it sends round uses up a hit. 5 bytes a block, the ghost included.

use super::{AuditedPool, Eviction};
use crate::ids::{BlockId, TokenId};
use crate::links::{Links, List};

/// The hits of a block.
const HITS: u8 = 3;
/// In the main list, or it was when it was taken out.
const MAIN: u8 = 4;

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct S3Fifo {
    small: List,
    main: List,
    /// Most blocks in main.
    capacity: u32,
    /// Of each block: [`HITS`], [`MAIN`].
    marks: Vec<u8>,
    /// Fingerprints of what was evicted, each at its place; 0 for none.
    ghost: Vec<u32>,
}

impl S3Fifo {
    fn hits(&self, block: BlockId) -> u8 {
        self.marks[block as usize] & HITS
    }

    fn is_main(&self, block: BlockId) -> bool {
        self.marks[block as usize] & MAIN != 0
    }

    /// Takes the next block without a hit out of main; those before it go round with a hit fewer.
    fn turn(&mut self, links: &mut Links) -> Option<BlockId> {
        loop {
            let oldest = self.main.pop_front(links)?;
            if self.hits(oldest) == 0 {
                self.marks[oldest as usize] = 0;
                return Some(oldest);
            }
            self.marks[oldest as usize] -= 1;
            self.main.push_back(links, oldest);
        }
    }

    /// Where the ghost keeps the fingerprint of these tokens, and the fingerprint.
    fn ghost_of(&self, token_ids: &[TokenId]) -> (usize, u32) {
        let fingerprint = fingerprint(token_ids);
        (((u64::from(fingerprint) * self.ghost.len() as u64) >> 32) as usize, fingerprint)
    }
}

/// FNV-1a over the ids, mixed so that the high bits choose the place; never 0. It depends on nothing but the tokens: no
/// seed, no parent. Two blocks that share it are a hit too many, not a wrong answer.
fn fingerprint(token_ids: &[TokenId]) -> u32 {
    let hash = token_ids.iter().fold(0x811C_9DC5_u32, |hash, &id| (hash ^ id).wrapping_mul(0x0100_0193));
    let mixed = (hash ^ (hash >> 16)).wrapping_mul(0x85EB_CA6B);
    (mixed ^ (mixed >> 13)) | 1
}

impl Eviction for S3Fifo {
    const BYTES_PER_BLOCK: usize = size_of::<u8>() + size_of::<u32>();

    fn new(num_blocks: u32) -> Self {
        Self {
            small: List::new(),
            main: List::new(),
            capacity: (u64::from(num_blocks) * 9 / 10) as u32,
            marks: vec![0; num_blocks as usize],
            ghost: vec![0; num_blocks as usize],
        }
    }

    fn insert(&mut self, links: &mut Links, block: BlockId) {
        if self.marks[block as usize] == 0 {
            self.small.push_back(links, block);
            return;
        }
        self.marks[block as usize] |= MAIN;
        self.main.push_back(links, block);
        if self.main.len() > self.capacity
            && let Some(demoted) = self.turn(links)
        {
            self.small.push_back(links, demoted);
        }
    }

    fn remove(&mut self, links: &mut Links, block: BlockId) {
        let list = if self.is_main(block) { &mut self.main } else { &mut self.small };
        list.remove(links, block);
    }

    fn pop_victim(&mut self, links: &mut Links) -> Option<BlockId> {
        self.small.pop_front(links).or_else(|| self.turn(links))
    }

    fn first(&self) -> Option<BlockId> {
        self.small.first().or_else(|| self.main.first())
    }

    fn hit(&mut self, block: BlockId) {
        if self.hits(block) < HITS {
            self.marks[block as usize] += 1;
        }
    }

    fn evicted(&mut self, token_ids: &[TokenId]) {
        let (place, fingerprint) = self.ghost_of(token_ids);
        self.ghost[place] = fingerprint;
    }

    fn indexed(&mut self, block: BlockId, parent: Option<BlockId>, token_ids: &[TokenId]) {
        let (place, fingerprint) = self.ghost_of(token_ids);
        if self.ghost[place] == fingerprint {
            self.ghost[place] = 0;
            if parent.is_none_or(|parent| self.hits(parent) > 0) {
                self.marks[block as usize] = 1;
            }
        }
    }

    fn forget(&mut self, block: BlockId) {
        self.marks[block as usize] = 0;
    }

    fn forget_evicted(&mut self) {
        self.ghost.fill(0);
    }

    fn len(&self) -> u32 {
        self.small.len() + self.main.len()
    }

    fn order(&self, links: &Links) -> Vec<BlockId> {
        let mut main: Vec<BlockId> = self.main.iter(links).collect();
        // What the hand would do: a round for each hit.
        main.sort_by_key(|&block| self.marks.get(block as usize).map_or(0, |marks| marks & HITS));
        self.small.iter(links).chain(main).collect()
    }

    fn audit(&self, pool: &AuditedPool<'_>, faults: &mut Vec<String>) {
        let is_known = |block: BlockId| (block as usize) < self.marks.len();
        for block in self.small.iter(pool.links).filter(|&block| is_known(block)) {
            if self.marks[block as usize] != 0 {
                faults.push(format!("block {block}: in the small queue, but marked as hit or main"));
            }
        }
        for block in self.main.iter(pool.links).filter(|&block| is_known(block)) {
            if !self.is_main(block) {
                faults.push(format!("block {block}: in the main queue, but not marked so"));
            }
        }
        if self.main.len() > self.capacity {
            let (len, capacity) = (self.main.len(), self.capacity);
            faults.push(format!("main queue: {len} blocks, at most {capacity} may be"));
        }
        for block in (0..pool.used).filter(|&block| !(pool.is_indexed)(block)) {
            if self.marks[block as usize] != 0 {
                faults.push(format!("block {block}: marked as hit or main, but not indexed"));
            }
        }
        for &(block, parent) in pool.parents.iter().filter(|&&(block, parent)| is_known(block.max(parent))) {
            if self.hits(block) > self.hits(parent) {
                faults.push(format!("block {block}: more hits than its parent {parent}"));
            }
            if self.is_main(block) && self.marks[parent as usize] == 0 {
                faults.push(format!("block {block}: main, but its parent {parent} is neither main nor hit"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four in the main queue, six blocks.
    fn queues() -> (Links, S3Fifo) {
        (Links::new(6), S3Fifo { capacity: 4, ..S3Fifo::new(6) })
    }

    #[test]
    fn what_was_hit_outlives_what_was_not_and_goes_round_once_for_each_hit() {
        let (mut links, mut policy) = queues();
        for (block, num_hits) in [(0, 1), (1, 0), (2, 5), (3, 0), (4, 1)] {
            (0..num_hits).for_each(|_| policy.hit(block));
            policy.insert(&mut links, block);
        }
        assert_eq!((policy.hits(2), policy.len()), (3, 5));
        assert_eq!(policy.order(&links), [1, 3, 0, 4, 2]);
        let victims: Vec<_> = std::iter::from_fn(|| policy.pop_victim(&mut links)).collect();
        assert_eq!(victims, [1, 3, 0, 4, 2]);
    }

    #[test]
    fn main_beyond_its_share_demotes_the_least_hit() {
        let (mut links, mut policy) = queues();
        for (block, num_hits) in [(0, 2), (1, 1), (2, 2), (3, 2), (4, 2)] {
            (0..num_hits).for_each(|_| policy.hit(block));
            policy.insert(&mut links, block);
        }
        assert!(!policy.is_main(1) && policy.hits(1) == 0);
        assert_eq!(policy.order(&links), [1, 0, 2, 3, 4]); // 0 went round twice, 2, 3 and 4 once
        policy.remove(&mut links, 0);
        policy.insert(&mut links, 0); // it belongs to main without a further hit
        assert!(policy.is_main(0));
    }

    #[test]
    fn the_ghost_gives_a_hit_to_a_root_and_below_a_hit() {
        let (mut links, mut policy) = queues();
        for (token, parent, hits) in [(7, None, 1), (7, None, 0), (8, Some(5), 0), (9, Some(0), 1)] {
            if hits > 0 || parent.is_some() {
                policy.evicted(&[token]);
            }
            policy.forget(1);
            policy.indexed(1, parent, &[token]);
            assert_eq!(policy.hits(1), hits, "{token} below {parent:?}");
            policy.marks[0] = 1;
        }
        policy.evicted(&[7]);
        policy.forget_evicted();
        policy.indexed(2, None, &[7]);
        assert_eq!(policy.hits(2), 0);
        policy.insert(&mut links, 1);
        assert!(policy.is_main(1));
    }
}
