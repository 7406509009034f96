//! The counters of a manager, as one value.

/// A snapshot of the counters. `live + cached + fenced + free == num_blocks`, always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Blocks in the pool.
    pub num_blocks: u64,
    /// Blocks with at least one holder.
    pub live: u64,
    /// Blocks without a holder whose content the prefix index can still find. Without an index there are none.
    pub cached: u64,
    /// Blocks without a holder that an untaken copy still reads.
    pub fenced: u64,
    /// Blocks that can be handed out now.
    pub free: u64,
    /// Sequences that exist.
    pub num_sequences: u64,
    /// Copy-on-write pairs that came to be owed since the manager was made, whether taken or dropped since.
    pub num_copies: u64,
    /// The most blocks that were live at once.
    pub peak_live: u64,
}
