//! The clock of the benches, and the region that a counting tool watches.

use std::hint::black_box;

/// callgrind's `--toggle-collect` names this function: one symbol whatever the closure, never inlined, never left by a
/// jump.
#[inline(never)]
pub(crate) fn counted_region(work: &mut dyn FnMut()) {
    work();
    black_box(());
}

/// CPU time of this thread in nanoseconds: what other jobs of the machine do in between does not count.
pub(crate) fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call, which writes one timespec to it and keeps no pointer.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "the system has a clock of the thread's CPU time");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
