//! Bytes that the process holds, counted by its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pools::{BLOCK_SIZE, World};

static HELD: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a running sum of what is asked for and not given back.
pub(crate) struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract; counting touches no
// memory but the counter. (`realloc` comes to `alloc` and `dealloc` by the trait's own definition.)
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `memory` came from this allocator with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Bookkeeping a block of a pool with the index, after it has been full of cached prompts: all that the manager holds
/// but token ids. (Its one released sequence keeps memory for the next one: a few KiB in all.)
pub(crate) fn bytes_per_block(num_blocks: u64) -> f64 {
    let before = HELD.load(Ordering::Relaxed);
    let world = World::new(num_blocks, true);
    let held = HELD.load(Ordering::Relaxed) - before;
    let token_ids = num_blocks as usize * BLOCK_SIZE as usize * size_of::<u32>();
    std::hint::black_box(&world);
    (held - token_ids) as f64 / num_blocks as f64
}
