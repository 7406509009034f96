//! How fast the workloads can be with nothing in the way: a floor, not a design.
//!
//! The same work on bare arrays, written to be quick and nothing else. Left out, and paid for by the real manager:
//! tokens are not compared on a hit, so a collision of hashes would hand out another prompt's keys and values; no
//! salts, adapters or media; no demand settled before a change, so running out half-way leaves half a change; no
//! copy-on-write, fences, pins, watermark; no ids of sequences, so nothing is looked up; no errors, no audit, no lock.
//! A child may be reached through a parent that was evicted. Never import this; compare with it.
//!
//! What it has: reference counts, previous and next links of one ring through the free blocks (uncached ones go in
//! front, cached ones at the back, so the front is the next to be handed out), a chained 128-bit multiply-mix hash per
//! block, and an open-addressing table of (hash, block) at most half full, with backward-shift deletion.

use std::collections::VecDeque;
use std::hint::black_box;

use super::meter::Meter;
use super::workloads::{
    APPEND_POOL, BATCH, BLOCK_SIZE, DECODE_POOL, DECODE_STEPS, EVICTING_POOL, HOLDING_POOL, MAX_BLOCKS,
    NUM_PROMPTS, NUM_STEPS, PROMPT_TOKENS, RELEASED_BLOCKS, Row, WINDOW, decode_length,
};

/// Hash of the empty prefix. A hash is odd, so that 0 can stand for an empty place.
const ROOT: u128 = 1;

/// Table entries kept for a sequence of the appends.
const TABLE_WIDTH: usize = 72;

/// Token ids kept for it: not a multiple of 4,096 bytes, lest the rows fall on the same lines of the cache.
const KEPT_TOKENS: usize = 1_056;

struct Pool {
    ref_counts: Vec<u32>,
    /// Links of the ring; the entry behind the last block is its head.
    previous: Vec<u32>,
    next: Vec<u32>,
    /// Hash under which the table names the block, or 0.
    hashes: Vec<u128>,
    table: Vec<(u128, u32)>,
    mask: usize,
}

impl Pool {
    fn new(num_blocks: usize) -> Self {
        let capacity = (2 * num_blocks).next_power_of_two();
        let head = num_blocks as u32;
        Self {
            ref_counts: vec![0; num_blocks],
            previous: (0..=head).map(|block| if block == 0 { head } else { block - 1 }).collect(),
            next: (0..=head).map(|block| if block == head { 0 } else { block + 1 }).collect(),
            hashes: vec![0; num_blocks],
            table: vec![(0, 0); capacity],
            mask: capacity - 1,
        }
    }

    #[inline]
    fn head(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    #[inline]
    fn link_between(&mut self, before: u32, block: u32, after: u32) {
        self.previous[block as usize] = before;
        self.next[block as usize] = after;
        self.next[before as usize] = block;
        self.previous[after as usize] = block;
    }

    #[inline]
    fn unlink(&mut self, block: u32) {
        let (before, after) = (self.previous[block as usize], self.next[block as usize]);
        self.next[before as usize] = after;
        self.previous[after as usize] = before;
    }

    /// The front of the ring, without its cached content.
    #[inline]
    fn take(&mut self) -> u32 {
        let block = self.next[self.head() as usize];
        assert!(block != self.head(), "the pool is large enough");
        self.unlink(block);
        let hash = std::mem::take(&mut self.hashes[block as usize]);
        if hash != 0 {
            self.forget(hash, block);
        }
        self.ref_counts[block as usize] = 1;
        block
    }

    #[inline]
    fn give_back(&mut self, block: u32) {
        self.ref_counts[block as usize] -= 1;
        if self.ref_counts[block as usize] == 0 {
            let head = self.head();
            if self.hashes[block as usize] == 0 {
                self.link_between(head, block, self.next[head as usize]);
            } else {
                self.link_between(self.previous[head as usize], block, head);
            }
        }
    }

    #[inline]
    fn find(&self, hash: u128) -> Option<(usize, u32)> {
        let mut place = hash as usize & self.mask;
        loop {
            let (found, block) = self.table[place];
            if found == hash {
                return Some((place, block));
            }
            if found == 0 {
                return None;
            }
            place = (place + 1) & self.mask;
        }
    }

    /// Names the block, unless another block has the hash already.
    #[inline]
    fn insert(&mut self, hash: u128, block: u32) {
        let mut place = hash as usize & self.mask;
        while self.table[place].0 != 0 {
            if self.table[place].0 == hash {
                return;
            }
            place = (place + 1) & self.mask;
        }
        self.table[place] = (hash, block);
        self.hashes[block as usize] = hash;
    }

    /// Takes the entry out and moves later ones of the same run up, so that no gap parts an entry from its home.
    fn forget(&mut self, hash: u128, block: u32) {
        let Some((mut gap, _)) = self.find(hash).filter(|&(_, found)| found == block) else { return };
        let mut place = gap;
        loop {
            place = (place + 1) & self.mask;
            let moved = self.table[place].0;
            if moved == 0 {
                break;
            }
            let from_home = place.wrapping_sub(moved as usize) & self.mask;
            if from_home >= place.wrapping_sub(gap) & self.mask {
                self.table[gap] = self.table[place];
                gap = place;
            }
        }
        self.table[gap] = (0, 0);
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Two lanes of multiply-and-fold over 16 bytes a turn (the scheme of wyhash), chained on the parent's hash. The odd
/// constants are arbitrary.
#[inline]
fn hash_block(parent: u128, tokens: &[u32]) -> u128 {
    let mut left = parent as u64 ^ 0x9E37_79B9_7F4A_7C15;
    let mut right = (parent >> 64) as u64 ^ 0xD1B5_4A32_D192_ED03;
    for four in tokens.chunks_exact(4) {
        let a = u64::from(four[0]) | u64::from(four[1]) << 32;
        let b = u64::from(four[2]) | u64::from(four[3]) << 32;
        left = fold(a ^ left, b ^ 0xA076_1D64_78BD_642F);
        right = fold(b ^ right, a ^ 0xE703_7ED1_A0B4_28DB);
    }
    let high = fold(right, 0x8EBC_6AF0_9C88_C6E3);
    let low = fold(left, 0x5896_5CC7_5374_CC35);
    u128::from(high) << 64 | u128::from(low) | 1
}

/// What a batch of sequences keeps, row by row, and what a step writes.
struct Batch {
    pool: Pool,
    tables: Vec<u32>,
    lengths: Vec<u32>,
    tokens: Vec<u32>,
    last_hashes: Vec<u128>,
    slots: Vec<i64>,
    seq_lens: Vec<i32>,
    changed: Vec<(u32, u32, u32)>,
}

impl Batch {
    fn new() -> Self {
        Self {
            pool: Pool::new(APPEND_POOL),
            tables: vec![0; BATCH * TABLE_WIDTH],
            lengths: vec![0; BATCH],
            tokens: vec![0; BATCH * KEPT_TOKENS],
            last_hashes: vec![ROOT; BATCH],
            slots: vec![0; BATCH],
            seq_lens: vec![0; BATCH],
            changed: Vec::with_capacity(BATCH),
        }
    }

    /// One token for each row: its slot, the new length, the new table entry if it opens a block; with `INDEXED`, a
    /// block that became full is hashed and inserted.
    fn step<const INDEXED: bool>(&mut self, generated: &[u32]) {
        let Self { pool, changed, .. } = self;
        // Slices, so that their bounds are values of this function and not memory that a store might change.
        let (tables, tokens, last_hashes) =
            (&mut self.tables[..], &mut self.tokens[..], &mut self.last_hashes[..]);
        let (lengths, generated) = (&mut self.lengths[..BATCH], &generated[..BATCH]);
        let (slots, seq_lens) = (&mut self.slots[..BATCH], &mut self.seq_lens[..BATCH]);
        changed.clear();
        for row in 0..BATCH {
            let position = lengths[row] as usize;
            let (logical, offset) = (position / BLOCK_SIZE, position % BLOCK_SIZE);
            if offset == 0 {
                let block = pool.take();
                tables[row * TABLE_WIDTH + logical] = block;
                changed.push((row as u32, logical as u32, block));
            }
            let block = tables[row * TABLE_WIDTH + logical];
            slots[row] = i64::from(block) * BLOCK_SIZE as i64 + offset as i64;
            tokens[row * KEPT_TOKENS + position] = generated[row];
            lengths[row] += 1;
            seq_lens[row] = lengths[row] as i32;
            if INDEXED && offset == BLOCK_SIZE - 1 {
                let end = row * KEPT_TOKENS + position + 1;
                last_hashes[row] = hash_block(last_hashes[row], &tokens[end - BLOCK_SIZE..end]);
                pool.insert(last_hashes[row], block);
            }
        }
    }
}

/// `NUM_STEPS` steps, then all sequences are released.
pub(crate) fn lifecycle(indexed: bool, generated: &[Vec<u32>], meter: &mut Meter) {
    let mut batch = Batch::new();
    let (row, step) = if indexed {
        (Row::AppendIndexed, Batch::step::<true> as fn(&mut Batch, &[u32]))
    } else {
        (Row::Append, Batch::step::<false> as fn(&mut Batch, &[u32]))
    };
    meter.region(row, NUM_STEPS, || {
        for tokens in generated {
            step(&mut batch, tokens);
            black_box((&batch.slots, &batch.seq_lens, &batch.changed));
        }
    });
    step(&mut batch, &generated[0]); // opens the 65th block
    if indexed {
        return;
    }
    let Batch { pool, tables, .. } = &mut batch;
    meter.region(Row::Release, BATCH, || {
        for table in tables.chunks_exact(TABLE_WIDTH) {
            for &block in table[..RELEASED_BLOCKS].iter().rev() {
                pool.give_back(block);
            }
        }
    });
}

/// Each prompt is hashed, matched, given the blocks it lacks, which are inserted; all are held to the end, or the
/// oldest of more than `WINDOW` is released.
pub(crate) fn prompts(evicting: bool, prompts: &[Vec<u32>], meter: &mut Meter) {
    const NUM_BLOCKS: usize = PROMPT_TOKENS / BLOCK_SIZE;
    let (row, num_blocks, window) = if evicting {
        (Row::PromptsEvicting, EVICTING_POOL, WINDOW)
    } else {
        (Row::PromptsHeld, HOLDING_POOL, NUM_PROMPTS)
    };
    let mut pool = Pool::new(num_blocks);
    let mut held: VecDeque<Vec<u32>> = VecDeque::new();
    let mut hashes = [0; NUM_BLOCKS];
    let mut num_hits = 0;
    meter.region(row, prompts.len(), || {
        for tokens in prompts {
            let mut parent = ROOT;
            for (hash, block) in hashes.iter_mut().zip(tokens.chunks_exact(BLOCK_SIZE)) {
                parent = hash_block(parent, block);
                *hash = parent;
            }
            let mut table = Vec::with_capacity(NUM_BLOCKS);
            for &hash in &hashes[..NUM_BLOCKS - 1] {
                let Some((_, block)) = pool.find(hash) else { break };
                if pool.ref_counts[block as usize] == 0 {
                    pool.unlink(block);
                }
                pool.ref_counts[block as usize] += 1;
                table.push(block);
            }
            num_hits += table.len();
            for &hash in &hashes[table.len()..] {
                let block = pool.take();
                pool.insert(hash, block);
                table.push(block);
            }
            held.push_back(table);
            if held.len() > window {
                let oldest = held.pop_front().expect("it is not empty");
                oldest.iter().rev().for_each(|&block| pool.give_back(block));
            }
        }
        while let Some(oldest) = held.pop_front() {
            oldest.iter().rev().for_each(|&block| pool.give_back(block));
        }
    });
    super::check_hits(num_hits * BLOCK_SIZE);
}

/// The sequences of a decode batch at 8k tokens, and one step's arrays for them.
struct Decode {
    pool: Pool,
    own_tables: Vec<Vec<u32>>,
    lengths: Vec<u32>,
    tables: Vec<i32>,
    seq_lens: Vec<i32>,
    slots: Vec<i64>,
    changed: Vec<(u32, u32, u32)>,
}

impl Decode {
    fn new() -> Self {
        let mut pool = Pool::new(DECODE_POOL);
        let lengths: Vec<u32> = (0..BATCH).map(|row| decode_length(row) as u32).collect();
        let mut own_table = |&length: &u32| {
            let num_blocks = (length as usize).div_ceil(BLOCK_SIZE);
            (0..MAX_BLOCKS).map(|logical| if logical < num_blocks { pool.take() } else { 0 }).collect()
        };
        let own_tables: Vec<Vec<u32>> = lengths.iter().map(&mut own_table).collect();
        let tables = own_tables.iter().flatten().map(|&block| block as i32).collect();
        let (seq_lens, slots) = (vec![0; BATCH], vec![0; BATCH]);
        Self { pool, own_tables, lengths, tables, seq_lens, slots, changed: Vec::with_capacity(BATCH) }
    }

    /// Each row that is about to begin a block gets one, in its own table.
    fn open_blocks(&mut self) {
        self.changed.clear();
        // The stagger says which sixteenth of the rows opens a block: a floor need not look for it.
        let first = (BLOCK_SIZE - self.lengths[0] as usize % BLOCK_SIZE) % BLOCK_SIZE;
        for row in (first..BATCH).step_by(BLOCK_SIZE) {
            let logical = self.lengths[row] as usize / BLOCK_SIZE;
            let block = self.pool.take();
            self.own_tables[row][logical] = block;
            self.changed.push((row as u32, logical as u32, block));
        }
    }

    /// Append and show: all tables are copied whole from the sequences' own.
    fn rebuild(&mut self) {
        self.open_blocks();
        let Self { own_tables, lengths, tables, seq_lens, slots, .. } = self;
        for (row, own) in own_tables.iter().enumerate() {
            for (entry, &block) in tables[row * MAX_BLOCKS..][..MAX_BLOCKS].iter_mut().zip(own) {
                *entry = block as i32;
            }
            let position = lengths[row];
            lengths[row] += 1;
            seq_lens[row] = lengths[row] as i32;
            let block = own[position as usize / BLOCK_SIZE];
            slots[row] = i64::from(block) * BLOCK_SIZE as i64 + i64::from(position) % BLOCK_SIZE as i64;
        }
    }

    /// Append and show: the new entries are changed in place.
    fn delta(&mut self) {
        self.open_blocks();
        let Self { lengths, tables, seq_lens, slots, changed, .. } = self;
        for &(row, logical, block) in &*changed {
            tables[row as usize * MAX_BLOCKS + logical as usize] = block as i32;
        }
        // Slices, so that their bounds are values of this function and not memory that a store might change.
        let (tables, lengths) = (&tables[..], &mut lengths[..BATCH]);
        let (seq_lens, slots) = (&mut seq_lens[..BATCH], &mut slots[..BATCH]);
        for row in 0..BATCH {
            let position = lengths[row];
            lengths[row] += 1;
            seq_lens[row] = lengths[row] as i32;
            let block = tables[row * MAX_BLOCKS + position as usize / BLOCK_SIZE];
            slots[row] = i64::from(block) * BLOCK_SIZE as i64 + i64::from(position) % BLOCK_SIZE as i64;
        }
    }
}

/// `DECODE_STEPS` steps: everything copied anew in each, then from the start again, what changed alone.
pub(crate) fn decode(meter: &mut Meter) {
    let ways = [
        (Row::DecodeRebuild, Decode::rebuild as fn(&mut Decode)),
        (Row::DecodeDelta, Decode::delta as fn(&mut Decode)),
    ];
    for (row, step) in ways {
        let mut decode = Decode::new();
        meter.region(row, DECODE_STEPS, || {
            for _ in 0..DECODE_STEPS {
                step(&mut decode);
                let Decode { tables, seq_lens, slots, changed, .. } = &decode;
                black_box((tables, seq_lens, slots, changed));
            }
        });
    }
}
