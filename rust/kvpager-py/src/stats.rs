//! The counters of a manager as a frozen Python object.

use kvpager_core::Stats;
use pyo3::prelude::*;

/// Counts at one moment; ``live + cached + fenced + free == num_blocks``.
///
/// Attributes:
///     num_blocks: blocks in the pool.
///     live: blocks with at least one holder.
///     cached: blocks without a holder that the prefix index can still find; none without an index.
///     fenced: blocks without a holder that an untaken copy still reads.
///     free: blocks that can be handed out now.
///     num_sequences: sequences that exist.
///     num_copies: copy-on-write pairs that came to be owed since creation.
///     peak_live: the most blocks that were live at once.
#[pyclass(frozen, eq, hash, get_all, module = "kvpager._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PoolStats {
    num_blocks: u64,
    live: u64,
    cached: u64,
    fenced: u64,
    free: u64,
    num_sequences: u64,
    num_copies: u64,
    peak_live: u64,
}

impl From<Stats> for PoolStats {
    fn from(stats: Stats) -> Self {
        let Stats { num_blocks, live, cached, fenced, free, num_sequences, num_copies, peak_live } = stats;
        Self { num_blocks, live, cached, fenced, free, num_sequences, num_copies, peak_live }
    }
}

#[pymethods]
impl PoolStats {
    fn __repr__(&self) -> String {
        let Self { num_blocks, live, cached, fenced, free, num_sequences, num_copies, peak_live } = self;
        format!(
            "PoolStats(num_blocks={num_blocks}, live={live}, cached={cached}, fenced={fenced}, free={free}, \
             num_sequences={num_sequences}, num_copies={num_copies}, peak_live={peak_live})"
        )
    }
}
