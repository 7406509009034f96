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
    /// Blocks without a holder that the prefix index can still find; handed out by eviction.
    cached: u64,
    /// Blocks without a holder that an untaken copy or work in flight may still touch.
    fenced: u64,
    /// The rest: handed out first.
    free: u64,
    /// Sequences that exist.
    num_sequences: u64,
    /// Copy-on-write pairs that came to be owed since creation.
    num_copies: u64,
    /// The most blocks that were live at once.
    peak_live: u64,
    /// Blocks that the prefix index names, whatever their state.
    indexed: u64,
    /// Blocks that a pin holds, each once.
    pinned: u64,
    /// Tokens that admissions found computed, resumed ones aside.
    num_hit_tokens: u64,
    /// Tokens of the prompts of those admissions.
    num_queried_tokens: u64,
    /// Tokens that resumed admissions found computed.
    num_resumed_tokens: u64,
    /// Cached blocks that were handed out for other content.
    num_evictions: u64,
}

impl From<Stats> for PoolStats {
    fn from(stats: Stats) -> Self {
        Self {
            num_blocks: stats.num_blocks,
            live: stats.live,
            cached: stats.cached,
            fenced: stats.fenced,
            free: stats.free,
            num_sequences: stats.num_sequences,
            num_copies: stats.num_copies,
            peak_live: stats.peak_live,
            indexed: stats.indexed,
            pinned: stats.pinned,
            num_hit_tokens: stats.num_hit_tokens,
            num_queried_tokens: stats.num_queried_tokens,
            num_resumed_tokens: stats.num_resumed_tokens,
            num_evictions: stats.num_evictions,
        }
    }
}

#[pymethods]
impl PoolStats {
    fn __repr__(&self) -> String {
        let Self { num_blocks, live, cached, fenced, free, num_sequences, num_copies, peak_live, .. } = self;
        let Self { indexed, pinned, num_hit_tokens, num_queried_tokens, .. } = self;
        let Self { num_resumed_tokens, num_evictions, .. } = self;
        format!(
            "PoolStats(num_blocks={num_blocks}, live={live}, cached={cached}, fenced={fenced}, free={free}, \
             num_sequences={num_sequences}, num_copies={num_copies}, peak_live={peak_live}, indexed={indexed}, \
             pinned={pinned}, num_hit_tokens={num_hit_tokens}, num_queried_tokens={num_queried_tokens}, \
             num_resumed_tokens={num_resumed_tokens}, num_evictions={num_evictions})"
        )
    }
}
