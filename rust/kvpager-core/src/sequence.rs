//! The table of sequences: ids, lengths, block tables.
//!
//! A sequence lives in a *row* of a slab; the id is hashed once per call to find the row, and everything after that is
//! by row. What an append and the commit of a decode step need is half a cache line; the block table, and what the index
//! and token ids need else, a [`Chain`], stand beside it under the same row. Rows of released sequences are used again,
//! together with the memory of their tables and ids.
//!
//! Costs: create, look up and remove are O(1).

use std::ops::Deref;

use rustc_hash::FxHashMap;

use crate::chain::{Chain, SpareIds};
use crate::{BlockId, Error, Result, SequenceId, Slot};

/// A released row keeps the memory of its block table up to this many entries (16 KiB), so that a server that creates
/// and releases sequences does not go back to the allocator each time.
const KEPT_TABLE_ENTRIES: usize = 4096;

/// Entries that a new row's table has room for (128 bytes), so that it does not start with a chain of reallocations.
const FIRST_TABLE_ENTRIES: usize = 32;

/// The id in a vacant row: none that a sequence can have.
pub(crate) const VACANT: SequenceId = SequenceId::MAX;

/// What of a sequence changes with each token. Half a cache line and no more, so that the sequences of a batch and the
/// tokens they write fit the nearest cache together; the id and the table stand beside it.
#[derive(Clone, Debug)]
#[repr(align(32))]
pub(crate) struct Sequence {
    /// Tokens that own a slot.
    pub(crate) length: u64,
    /// Tokens whose keys and values are known to be written. Kept with the index only; without it, all are.
    pub(crate) computed: u64,
    /// While the tail has open positions: what must be added to one of its positions for the slot. So an append writes
    /// the length and nothing else of the sequence.
    pub(crate) slot_base: Slot,
    /// Every entry of the table below this column is what it was when the mark was last taken; [`UNCHANGED`] if all are.
    changed_from: u32,
    /// The low bits of the position up to which the tail block may be written without looking at the pool: see
    /// [`open`](Self::open).
    open_until: u16,
    /// Whether the ids of the computed tokens in the tail lie with the index: see `direct`. If not, all are in the chain.
    pub(crate) is_direct: bool,
}

/// The longest run that is counted at once: of a block with more positions, the rest is looked at again.
pub(crate) const LONGEST_RUN: u64 = u16::MAX as u64;

/// Logical block → physical block. It reads as a slice and changes only through the methods below, which keep the mark
/// that a batch goes by when it shows the table.
#[derive(Clone, Debug)]
pub(crate) struct BlockTable(Vec<BlockId>);

/// The mark of a table in which nothing changed.
pub(crate) const UNCHANGED: u32 = u32::MAX;

impl BlockTable {
    /// One block more at the end of the table of `sequence`.
    #[inline]
    pub(crate) fn push(&mut self, sequence: &mut Sequence, block: BlockId) {
        sequence.mark(self.0.len());
        self.0.push(block);
    }

    /// Further blocks at the end.
    pub(crate) fn extend_from_slice(&mut self, sequence: &mut Sequence, blocks: &[BlockId]) {
        sequence.mark(self.0.len());
        self.0.extend_from_slice(blocks);
    }

    /// Another block in the place of an entry.
    #[inline]
    pub(crate) fn replace(&mut self, sequence: &mut Sequence, column: usize, block: BlockId) {
        sequence.mark(column);
        self.0[column] = block;
    }

    /// Only the first `keep` entries stay.
    pub(crate) fn truncate(&mut self, sequence: &mut Sequence, keep: usize) {
        if keep < self.0.len() {
            sequence.mark(keep);
            self.0.truncate(keep);
        }
    }
}

impl Deref for BlockTable {
    type Target = [BlockId];

    #[inline]
    fn deref(&self) -> &[BlockId] {
        &self.0
    }
}

impl Sequence {
    /// Of a row without a sequence, or of an empty one.
    const EMPTY: Self = Self {
        length: 0,
        computed: 0,
        slot_base: 0,
        changed_from: UNCHANGED,
        open_until: 0,
        is_direct: false,
    };

    /// The first column of the table that may have changed since the mark was last taken.
    #[inline]
    pub(crate) fn changed_from(&self) -> u32 {
        self.changed_from
    }

    /// Says that the whole table, as it is, has been seen; returns the mark.
    #[inline]
    pub(crate) fn take_mark(&mut self) -> u32 {
        std::mem::replace(&mut self.changed_from, UNCHANGED)
    }

    /// Says that the table may have changed from a column on.
    #[inline]
    pub(crate) fn mark(&mut self, column: usize) {
        self.changed_from = self.changed_from.min(column as u32);
    }

    /// Positions at the end of the tail block that may be written without looking at the pool: the tail is ours alone.
    /// 0 says "look": the tail is full, or it may be shared.
    #[inline]
    pub(crate) fn open(&self) -> u64 {
        u64::from(self.open_until.wrapping_sub(self.length as u16))
    }

    /// Whether the next commit of one token writes its id with the index and no more: with no open position left, it may
    /// complete the block.
    #[inline]
    pub(crate) fn goes_on_direct(&self) -> bool {
        self.is_direct && self.open() > 0
    }

    /// Opens what follows the length in the tail block, where `slot` is that of the next position.
    #[inline]
    pub(crate) fn open_run(&mut self, num_positions: u64, slot: Slot) {
        let num_positions = num_positions.min(LONGEST_RUN);
        self.open_until = (self.length as u16).wrapping_add(num_positions as u16);
        self.slot_base = slot - self.length as Slot;
    }

    /// The next append looks at the pool. To be called after the length was changed in another way than by an append.
    pub(crate) fn close_run(&mut self) {
        self.open_until = self.length as u16;
    }

    /// `num_tokens` positions of the open run are taken; returns the slot of the first.
    #[inline]
    pub(crate) fn advance(&mut self, num_tokens: u64) -> Slot {
        debug_assert!(num_tokens <= self.open());
        let slot = self.slot_base + self.length as Slot;
        self.length += num_tokens;
        slot
    }
}

/// All of a sequence, to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) id: SequenceId,
    pub(crate) table: &'a [BlockId],
    sequence: &'a Sequence,
}

impl Deref for View<'_> {
    type Target = Sequence;

    #[inline]
    fn deref(&self) -> &Sequence {
        self.sequence
    }
}

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceTable {
    pub(crate) row_of: FxHashMap<SequenceId, u32>,
    pub(crate) rows: Vec<Sequence>,
    /// Of each row, as the next two: [`VACANT`], or the id of its sequence.
    pub(crate) ids: Vec<SequenceId>,
    pub(crate) tables: Vec<BlockTable>,
    pub(crate) chains: Vec<Chain>,
    pub(crate) spare: SpareIds,
    pub(crate) vacant: Vec<u32>,
    /// How often a sequence came or went: as long as it stays, every id keeps its row.
    pub(crate) num_changes: u64,
    /// How often tokens were appended other than by a batch's step of one token each: as long as it stays, a batch knows
    /// how much its rows grew.
    pub(crate) num_appends: u64,
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
        match self.ids.get(guess as usize) {
            Some(&id) if id == sequence_id && sequence_id != VACANT => Ok(guess),
            _ => self.find(sequence_id),
        }
    }

    pub(crate) fn get(&self, sequence_id: SequenceId) -> Result<View<'_>> {
        self.find(sequence_id).map(|row| self.view(row))
    }

    #[inline]
    pub(crate) fn view(&self, row: u32) -> View<'_> {
        let row = row as usize;
        View { id: self.ids[row], table: &self.tables[row], sequence: &self.rows[row] }
    }

    /// Makes an empty sequence under an id that the caller has found to be new.
    pub(crate) fn insert(&mut self, sequence_id: SequenceId) -> u32 {
        let row = self.vacant.pop().unwrap_or_else(|| {
            self.rows.push(Sequence::EMPTY);
            self.ids.push(VACANT);
            self.tables.push(BlockTable(Vec::with_capacity(FIRST_TABLE_ENTRIES)));
            self.chains.push(Chain::default());
            self.rows.len() as u32 - 1
        });
        self.num_changes += 1;
        self.ids[row as usize] = sequence_id;
        self.row_of.insert(sequence_id, row);
        row
    }

    /// Forgets the sequence in `row`, whose blocks and namespace the caller has given back.
    pub(crate) fn remove(&mut self, row: u32) {
        self.num_changes += 1;
        let at = row as usize;
        self.row_of.remove(&std::mem::replace(&mut self.ids[at], VACANT));
        self.rows[at] = Sequence::EMPTY;
        let BlockTable(entries) = &mut self.tables[at];
        entries.clear();
        entries.shrink_to(KEPT_TABLE_ENTRIES);
        self.chains[at].clear();
        self.vacant.push(row);
    }

    /// Every sequence, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = View<'_>> {
        self.row_of.values().map(|&row| self.view(row))
    }
}
