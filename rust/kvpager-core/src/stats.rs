//! The counters of a manager, as one value.

/// A snapshot of the counters. `live + cached + fenced + free == num_blocks`, always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Blocks in the pool.
    pub num_blocks: u64,
    /// Blocks with at least one holder.
    pub live: u64,
    /// Blocks without a holder whose content the prefix index can still find; they are handed out by eviction.
    pub cached: u64,
    /// Blocks without a holder that an untaken copy reads or, with fences, work in flight may still touch.
    pub fenced: u64,
    /// The rest: blocks that are handed out first.
    pub free: u64,
    /// Sequences that exist.
    pub num_sequences: u64,
    /// Copy-on-write pairs that came to be owed since the manager was made, whether taken or dropped since.
    pub num_copies: u64,
    /// The most blocks that were live at once.
    pub peak_live: u64,
    /// Blocks that the prefix index names, whatever their state.
    pub indexed: u64,
    /// Blocks that a pin holds, each once.
    pub pinned: u64,
    /// Tokens that admissions found computed, resumed ones aside.
    pub num_hit_tokens: u64,
    /// Tokens of the prompts of those admissions.
    pub num_queried_tokens: u64,
    /// Tokens that resumed admissions found computed.
    pub num_resumed_tokens: u64,
    /// Cached blocks that were handed out for other content.
    pub num_evictions: u64,
}

/// Tokens of admissions, since the manager was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hits {
    found: u64,
    queried: u64,
    resumed: u64,
}

impl Hits {
    /// An admission found `num_found` tokens of a prompt of `num_queried`. What came back counts by itself.
    pub(crate) fn count(&mut self, num_queried: u64, num_found: u64, is_resumed: bool) {
        if is_resumed {
            self.resumed += num_found;
        } else {
            self.queried += num_queried;
            self.found += num_found;
        }
    }

    /// Tokens found computed, resumed sequences aside.
    pub(crate) fn found(&self) -> u64 {
        self.found
    }

    /// Tokens of the prompts of these.
    pub(crate) fn queried(&self) -> u64 {
        self.queried
    }

    /// Tokens that resumed sequences found computed.
    pub(crate) fn resumed(&self) -> u64 {
        self.resumed
    }
}
