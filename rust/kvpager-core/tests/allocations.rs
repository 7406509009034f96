//! A step allocates nothing on the heap: counted by an allocator that stands in for the system's.
//!
//! Alone in its file, for the allocator is that of the whole process; the count is of the thread that asks.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvpager_core::{
    AdmitOptions, BatchId, BatchMemory, BatchShape, BlockManager, Config, Prompt, SequenceId, Slot, TokenId,
};

struct Counting;

thread_local! {
    /// Starts as a constant and needs no destructor: reading it allocates nothing.
    static NUM_ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract; counting touches no
// memory but the counter. (`realloc` and `alloc_zeroed` come to `alloc` by the trait's own definitions.)
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.set(NUM_ALLOCATIONS.get() + 1);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `System.alloc` with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A life of a batch: made, prefilled, forked, decoded until the pool is nearly empty and beyond, cut back, released.
fn live(manager: &mut BlockManager, ids: &[SequenceId], slots: &mut Vec<Slot>) {
    let (originals, forks) = ids.split_at(ids.len() / 2);
    for (&id, &fork) in originals.iter().zip(forks) {
        manager.create_sequence(id).unwrap();
        slots.clear();
        manager.append_tokens(id, 5, None, slots).unwrap();
        manager.fork_sequence(id, fork, None).unwrap();
    }
    let mut num_refused = 0;
    for _ in 0..20 {
        slots.clear();
        num_refused += usize::from(manager.append_batch(ids, None, None, slots).is_err());
    }
    assert!(num_refused > 0, "the exact demand was counted too");
    for &id in ids {
        manager.truncate_sequence(id, 3).unwrap();
        manager.release_sequence(id).unwrap();
    }
    assert_eq!(manager.take_copies(), []);
}

#[test]
fn a_warm_manager_allocates_nothing() {
    let ids: Vec<SequenceId> = (0..16).collect();
    let mut manager = BlockManager::new(Config::new(16 * 4, 4).unwrap()).unwrap();
    let mut slots = Vec::new();
    // Rows, tables, scratch and the map of ids grow to the size of the batch, once.
    for _ in 0..20 {
        live(&mut manager, &ids, &mut slots);
    }
    let before = NUM_ALLOCATIONS.get();
    for _ in 0..100 {
        live(&mut manager, &ids, &mut slots);
    }
    let allocated = NUM_ALLOCATIONS.get() - before;
    // An `OutOfBlocks` error is plain numbers, so even a refused step allocates nothing.
    assert_eq!(allocated, 0);
}

/// A batch in motion: rows come, decode, prefill, are cut back, copy, run out of blocks, move and go.
fn decode(
    manager: &mut BlockManager,
    batch: BatchId,
    memory: &mut [BatchMemory; 2],
    ids: &[SequenceId],
    counts: &[u64],
) {
    let (originals, forks) = ids.split_at(ids.len() / 2);
    for (&id, &fork) in originals.iter().zip(forks) {
        manager.create_sequence(id).unwrap();
        manager.batch(batch).unwrap().add(id).unwrap();
        manager.fork_sequence(id, fork, None).unwrap();
        manager.batch(batch).unwrap().add(fork).unwrap();
    }
    let mut step = |manager: &mut BlockManager, counts: Option<&[u64]>| {
        manager
            .batch(batch)
            .unwrap()
            .step(&mut memory.each_mut().map(BatchMemory::lend), counts, None)
            .is_err()
    };
    let num_refused = (0..20).filter(|_| step(manager, None)).count();
    assert!(num_refused > 0, "the exact demand was counted too");
    for &id in originals {
        manager.truncate_sequence(id, 2).unwrap();
    }
    assert!(!step(manager, Some(counts)));
    manager.batch(batch).unwrap().commit(None, None).unwrap();
    manager.batch(batch).unwrap().invalidate().unwrap();
    for &id in ids {
        manager.batch(batch).unwrap().remove(id).unwrap();
        manager.release_sequence(id).unwrap();
    }
    step(manager, None);
}

#[test]
fn a_warm_batch_allocates_nothing() {
    let ids: Vec<SequenceId> = (0..16).collect();
    let counts: Vec<u64> = (0..16).map(|row| row % 3 * (1 - row % 2)).collect();
    let mut manager = BlockManager::new(Config::new(16 * 2, 4).unwrap()).unwrap();
    let shape = BatchShape { max_rows: 16, max_blocks: 8, max_tokens: 32, max_changes: 24 };
    let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend)).unwrap();
    for _ in 0..20 {
        decode(&mut manager, batch, &mut memory, &ids, &counts);
    }
    let before = NUM_ALLOCATIONS.get();
    for _ in 0..100 {
        decode(&mut manager, batch, &mut memory, &ids, &counts);
    }
    assert_eq!(NUM_ALLOCATIONS.get() - before, 0);
}

/// With the index: prompts are found, steps tell ids, blocks fill, collapse and are evicted.
#[test]
fn a_warm_batch_with_the_index_allocates_nothing() {
    let config = Config::new(24, 4).unwrap().with_prefix_caching(true).with_fences(true);
    let mut manager = BlockManager::new(config).unwrap();
    let shape = BatchShape { max_rows: 4, max_blocks: 8, max_tokens: 8, max_changes: 16 };
    let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend)).unwrap();
    let mut slots = Vec::new();
    let mut live = |manager: &mut BlockManager, life: u32| {
        for id in 0..4 {
            slots.clear();
            let prompt = [1, 2, 3, 4, life % 5, 6];
            manager.admit(id, &Prompt::new(&prompt), &AdmitOptions::default(), &mut slots).unwrap();
            manager.batch(batch).unwrap().add(id).unwrap();
        }
        for step in 0..6 {
            let token_ids = [step, step, step, life % 7];
            let mut sets = memory.each_mut().map(BatchMemory::lend);
            manager.batch(batch).unwrap().step(&mut sets, None, Some(&token_ids)).unwrap();
            manager.batch(batch).unwrap().commit(None, None).unwrap();
            let epoch = manager.advance_epoch().unwrap();
            manager.retire(epoch).unwrap();
        }
        for id in 0..4 {
            manager.batch(batch).unwrap().remove(id).unwrap();
            manager.release_sequence(id).unwrap();
        }
    };
    for life in 0..50 {
        live(&mut manager, life);
    }
    let before = NUM_ALLOCATIONS.get();
    for life in 50..200 {
        live(&mut manager, life);
    }
    assert_eq!(NUM_ALLOCATIONS.get() - before, 0);
    assert!(manager.stats().num_evictions > 0 && manager.stats().num_hit_tokens > 0);
}

/// Prompts come, are committed, grow by a few tokens, are released; a pool too small for all of them evicts.
fn serve(manager: &mut BlockManager, prompts: &[Vec<TokenId>], slots: &mut Vec<Slot>) {
    for (id, token_ids) in prompts.iter().enumerate() {
        let (id, length) = (id as SequenceId, token_ids.len() as u64);
        let salt = ["a", "b"][id as usize % 2];
        let prompt = Prompt { salt: Some(salt), ..Prompt::new(token_ids) };
        slots.clear();
        manager.admit(id, &prompt, &AdmitOptions::default(), slots).unwrap();
        manager.commit(id, length, None).unwrap();
        for n in 1..=20 {
            manager.append_token(id, None).unwrap();
            manager.commit(id, length + n, Some(&[7])).unwrap();
        }
        if id >= 2 {
            manager.release_sequence(id - 2).unwrap();
        }
    }
    for id in prompts.len() - 2..prompts.len() {
        manager.release_sequence(id as SequenceId).unwrap();
    }
}

#[test]
fn a_warm_prefix_cache_allocates_nothing() {
    let prompt = |own: TokenId| (0..400).map(|at| if at < 200 { 1 } else { own + at }).collect();
    let prompts: Vec<Vec<TokenId>> = (0..8).map(|own| prompt(own * 1_000)).collect();
    let config = Config::new(160, 8).unwrap().with_prefix_caching(true);
    let mut manager = BlockManager::new(config).unwrap();
    let mut slots = Vec::new();
    for _ in 0..20 {
        serve(&mut manager, &prompts, &mut slots);
    }
    let before = NUM_ALLOCATIONS.get();
    for _ in 0..20 {
        serve(&mut manager, &prompts, &mut slots);
    }
    assert_eq!(NUM_ALLOCATIONS.get() - before, 0);
    let stats = manager.stats();
    assert!(stats.num_evictions > 0 && stats.num_hit_tokens > 0, "{stats:?}");
}
