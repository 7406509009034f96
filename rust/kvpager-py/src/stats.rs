//! The counters of a manager as a frozen Python object.

use kvpager_core::Stats;
use pyo3::prelude::*;

/// Counts at one moment; `live + cached + fenced + free == num_blocks`.
#[pyclass(frozen, eq, hash, get_all, module = "kvpager._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PoolStats {
    /// Blocks in the pool.
    num_blocks: u64,
    /// Blocks with at least one holder.
    live: u64,
    /// Blocks without a holder that the prefix index can still find; none without an index.
    cached: u64,
    /// Blocks without a holder that an untaken copy still reads.
    fenced: u64,
    /// Blocks that can be handed out now.
    free: u64,
    /// Sequences that exist.
    num_sequences: u64,
    /// Copy-on-write pairs that came to be owed since creation.
    num_copies: u64,
    /// The most blocks that were live at once.
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
