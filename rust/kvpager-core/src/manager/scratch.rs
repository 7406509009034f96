//! Memory of the calls, kept so that a step allocates nothing.

use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::ids::{BlockId, SequenceId};
use crate::index::Hash;
use crate::sequences::{Place, SequenceTable};

/// Memory of the batched calls. Between calls `planned` is all zero and `leaving` is empty.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Of each mention in the batch: the place of its sequence. Kept as guesses for the next batch.
    pub(super) places: Vec<Place>,
    /// Cache key for `places`: the ids they were found for. Valid while `found_at` is the table's `num_changes`.
    ids: Vec<SequenceId>,
    found_at: Option<u64>,
    /// By place: tokens that earlier mentions of the batch append (or commit to).
    pub(super) planned: Vec<u64>,
    /// Of a shared tail: holders that have left it for a copy earlier in the batch.
    pub(super) leaving: FxHashMap<BlockId, u32>,
}

impl Scratch {
    /// Finds the sequences of a batch and leaves their places in `places`.
    #[inline]
    pub(super) fn find(&mut self, sequences: &SequenceTable, ids: &[SequenceId]) -> Result<()> {
        // Mostly a batch names what the one before it named, and nothing came or went.
        if self.found_at == Some(sequences.num_changes()) && self.ids == ids {
            return Ok(());
        }
        self.found_at = None;
        self.places.resize(ids.len(), Place::NOWHERE);
        for (place, &sequence_id) in self.places.iter_mut().zip(ids) {
            *place = sequences.find_near(sequence_id, *place)?;
        }
        self.ids.clear();
        self.ids.extend_from_slice(ids);
        self.found_at = Some(sequences.num_changes());
        Ok(())
    }

    /// Forgets what a batch planned.
    #[inline]
    pub(super) fn forget_plans(&mut self) {
        for place in &self.places {
            self.planned[place.index()] = 0;
        }
    }
}

/// Memory of the calls that look content up.
#[derive(Clone, Debug, Default)]
pub(super) struct Matching {
    /// The blocks found for a prompt, logical block 0 first.
    pub(super) blocks: Vec<BlockId>,
    /// Hashes of blocks that are about to be looked up.
    pub(super) ahead: Vec<Hash>,
}
