//! The table of sequences: ids, lengths, block tables.
//!
//! A sequence lives in a *row* of a slab; the id is hashed once per call to find the row, and everything after that is
//! by row. Rows of released sequences are used again, together with the memory of their block tables.
//!
//! Costs: create, look up and remove are O(1).

use rustc_hash::FxHashMap;

use crate::{BlockId, Error, Result, SequenceId, Slot};

/// A released row keeps the memory of its block table up to this many entries (16 KiB), so that a server that creates
/// and releases sequences does not go back to the allocator each time.
const KEPT_TABLE_ENTRIES: usize = 4096;

/// The id in a vacant row: none that a sequence can have.
pub(crate) const VACANT: SequenceId = SequenceId::MAX;

/// One sequence. One cache line, so that an append touches nothing else while its run is open.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Tokens that own a slot.
    pub(crate) length: u64,
    /// Positions at the end of the tail block that may be written without looking at the pool: the tail is ours alone.
    /// 0 says "look": the tail is full, or it may be shared.
    pub(crate) open: u64,
    /// While `open` > 0: the slot of position `length`.
    pub(crate) next_slot: Slot,
    pub(crate) table: Vec<BlockId>,
}

impl Sequence {
    /// A row without a sequence; `table` is empty memory to be used again.
    fn vacant(table: Vec<BlockId>) -> Self {
        Self { id: VACANT, length: 0, open: 0, next_slot: 0, table }
    }

    /// `num_tokens` positions of the open run are taken; returns the slot of the first.
    #[inline]
    pub(crate) fn advance(&mut self, num_tokens: u64) -> Slot {
        debug_assert!(num_tokens <= self.open);
        let slot = self.next_slot;
        self.open -= num_tokens;
        self.length += num_tokens;
        self.next_slot += num_tokens as Slot;
        slot
    }
}

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceTable {
    pub(crate) row_of: FxHashMap<SequenceId, u32>,
    pub(crate) rows: Vec<Sequence>,
    pub(crate) vacant: Vec<u32>,
}

impl SequenceTable {
    pub(crate) fn len(&self) -> usize {
        self.row_of.len()
    }

    pub(crate) fn contains(&self, sequence_id: SequenceId) -> bool {
        self.row_of.contains_key(&sequence_id)
    }

    /// The row of a sequence.
    #[inline]
    pub(crate) fn find(&self, sequence_id: SequenceId) -> Result<u32> {
        match self.row_of.get(&sequence_id) {
            Some(&row) => Ok(row),
            None => Err(Error::UnknownSequence { sequence_id }),
        }
    }

    /// The row of a sequence, with a guess where it may be: a batch mostly names the same sequences in the same order
    /// as the one before it, and then nothing is hashed. Any number is a safe guess.
    #[inline]
    pub(crate) fn find_near(&self, sequence_id: SequenceId, guess: u32) -> Result<u32> {
        match self.rows.get(guess as usize) {
            Some(sequence) if sequence.id == sequence_id && sequence_id != VACANT => Ok(guess),
            _ => self.find(sequence_id),
        }
    }

    pub(crate) fn get(&self, sequence_id: SequenceId) -> Result<&Sequence> {
        self.find(sequence_id).map(|row| &self.rows[row as usize])
    }

    /// Makes an empty sequence under an id that the caller has found to be new.
    pub(crate) fn insert(&mut self, sequence_id: SequenceId) -> u32 {
        let row = self.vacant.pop().unwrap_or_else(|| {
            self.rows.push(Sequence::vacant(Vec::new()));
            self.rows.len() as u32 - 1
        });
        self.rows[row as usize].id = sequence_id;
        self.row_of.insert(sequence_id, row);
        row
    }

    /// Forgets the sequence in `row`, whose blocks the caller has given back.
    pub(crate) fn remove(&mut self, row: u32) {
        let sequence = &mut self.rows[row as usize];
        self.row_of.remove(&sequence.id);
        let mut table = std::mem::take(&mut sequence.table);
        table.clear();
        table.shrink_to(KEPT_TABLE_ENTRIES);
        *sequence = Sequence::vacant(table);
        self.vacant.push(row);
    }

    /// Every sequence, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.row_of.values().map(|&row| &self.rows[row as usize])
    }
}
