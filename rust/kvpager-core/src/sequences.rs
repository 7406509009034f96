//! The table of sequences: ids, lengths, block tables, and what each knows of its tokens.
//!
//! A sequence has a [`Place`] in a slab; the id is hashed once per call to find it, and everything after that goes by
//! place. What an append needs is half a cache line, [`SequenceCounters`]; the block table and the [`Chain`] stand
//! beside it under the same place. Places of released sequences are used again, together with the memory of their
//! tables.
//!
//! Invariants: every entry of a table below the mark of its counters is what a batch last showed; so a table changes
//! only through the methods here, which keep the mark.
//!
//! Costs: create, look up and remove are O(1).
//!
//! Longer than 400 lines, because every method that changes a table stands here: it has to keep the mark.

use std::ops::Deref;

use rustc_hash::FxHashMap;

use crate::chain::{Chain, SpareIds};
use crate::error::{Error, Result};
use crate::ids::{BlockId, SequenceId, Slot, TokenId};
use crate::pool::Recount;
use crate::prompt::Prompt;

/// A vacant place keeps the memory of its block table up to this many entries (16 KiB), so that a server that creates
/// and releases sequences does not go back to the allocator each time.
const KEPT_TABLE_ENTRIES: usize = 4096;

/// Entries that a new table has room for (128 bytes), so that it does not start with a chain of reallocations.
const FIRST_TABLE_ENTRIES: usize = 32;

/// The id at a vacant place: none that a sequence can have.
const VACANT: SequenceId = SequenceId::MAX;

/// The mark of a table in which nothing changed.
pub(crate) const UNCHANGED: u32 = u32::MAX;

/// The longest run that is counted at once: of a block with more positions, the rest is looked at again.
const LONGEST_RUN: u64 = u16::MAX as u64;

/// Where a sequence lives in the table of sequences, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u32);

impl Place {
    /// No place: a guess that is always wrong.
    pub(crate) const NOWHERE: Self = Self(u32::MAX);

    /// For arrays with an entry for each place.
    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What of a sequence changes with each token. Half a cache line and no more, so that the sequences of a batch and the
/// tokens they write fit the nearest cache together.
#[derive(Clone, Debug)]
#[repr(align(32))]
pub(crate) struct SequenceCounters {
    /// Tokens that own a slot.
    length: u64,
    /// Tokens whose keys and values are known to be written. Kept with the index only; without it, all are.
    computed: u64,
    /// While the tail has open positions: what must be added to one of its positions for the slot. So an append writes
    /// the length and nothing else of the sequence.
    slot_base: Slot,
    /// Every entry of the table below this column is what it was when the mark was last taken; [`UNCHANGED`] if all
    /// are.
    changed_from: u32,
    /// The low bits of the position up to which the tail block may be written without looking at the pool: see
    /// [`open`](Self::open).
    open_until: u16,
}

impl SequenceCounters {
    const EMPTY: Self = Self { length: 0, computed: 0, slot_base: 0, changed_from: UNCHANGED, open_until: 0 };

    #[inline]
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Computed tokens as they are kept: with the index only.
    #[inline]
    pub(crate) fn computed(&self) -> u64 {
        self.computed
    }

    /// `n` tokens are computed; returns how many were before.
    #[inline]
    pub(crate) fn compute(&mut self, n: u64) -> u64 {
        std::mem::replace(&mut self.computed, n)
    }

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

    /// Opens what follows the length in the tail block, where `slot` is that of the next position.
    #[inline]
    pub(crate) fn open_run(&mut self, num_positions: u64, slot: Slot) {
        let num_positions = num_positions.min(LONGEST_RUN);
        self.open_until = (self.length as u16).wrapping_add(num_positions as u16);
        self.slot_base = slot - self.length as Slot;
    }

    /// The next append looks at the pool.
    pub(crate) fn close_run(&mut self) {
        self.open_until = self.length as u16;
    }

    /// `num_tokens` positions of the open run are taken; returns the slot of the first.
    #[inline]
    pub(crate) fn advance(&mut self, num_tokens: u64) -> Slot {
        debug_assert!(num_tokens <= self.open());
        let slot = self.next_slot();
        self.length += num_tokens;
        slot
    }

    /// Of an open run: the slot of the next token.
    #[inline]
    pub(crate) fn next_slot(&self) -> Slot {
        self.slot_base + self.length as Slot
    }

    /// Whether an open run of this many positions may be all that is left of a block, `unwritten` positions.
    pub(crate) fn may_be_open(open: u64, unwritten: u64, block_size: u64) -> bool {
        open == unwritten || (open < unwritten && block_size > LONGEST_RUN)
    }

    /// Another length than an append would give; what is computed is within it.
    fn reset(&mut self, length: u64, computed: u64) {
        (self.length, self.computed) = (length, computed);
        self.close_run(); // the tail may be shared
    }
}

/// All of a sequence, to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) id: SequenceId,
    pub(crate) table: &'a [BlockId],
    pub(crate) chain: &'a Chain,
    counters: &'a SequenceCounters,
}

impl Deref for View<'_> {
    type Target = SequenceCounters;

    #[inline]
    fn deref(&self) -> &SequenceCounters {
        self.counters
    }
}

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceTable {
    place_of: FxHashMap<SequenceId, Place>,
    counters: Vec<SequenceCounters>,
    /// By place, as the next two: [`VACANT`], or the id of its sequence.
    ids: Vec<SequenceId>,
    tables: Vec<Vec<BlockId>>,
    chains: Vec<Chain>,
    spare: SpareIds,
    vacant: Vec<Place>,
    num_changes: u64,
}

impl SequenceTable {
    pub(crate) fn len(&self) -> usize {
        self.place_of.len()
    }

    /// Places in use or vacant: arrays by place need as many entries.
    pub(crate) fn num_places(&self) -> usize {
        self.counters.len()
    }

    /// How often a sequence came or went: as long as it stays, every id keeps its place.
    #[inline]
    pub(crate) fn num_changes(&self) -> u64 {
        self.num_changes
    }

    pub(crate) fn contains(&self, sequence_id: SequenceId) -> bool {
        self.place_of.contains_key(&sequence_id)
    }

    /// The place of a sequence.
    #[inline]
    pub(crate) fn find(&self, sequence_id: SequenceId) -> Result<Place> {
        match self.place_of.get(&sequence_id) {
            Some(&place) => Ok(place),
            None => Err(Error::UnknownSequence { sequence_id }),
        }
    }

    /// The place of a sequence, with a guess where it may be: a batch mostly names the same sequences in the same order
    /// as the one before it, and then nothing is hashed. Any guess is safe.
    #[inline]
    pub(crate) fn find_near(&self, sequence_id: SequenceId, guess: Place) -> Result<Place> {
        match self.ids.get(guess.index()) {
            Some(&id) if id == sequence_id && sequence_id != VACANT => Ok(guess),
            _ => self.find(sequence_id),
        }
    }

    pub(crate) fn get(&self, sequence_id: SequenceId) -> Result<View<'_>> {
        self.find(sequence_id).map(|place| self.view(place))
    }

    #[inline]
    pub(crate) fn view(&self, place: Place) -> View<'_> {
        let at = place.index();
        View {
            id: self.ids[at],
            table: &self.tables[at],
            chain: &self.chains[at],
            counters: &self.counters[at],
        }
    }

    /// The sequence at a place, if one is there.
    pub(crate) fn get_at(&self, place: Place) -> Option<View<'_>> {
        self.ids.get(place.index()).filter(|&&id| id != VACANT).map(|_| self.view(place))
    }

    /// Every sequence, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = View<'_>> {
        self.place_of.values().map(|&place| self.view(place))
    }

    // ---- by place --------------------------------------------------------------------------------------------------

    #[inline]
    pub(crate) fn id(&self, place: Place) -> SequenceId {
        self.ids[place.index()]
    }

    #[inline]
    pub(crate) fn counters(&self, place: Place) -> &SequenceCounters {
        &self.counters[place.index()]
    }

    #[inline]
    pub(crate) fn counters_mut(&mut self, place: Place) -> &mut SequenceCounters {
        &mut self.counters[place.index()]
    }

    #[inline]
    pub(crate) fn table(&self, place: Place) -> &[BlockId] {
        &self.tables[place.index()]
    }

    #[inline]
    pub(crate) fn chain(&self, place: Place) -> &Chain {
        &self.chains[place.index()]
    }

    #[inline]
    pub(crate) fn chain_mut(&mut self, place: Place) -> &mut Chain {
        &mut self.chains[place.index()]
    }

    /// One block more at the end of the table.
    #[inline]
    pub(crate) fn push_block(&mut self, place: Place, block: BlockId) {
        let table = &mut self.tables[place.index()];
        self.counters[place.index()].mark(table.len());
        table.push(block);
    }

    /// Another block in the place of an entry of the table.
    #[inline]
    pub(crate) fn replace_block(&mut self, place: Place, column: usize, block: BlockId) {
        self.counters[place.index()].mark(column);
        self.tables[place.index()][column] = block;
    }

    /// The ids of tokens that are about to be appended.
    #[inline]
    pub(crate) fn append_ids(&mut self, place: Place, token_ids: &[TokenId]) {
        if !token_ids.is_empty() {
            self.chains[place.index()].append(self.counters[place.index()].length, token_ids);
        }
    }

    /// Drops the ids of blocks that entered the index, where that is cheap.
    #[inline]
    pub(crate) fn drop_indexed_ids(&mut self, place: Place, block_size: u64) {
        self.chains[place.index()].drop_indexed(block_size, &mut self.spare);
    }

    // ---- coming and going ------------------------------------------------------------------------------------------

    /// Makes an empty sequence under an id that the caller has found to be new.
    pub(crate) fn insert(&mut self, sequence_id: SequenceId) -> Place {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.counters.push(SequenceCounters::EMPTY);
            self.ids.push(VACANT);
            self.tables.push(Vec::with_capacity(FIRST_TABLE_ENTRIES));
            self.chains.push(Chain::default());
            Place(self.counters.len() as u32 - 1)
        });
        self.num_changes += 1;
        self.ids[place.index()] = sequence_id;
        self.place_of.insert(sequence_id, place);
        place
    }

    /// Begins an empty sequence with a prompt whose first blocks are in the index: `found`.
    pub(crate) fn start(
        &mut self,
        place: Place,
        prompt: &Prompt<'_>,
        found: &[BlockId],
        block_size: u64,
        namespace: u32,
    ) {
        let at = place.index();
        let tokens = (prompt.token_ids, found.len());
        self.chains[at].start(tokens, (prompt.items, block_size), namespace, &mut self.spare);
        self.extend_table(place, found);
        let num_found = found.len() as u64 * block_size;
        self.counters[at].reset(num_found, num_found);
    }

    /// Begins the empty sequence `child` with the first `num_tokens` tokens of `parent`, which lie in its first
    /// `num_shared` blocks. `cut` gives the ids that the index has of a block.
    pub(crate) fn fork<'a>(
        &mut self,
        (parent, child): (Place, Place),
        num_tokens: u64,
        num_shared: usize,
        block_size: u64,
        cut: impl FnOnce(BlockId) -> &'a [TokenId],
    ) {
        self.counters[parent.index()].close_run(); // its tail may be shared from now on
        let [source, table] = pair(&mut self.tables, parent, child);
        table.extend_from_slice(&source[..num_shared]);
        let counters = &mut self.counters[child.index()];
        counters.mark(0);
        counters.reset(num_tokens, num_tokens);
        let [source, chain] = pair(&mut self.chains, parent, child);
        chain.fork_from(source, num_tokens, block_size, || cut(self.tables[child.index()][num_shared - 1]));
    }

    /// Keeps the first `n` tokens, whose blocks are all that is left of the table. `cut` as in [`fork`](Self::fork).
    pub(crate) fn truncate<'a>(
        &mut self,
        place: Place,
        n: u64,
        block_size: u64,
        cut: impl FnOnce(BlockId) -> &'a [TokenId],
    ) {
        let at = place.index();
        let computed = self.counters[at].computed.min(n);
        self.counters[at].reset(n, computed);
        let table = &self.tables[at];
        self.chains[at].truncate(n, block_size, || cut(table[table.len() - 1]));
    }

    /// Only the first `keep` entries of the table stay.
    pub(crate) fn truncate_table(&mut self, place: Place, keep: usize) {
        let table = &mut self.tables[place.index()];
        if keep < table.len() {
            self.counters[place.index()].mark(keep);
            table.truncate(keep);
        }
    }

    /// Further blocks at the end of the table.
    fn extend_table(&mut self, place: Place, blocks: &[BlockId]) {
        let table = &mut self.tables[place.index()];
        self.counters[place.index()].mark(table.len());
        table.extend_from_slice(blocks);
    }

    /// Forgets the sequence, whose blocks and namespace the caller has given back.
    pub(crate) fn remove(&mut self, place: Place) {
        self.num_changes += 1;
        let at = place.index();
        self.place_of.remove(&std::mem::replace(&mut self.ids[at], VACANT));
        self.counters[at] = SequenceCounters::EMPTY;
        self.tables[at].clear();
        self.tables[at].shrink_to(KEPT_TABLE_ENTRIES);
        self.chains[at].clear();
        self.vacant.push(place);
    }

    /// The index forgot everything.
    pub(crate) fn forget_index(&mut self) {
        for (counters, chain) in self.counters.iter().zip(&mut self.chains) {
            chain.forget_index(counters.length > 0);
        }
    }

    /// Notes in `recount` who holds which block, and adds a line for each id, place or entry that is wrong.
    pub(crate) fn audit(&self, recount: &mut Recount, faults: &mut Vec<String>) {
        if self.place_of.len() + self.vacant.len() != self.num_places() {
            faults.push(format!(
                "sequence table: {} places, but {} used and {} vacant",
                self.num_places(),
                self.place_of.len(),
                self.vacant.len()
            ));
        }
        for &place in self.vacant.iter().filter(|&&place| self.get_at(place).is_some()) {
            faults.push(format!("sequence table: place {} is listed as vacant, but is not", place.0));
        }
        for (&id, &place) in &self.place_of {
            let Some(sequence) = self.get_at(place).filter(|sequence| sequence.id == id) else {
                faults.push(format!("sequence {id}: its place {} is not its own", place.0));
                continue;
            };
            for (logical, &block) in sequence.table.iter().enumerate() {
                if !recount.hold(block) {
                    faults.push(format!(
                        "sequence {id}: entry {logical} names block {block}, never handed out"
                    ));
                }
            }
        }
    }
}

/// Two different places at once.
fn pair<T>(by_place: &mut [T], first: Place, second: Place) -> [&mut T; 2] {
    by_place.get_disjoint_mut([first.index(), second.index()]).expect("two different places of the table")
}

/// What [`SequenceTable::plant`] breaks.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum PlantedFault {
    Length(u64),
    Computed(u64),
    Id(SequenceId),
    Vacant,
    NumIndexed(usize),
}

#[cfg(test)]
impl SequenceTable {
    /// Breaks something of the sequence at the first place, for the tests of the audit.
    pub(crate) fn plant(&mut self, fault: PlantedFault) {
        match fault {
            PlantedFault::Length(length) => self.counters[0].length = length,
            PlantedFault::Computed(computed) => self.counters[0].computed = computed,
            PlantedFault::Id(id) => self.ids[0] = id,
            PlantedFault::Vacant => self.vacant.push(Place(0)),
            PlantedFault::NumIndexed(num_indexed) => self.chains[0].plant_num_indexed(num_indexed),
        }
    }
}
