//! The contract, naively: written from its words, not from the crate. Maps, vectors and loops over everything; the
//! index is a map from whole prefixes (namespace, then tokens and items of every block) to blocks, so that it can't be
//! wrong about identity. It appends by trial on a copy of itself, so it has no arithmetic of demand.
//!
//! Here: its parts, the states of a block, appends, and how sequences fork, shrink and go. `prefixes` is what the index
//! brings: admissions, commits, pins.

mod prefixes;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvpager_core::{BlockId, Config, Error, EvictionPolicy, SequenceId, Slot, TokenId};

/// Salt and adapter.
pub(crate) type Namespace = (Option<&'static str>, Option<&'static str>);
/// Start, stop and key of a media item.
pub(crate) type Span = (u64, u64, &'static str);
/// Of one block: token ids, and its items relative to it.
type Content = (Vec<TokenId>, Vec<(i64, i64, &'static str)>);
/// All of a block and of what stands before it.
type Prefix = (Namespace, Vec<Content>);

/// A block id that no pool has: what a trial takes beyond the pool.
const BEYOND: BlockId = 1_000;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) namespace: Namespace,
    pub(crate) items: Vec<Span>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ModelSequence {
    pub(crate) length: u64,
    pub(crate) computed: u64,
    pub(crate) table: Vec<BlockId>,
    /// By position; kept past the length while a prompt is not all there.
    ids: Vec<Option<TokenId>>,
    namespace: Namespace,
    items: Vec<Span>,
    num_indexed: usize,
    /// Of the indexed blocks, as they were indexed: a fork or a cut may have clipped an item since.
    contents: Vec<Content>,
    is_stale: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    pub(crate) config: Config,
    pub(crate) sequences: HashMap<SequenceId, ModelSequence>,
    pub(crate) held: Vec<BlockId>,
    pub(crate) pins: BTreeMap<u64, Vec<BlockId>>,
    next_pin: u64,
    /// In the order of hand-out.
    pub(crate) free: Vec<BlockId>,
    index: HashMap<Prefix, BlockId>,
    /// Cached blocks, the next victim first: on probation (with LRU: all), then protected. With S3-FIFO these are its
    /// small and its main queue, `marked` what is or was in main, and `hits` and `ghost` its own.
    probation: Vec<BlockId>,
    protected: Vec<BlockId>,
    marked: BTreeSet<BlockId>,
    hits: BTreeMap<BlockId, u8>,
    ghost: BTreeMap<u64, u32>,
    /// Without holders but still touched: block and epoch, in the order in which they lost the last holder.
    pub(crate) fenced: Vec<(BlockId, u64)>,
    pub(crate) epoch: u64,
    num_retired: u64,
    /// (source, destination), oldest first.
    pub(crate) owed: Vec<(BlockId, BlockId)>,
    pub(crate) num_copies: u64,
    pub(crate) peak_live: u64,
    /// Hit, queried, resumed.
    pub(crate) counted: [u64; 3],
    pub(crate) num_evictions: u64,
}

impl Model {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            sequences: HashMap::new(),
            held: Vec::new(),
            pins: BTreeMap::new(),
            next_pin: 0,
            free: (0..config.num_blocks()).collect(),
            index: HashMap::new(),
            probation: Vec::new(),
            protected: Vec::new(),
            marked: BTreeSet::new(),
            hits: BTreeMap::new(),
            ghost: BTreeMap::new(),
            fenced: Vec::new(),
            epoch: 0,
            num_retired: 0,
            owed: Vec::new(),
            num_copies: 0,
            peak_live: 0,
            counted: [0; 3],
            num_evictions: 0,
        }
    }

    // ---- what there is ---------------------------------------------------------------------------------------------

    pub(crate) fn size(&self) -> u64 {
        self.config.block_size()
    }

    pub(crate) fn ref_count(&self, block: BlockId) -> usize {
        let entries = self.sequences.values().flat_map(|sequence| &sequence.table);
        let holds = self.held.iter().chain(self.pins.values().flatten());
        entries.chain(holds).filter(|&&entry| entry == block).count()
    }

    pub(crate) fn live(&self) -> u64 {
        let blocks = (0..self.config.num_blocks()).chain(BEYOND..2 * BEYOND);
        blocks.filter(|&block| self.ref_count(block) > 0).count() as u64
    }

    pub(crate) fn cached(&self) -> Vec<BlockId> {
        let mut protected = self.protected.clone();
        protected.sort_by_key(|block| self.hits.get(block).copied()); // a round for each hit
        self.probation.iter().chain(&protected).copied().collect()
    }

    pub(crate) fn is_indexed(&self, block: BlockId) -> bool {
        self.index.values().any(|&indexed| indexed == block)
    }

    pub(crate) fn num_indexed(&self) -> usize {
        self.index.len()
    }

    pub(crate) fn num_pinned(&self) -> usize {
        self.pins.values().flatten().collect::<BTreeSet<_>>().len()
    }

    fn parents(&self) -> BTreeSet<BlockId> {
        let longer = |(namespace, blocks): &Prefix| (*namespace, blocks[..blocks.len() - 1].to_vec());
        self.index.keys().filter_map(|prefix| self.index.get(&longer(prefix))).copied().collect()
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> Result<&ModelSequence, Error> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence { sequence_id: id })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut ModelSequence {
        self.sequences.get_mut(&id).expect("it exists")
    }

    pub(crate) fn computed(&self, id: SequenceId) -> u64 {
        let sequence = &self.sequences[&id];
        if self.config.prefix_caching() { sequence.computed } else { sequence.length }
    }

    /// Positions that hold a token, all if it is indexed.
    pub(crate) fn num_filled(&self, block: BlockId) -> u64 {
        if self.is_indexed(block) {
            return self.size();
        }
        let in_row = |sequence: &ModelSequence| {
            let logical = sequence.table.iter().position(|&entry| entry == block)? as u64;
            Some((sequence.length - logical * self.size()).min(self.size()))
        };
        self.sequences.values().filter_map(in_row).max().unwrap_or(0)
    }

    // ---- states ----------------------------------------------------------------------------------------------------

    /// The holders of `blocks` are gone, in this order. Whatever nobody holds is fenced, and leaves the fence as soon
    /// as nothing touches it, whoever lost its last holder first.
    pub(crate) fn settle(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.ref_count(block) == 0 {
                self.owed.retain(|&(_, destination)| destination != block);
                self.fenced.push((block, self.epoch));
            }
        }
        let stays = |model: &Self, &(block, epoch): &(BlockId, u64)| {
            let is_source = model.owed.iter().any(|&(source, _)| source == block);
            is_source || (model.config.fences() && epoch >= model.num_retired)
        };
        let (stay, leave): (Vec<_>, Vec<_>) = self.fenced.iter().partition(|&fenced| stays(self, fenced));
        self.fenced = stay;
        for (block, _) in leave {
            if self.is_indexed(block) { self.cache(block) } else { self.free.insert(0, block) }
        }
    }

    fn cache(&mut self, block: BlockId) {
        if !self.marked.contains(&block) {
            self.probation.push(block);
            return;
        }
        self.protected.push(block);
        let num_blocks = u64::from(self.config.num_blocks());
        let most = if self.is_s3fifo() { num_blocks * 9 / 10 } else { num_blocks * 2 / 3 };
        if self.protected.len() as u64 > most {
            let demoted = self.turn();
            self.marked.remove(&demoted);
            self.probation.push(demoted);
        }
    }

    pub(crate) fn is_s3fifo(&self) -> bool {
        self.config.eviction_policy() == EvictionPolicy::S3Fifo
    }

    /// The oldest protected block without a hit leaves; those before it go round with a hit fewer.
    fn turn(&mut self) -> BlockId {
        loop {
            let oldest = self.protected.remove(0);
            let Some(hits) = self.hits.get_mut(&oldest) else { return oldest };
            *hits -= 1;
            if *hits == 0 {
                self.hits.remove(&oldest);
            }
            self.protected.push(oldest);
        }
    }

    /// An admission has found the content of a block.
    pub(crate) fn hit(&mut self, block: BlockId) {
        if self.config.eviction_policy() != EvictionPolicy::Lru {
            self.marked.insert(block);
        }
        if self.is_s3fifo() {
            let hits = self.hits.entry(block).or_default();
            *hits = (*hits + 1).min(3);
        }
    }

    /// What the ghost knows tokens by, and where.
    fn fingerprint(&self, token_ids: &[TokenId]) -> (u64, u32) {
        let mut hash = 2_166_136_261_u64;
        for &id in token_ids {
            hash = (hash ^ u64::from(id)) * 16_777_619 % (1 << 32);
        }
        hash = (hash ^ (hash / 65_536)) * 2_246_822_507 % (1 << 32);
        hash ^= hash / 8_192;
        hash |= 1;
        (hash * u64::from(self.config.num_blocks()) / (1 << 32), hash as u32)
    }

    /// The content of a block was evicted.
    fn remember(&mut self, block: BlockId) {
        let prefix = self.index.iter().find(|&(_, &indexed)| indexed == block);
        let (_, contents) = prefix.expect("a victim is indexed").0;
        let (place, fingerprint) = self.fingerprint(&contents.last().expect("it has a block").0);
        self.ghost.insert(place, fingerprint);
    }

    /// A block gets its node, below a parent that has been hit or the root.
    pub(crate) fn recall(&mut self, block: BlockId, parent: Option<BlockId>, token_ids: &[TokenId]) {
        let (place, fingerprint) = self.fingerprint(token_ids);
        if self.is_s3fifo() && self.ghost.get(&place) == Some(&fingerprint) {
            self.ghost.remove(&place);
            if parent.is_none_or(|parent| self.hits.contains_key(&parent)) {
                self.hit(block);
            }
        }
    }

    fn forget(&mut self, block: BlockId) {
        self.index.retain(|_, indexed| *indexed != block);
        self.marked.remove(&block);
        self.hits.remove(&block);
    }

    /// A holder comes to an indexed block. To be called before it is entered where holders are counted.
    fn attach(&mut self, block: BlockId) {
        if self.ref_count(block) == 0 {
            self.peak_live = self.peak_live.max(self.live() + 1);
        }
        self.probation.retain(|&other| other != block);
        self.protected.retain(|&other| other != block);
        self.fenced.retain(|&(other, _)| other != block);
    }

    fn take_block(&mut self) -> BlockId {
        self.peak_live = self.peak_live.max(self.live() + 1);
        if self.free.first().is_some_and(|&block| block < BEYOND) {
            return self.free.remove(0);
        }
        let order = self.cached();
        let Some(&victim) = order.first() else { return self.free.remove(0) };
        assert!(!self.parents().contains(&victim), "a parent before its child");
        if self.probation.is_empty() {
            assert_eq!(self.turn(), victim);
        }
        self.probation.retain(|&block| block != victim);
        self.remember(victim);
        self.forget(victim);
        self.num_evictions += 1;
        victim
    }

    pub(crate) fn num_available(&self) -> u64 {
        (self.free.len() + self.cached().len()) as u64
    }

    fn out_of_blocks(&self, needed: u64, row: Option<usize>) -> Error {
        let (free, fenced) = (self.num_available(), self.fenced.len() as u64);
        let total = u64::from(self.config.num_blocks());
        Error::OutOfBlocks { needed, free, fenced, total, row, watermark: 0 }
    }

    // ---- appends ---------------------------------------------------------------------------------------------------

    /// One token. `parents` had children in the index when the call began.
    fn append_one(&mut self, id: SequenceId, parents: &BTreeSet<BlockId>, token_id: Option<TokenId>) -> Slot {
        let ModelSequence { length, table, .. } = self.sequences[&id].clone();
        let offset = length % self.size();
        match table.last() {
            Some(&tail) if offset > 0 => {
                if self.ref_count(tail) > 1 || parents.contains(&tail) {
                    let copy = self.take_block();
                    *self.sequence_mut(id).table.last_mut().expect("it has a tail") = copy;
                    self.owed.push((tail, copy));
                    self.num_copies += 1;
                    self.settle(&[tail]);
                } else {
                    self.forget(tail);
                }
            }
            _ => {
                let block = self.take_block();
                self.sequence_mut(id).table.push(block);
            }
        }
        let size = self.size();
        let sequence = self.sequence_mut(id);
        if let Some(token_id) = token_id {
            let num_ids = sequence.ids.len().max(length as usize + 1);
            sequence.ids.resize(num_ids, None);
            sequence.ids[length as usize] = Some(token_id);
        }
        sequence.length += 1;
        (u64::from(sequence.table[sequence.table.len() - 1]) * size + offset) as Slot
    }

    /// By trial: play the rows on a copy whose free list goes on past the pool, and see what it took.
    pub(crate) fn append(
        &mut self,
        rows: &[(SequenceId, u64)],
        token_ids: Option<&[TokenId]>,
        batched: bool,
    ) -> Result<Vec<Slot>, Error> {
        for &(id, _) in rows {
            self.sequence(id)?;
        }
        let mut lengths: HashMap<SequenceId, u64> = HashMap::new();
        let mut next_id = token_ids.unwrap_or_default().iter();
        let mut too_long = false;
        for &(id, count) in rows {
            let sequence = &self.sequences[&id];
            let length = lengths.entry(id).or_insert(sequence.length);
            for token_id in next_id.by_ref().take(count as usize) {
                let kept = sequence.ids.get(*length as usize).copied().flatten();
                if kept.is_some_and(|kept| kept != *token_id) {
                    return Err(bad_argument("token_ids"));
                }
                *length += 1;
            }
            if token_ids.is_none() {
                *length += count;
            }
            too_long |= count > 0 && *length > self.config.max_sequence_length();
        }
        if too_long {
            return Err(too_long_error());
        }

        let num_tokens: u64 = rows.iter().map(|&(_, count)| count).sum();
        let (mut trial, mut parents) = (self.clone(), self.parents());
        parents.retain(|&block| self.ref_count(block) > 0); // the others may be evicted and come back as new blocks
        trial.free.extend(BEYOND..=BEYOND + num_tokens as BlockId);
        let (at_hand, available) = (trial.num_available(), self.num_available());
        let (mut lacking, mut slots) = (None, Vec::new());
        let mut next_id = token_ids.unwrap_or_default().iter();
        for (row, &(id, count)) in rows.iter().enumerate() {
            for _ in 0..count {
                slots.push(trial.append_one(id, &parents, next_id.next().copied()));
            }
            if at_hand - trial.num_available() > available {
                lacking = lacking.or(Some(row));
            }
        }
        if lacking.is_some() {
            let needed = at_hand - trial.num_available();
            return Err(self.out_of_blocks(needed, lacking.filter(|_| batched)));
        }
        trial.free.retain(|&block| block < BEYOND);
        *self = trial;
        Ok(slots)
    }

    // ---- sequences -------------------------------------------------------------------------------------------------

    pub(crate) fn cut(&mut self, id: SequenceId, n: u64) {
        let keep = n.div_ceil(self.size()) as usize;
        let size = self.size();
        let sequence = self.sequence_mut(id);
        sequence.length = n;
        sequence.computed = sequence.computed.min(n);
        sequence.ids.truncate(n as usize);
        sequence.num_indexed = sequence.num_indexed.min((n / size) as usize);
        sequence.contents.truncate(sequence.num_indexed);
        sequence.is_stale &= n > 0;
        cut_items(&mut sequence.items, n);
        let mut surplus = sequence.table.split_off(keep);
        surplus.reverse();
        self.settle(&surplus);
    }

    pub(crate) fn fork(
        &mut self,
        parent: SequenceId,
        child: SequenceId,
        n: Option<u64>,
    ) -> Result<(), Error> {
        let source = self.sequence(parent)?.clone();
        if self.sequences.contains_key(&child) {
            return Err(Error::DuplicateSequence { sequence_id: child });
        }
        let n = n.unwrap_or(source.length);
        if n > source.length {
            return Err(bad_argument("num_tokens"));
        }
        let table = source.table[..n.div_ceil(self.size()) as usize].to_vec();
        let waits = |block: &BlockId| self.owed.iter().any(|(_, destination)| destination == block);
        let is_written = source.length.min(table.len() as u64 * self.size()) <= self.computed(parent);
        if table.iter().any(waits) || !is_written {
            return Err(Error::State { reason: String::new() });
        }
        let mut fork =
            ModelSequence { length: n, computed: n, table, is_stale: source.is_stale && n > 0, ..source };
        fork.ids.truncate(n as usize);
        fork.num_indexed = fork.num_indexed.min((n / self.size()) as usize);
        fork.contents.truncate(fork.num_indexed);
        cut_items(&mut fork.items, n);
        self.sequences.insert(child, fork);
        Ok(())
    }

    pub(crate) fn take_copies(&mut self) -> Vec<(BlockId, BlockId)> {
        let pairs = std::mem::take(&mut self.owed);
        for (block, epoch) in &mut self.fenced {
            if pairs.iter().any(|(source, _)| source == block) {
                *epoch = self.epoch;
            }
        }
        self.settle(&[]);
        pairs
    }

    pub(crate) fn allocate(&mut self) -> Result<BlockId, Error> {
        if self.num_available() == 0 {
            return Err(self.out_of_blocks(1, None));
        }
        let block = self.take_block();
        self.held.push(block);
        Ok(block)
    }

    pub(crate) fn free(&mut self, block: BlockId) -> Result<(), Error> {
        if block >= self.config.num_blocks() {
            return Err(bad_argument("block_id"));
        }
        let at = self.held.iter().position(|&held| held == block);
        self.held.remove(at.ok_or(Error::State { reason: String::new() })?);
        self.settle(&[block]);
        Ok(())
    }

    pub(crate) fn slots(&self, id: SequenceId, start: u64, stop: u64) -> Result<Vec<Slot>, Error> {
        let sequence = self.sequence(id)?;
        if start > stop || stop > sequence.length {
            return Err(Error::Slot { reason: String::new() });
        }
        let slot = |position: u64| {
            let block = sequence.table[(position / self.size()) as usize];
            (u64::from(block) * self.size() + position % self.size()) as Slot
        };
        Ok((start..stop).map(slot).collect())
    }
}

fn cut_items(items: &mut Vec<Span>, n: u64) {
    items.retain(|item| item.0 < n);
    for item in items {
        item.1 = item.1.min(n);
    }
}

pub(crate) fn bad_argument(argument: &'static str) -> Error {
    Error::Argument { argument, wanted: String::new(), got: String::new() }
}

pub(crate) fn too_long_error() -> Error {
    Error::SequenceTooLong { reason: String::new() }
}
