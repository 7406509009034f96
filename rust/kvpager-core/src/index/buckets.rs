//! The hash table of the prefix index: from a hash to the blocks that may have it.
//!
//! A bucket is half a cache line: six seats, each a byte of the hash (its *tag*) and a block, and a count of the
//! entries that passed the bucket over because it was full. A look compares all tags in one word, so no branch depends
//! on where among them an entry lies (in a table without buckets that branch is guessed wrong about once a look), and a
//! miss ends at the first bucket that nothing passed over. Removal takes the entry out and the passes back, as in F14:
//! nothing moves, nothing is left behind.
//!
//! Invariants: an entry sits in its home bucket, or in one behind it while every bucket between counts it as passed (a
//! count that reached 2¹⁶ − 1 stays there); a tag is never 0, which marks an empty seat.
//!
//! Costs: O(1), one cache miss, nothing allocated after creation. 11 bytes a block: half of the seats are ever taken.

use super::hash::Hash;
use crate::ids::BlockId;

/// Words of a bucket. The first two are eight bytes: the tags and the two of the count. The others are 1 + a block.
const WORDS: usize = 8;
/// Where the blocks begin.
const BLOCKS: usize = WORDS - SEATS;
/// Entries of a bucket.
const SEATS: usize = 6;
/// Blocks of the pool for each bucket.
const BLOCKS_EACH: usize = 3;

/// Bytes for each block, rounded up.
pub(crate) const BYTES_PER_BLOCK: usize = (WORDS * size_of::<u32>()).div_ceil(BLOCKS_EACH);

/// A bit in the byte of each seat.
const SEAT_BITS: u64 = 0x0000_8080_8080_8080;
/// 1 in every byte.
const ONES: u64 = 0x0101_0101_0101_0101;
/// 1 in the count.
const PASS: u64 = 1 << (8 * SEATS);
const MOST_PASSES: u64 = u16::MAX as u64;

/// Where an entry that was not found would sit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gap {
    bucket: usize,
    seat: usize,
}

/// See the module header.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    /// Words and no struct, so that the memory comes zeroed from the system and is touched only as it is used.
    words: Vec<u32>,
    /// The word that the first bucket begins with, so that none lies across two lines of the cache.
    start: usize,
    /// Buckets that there are.
    len: usize,
}

impl Buckets {
    /// The caller has found that there is memory.
    pub(crate) fn new(num_blocks: usize) -> Self {
        let len = num_blocks.div_ceil(BLOCKS_EACH);
        let words = vec![0; if num_blocks > 0 { (len + 1) * WORDS } else { 0 }];
        let start = words.as_ptr().align_offset(WORDS * size_of::<u32>()).min(WORDS);
        Self { words, start, len }
    }

    /// The first block under this hash that `is_it`, or where an entry for it would go.
    #[expect(clippy::inline_always, reason = "so that the test of a candidate is part of the loop")]
    #[inline(always)]
    pub(crate) fn find(&self, hash: Hash, mut is_it: impl FnMut(BlockId) -> bool) -> Result<BlockId, Gap> {
        let home = self.home(hash);
        let mut at = home;
        loop {
            let bucket = self.bucket(at);
            let bytes = bytes(bucket);
            let mut seats = zero_seats(bytes ^ (tag(hash) * ONES));
            while seats != 0 {
                let entry = bucket[BLOCKS + first_seat(seats)];
                if entry != 0 && is_it(entry - 1) {
                    return Ok(entry - 1);
                }
                seats &= seats - 1;
            }
            if bytes < PASS {
                let free = zero_seats(bytes);
                if at == home && free != 0 {
                    return Err(Gap { bucket: home, seat: first_seat(free) });
                }
                return Err(self.gap(home));
            }
            at = self.after(at);
            if at == home {
                return Err(self.gap(home));
            }
        }
    }

    /// The first empty seat from a bucket on. There are more seats than blocks.
    #[cold]
    fn gap(&self, home: usize) -> Gap {
        let mut bucket = home;
        loop {
            let free = zero_seats(bytes(self.bucket(bucket)));
            if free != 0 {
                return Gap { bucket, seat: first_seat(free) };
            }
            bucket = self.after(bucket);
        }
    }

    /// Enters `block` at a gap that [`find`](Self::find) has just found for the same hash.
    #[inline]
    pub(crate) fn insert(&mut self, gap: Gap, hash: Hash, block: BlockId) {
        let mut at = self.home(hash);
        while at != gap.bucket {
            let bucket = self.bucket_mut(at);
            let passed = bytes(bucket);
            if passed / PASS < MOST_PASSES {
                set_bytes(bucket, passed + PASS);
            }
            at = self.after(at);
        }
        let bucket = self.bucket_mut(at);
        set_bytes(bucket, bytes(bucket) | (tag(hash) << (8 * gap.seat)));
        bucket[BLOCKS + gap.seat] = block + 1;
    }

    /// Takes out the entry of `block`, which is there under this hash.
    #[inline]
    pub(crate) fn remove(&mut self, hash: Hash, block: BlockId) {
        let mut at = self.home(hash);
        loop {
            let next = self.after(at);
            let bucket = self.bucket_mut(at);
            let taken = bytes(bucket);
            let mut seats = zero_seats(taken ^ (tag(hash) * ONES));
            while seats != 0 {
                let seat = first_seat(seats);
                if bucket[BLOCKS + seat] == block + 1 {
                    bucket[BLOCKS + seat] = 0;
                    set_bytes(bucket, taken & !(0xFF << (8 * seat)));
                    return;
                }
                seats &= seats - 1;
            }
            if taken / PASS < MOST_PASSES {
                set_bytes(bucket, taken - PASS);
            }
            at = next;
        }
    }

    /// Reads the home bucket of a hash; the value means nothing.
    #[inline]
    pub(crate) fn look_at(&self, hash: Hash) -> u32 {
        self.words[self.start + self.home(hash) * WORDS]
    }

    /// Drops every entry. O(table).
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// How many entries there are, and the first bucket that counts its passes wrongly. `hash_of` a block that is in
    /// the table. O(table).
    pub(crate) fn recount(&self, hash_of: impl Fn(BlockId) -> Hash) -> (usize, Option<usize>) {
        let mut passed = vec![0; self.len];
        let mut num_entries = 0;
        for bucket in 0..self.len {
            for &entry in self.bucket(bucket)[BLOCKS..].iter().filter(|&&entry| entry != 0) {
                num_entries += 1;
                let mut at = self.home(hash_of(entry - 1));
                while at != bucket {
                    passed[at] += 1;
                    at = self.after(at);
                }
            }
        }
        let counted = |bucket| bytes(self.bucket(bucket)) / PASS;
        let is_wrong = |&at: &usize| counted(at) != passed[at] && counted(at) < MOST_PASSES;
        (num_entries, (0..self.len).find(is_wrong))
    }

    #[inline]
    fn bucket(&self, at: usize) -> &[u32] {
        &self.words[self.start + at * WORDS..][..WORDS]
    }

    #[inline]
    fn bucket_mut(&mut self, at: usize) -> &mut [u32] {
        &mut self.words[self.start + at * WORDS..][..WORDS]
    }

    #[inline]
    fn home(&self, hash: Hash) -> usize {
        (((hash[0] >> 32) * self.len as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.len { 0 } else { at + 1 }
    }
}

/// A byte of the hash that its home does not depend on.
#[inline]
fn tag(hash: Hash) -> u64 {
    (hash[1] & 0xFF).max(1)
}

#[inline]
fn bytes(bucket: &[u32]) -> u64 {
    u64::from(bucket[0]) | u64::from(bucket[1]) << 32
}

#[inline]
fn set_bytes(bucket: &mut [u32], bytes: u64) {
    (bucket[0], bucket[1]) = (bytes as u32, (bytes >> 32) as u32);
}

/// A bit for each seat whose byte is 0. The first is right; one behind it may be a byte of 1.
#[inline]
fn zero_seats(bytes: u64) -> u64 {
    bytes.wrapping_sub(ONES) & !bytes & SEAT_BITS
}

#[inline]
fn first_seat(seats: u64) -> usize {
    seats.trailing_zeros() as usize / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hash by its home in a table of two buckets, which have 12 seats for at most six blocks, and its tag.
    fn hash(home: u64, tag: u64) -> Hash {
        [home << 63, tag]
    }

    /// The hash of each block in the tests.
    struct Kept {
        table: Buckets,
        hashes: Vec<Hash>,
    }

    impl Kept {
        fn new() -> Self {
            let table = Buckets::new(6);
            assert_eq!((table.len, (table.start * 4 + table.words.as_ptr() as usize) & 31), (2, 0));
            Self { table, hashes: vec![[0, 0]; 7] }
        }

        fn insert(&mut self, hash: Hash, block: BlockId) {
            let gap = self.table.find(hash, |found| found == block).expect_err("it is new");
            self.table.insert(gap, hash, block);
            self.hashes[block as usize] = hash;
        }

        fn find(&self, hash: Hash) -> Option<BlockId> {
            self.table.find(hash, |block| self.hashes[block as usize] == hash).ok()
        }

        fn remove(&mut self, block: BlockId) {
            self.table.remove(self.hashes[block as usize], block);
        }

        fn recount(&self) -> (usize, Option<usize>) {
            self.table.recount(|block| self.hashes[block as usize])
        }

        fn passed(&self) -> [u64; 2] {
            [0, 1].map(|at| bytes(self.table.bucket(at)) / PASS)
        }
    }

    #[test]
    fn entries_pass_full_buckets_and_are_counted_back() {
        let mut kept = Kept::new();
        for block in 0..7 {
            kept.insert(hash(0, 7), block); // equal tags; the seventh passes
        }
        assert_eq!((kept.recount(), kept.passed()), ((7, None), [1, 0]));
        assert_eq!(kept.table.find(hash(0, 7), |block| block == 6).ok(), Some(6));
        // What sits behind its home stays findable when the home empties.
        for block in 0..6 {
            kept.remove(block);
        }
        assert_eq!(kept.find(hash(0, 7)), Some(6));
        // Around the end: both buckets passed over, and a miss ends nevertheless.
        for block in 0..6 {
            kept.insert(hash(1, u64::from(block)), block);
        }
        assert_eq!((kept.passed(), kept.recount()), ([1, 1], (7, None)));
        assert_eq!((kept.find(hash(0, 9)), kept.find(hash(1, 9))), (None, None));
        assert_eq!([2, 5].map(|tag| kept.find(hash(1, tag))), [Some(2), Some(5)]);
        for block in 0..7 {
            kept.remove(block);
        }
        assert!(kept.table.words.iter().all(|&word| word == 0));
    }

    #[test]
    fn a_count_that_is_full_stays() {
        let mut kept = Kept::new();
        set_bytes(kept.table.bucket_mut(0), (MOST_PASSES - 1) * PASS);
        for block in 0..7 {
            kept.insert(hash(0, 7), block);
        }
        assert_eq!((kept.passed()[0], kept.recount()), (MOST_PASSES, (7, None)));
        kept.remove(6);
        assert_eq!((kept.passed()[0], kept.recount()), (MOST_PASSES, (6, None)));
        assert_eq!(kept.find(hash(0, 9)), None);
    }

    #[test]
    fn a_wrong_count_of_passes_is_found() {
        let mut kept = Kept::new();
        kept.insert(hash(1, 0), 3);
        assert_eq!(kept.recount(), (1, None));
        let bucket = kept.table.bucket_mut(1);
        set_bytes(bucket, bytes(bucket) + PASS);
        assert_eq!(kept.recount(), (1, Some(1)));
        kept.table.clear();
        assert_eq!(kept.recount(), (0, None));
        assert!(Buckets::new(0).words.is_empty());
    }
}
