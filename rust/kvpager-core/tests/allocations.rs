//! A step allocates nothing on the heap: counted by an allocator that stands in for the system's.
//!
//! Alone in its file, for the allocator is that of the whole process; the count is of the thread that asks.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvpager_core::{BatchId, BatchMemory, BatchShape, BlockManager, Config, SequenceId, Slot};

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
        manager.append_tokens(id, 5, slots).unwrap();
        manager.fork_sequence(id, fork, None).unwrap();
    }
    let mut num_refused = 0;
    for _ in 0..20 {
        slots.clear();
        num_refused += usize::from(manager.append_batch(ids, None, slots).is_err());
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
        manager.add_to_batch(batch, id).unwrap();
        manager.fork_sequence(id, fork, None).unwrap();
        manager.add_to_batch(batch, fork).unwrap();
    }
    let mut step = |manager: &mut BlockManager, counts: Option<&[u64]>| {
        manager.step_batch(batch, &mut memory.each_mut().map(BatchMemory::lend), counts, None).is_err()
    };
    let num_refused = (0..20).filter(|_| step(manager, None)).count();
    assert!(num_refused > 0, "the exact demand was counted too");
    for &id in originals {
        manager.truncate_sequence(id, 2).unwrap();
    }
    assert!(!step(manager, Some(counts)));
    manager.commit_rows(batch, None, None).unwrap();
    manager.invalidate_batch(batch).unwrap();
    for &id in ids {
        manager.remove_from_batch(batch, id).unwrap();
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
