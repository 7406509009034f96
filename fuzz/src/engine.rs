//! A toy engine: what each sequence says, what lies in the cache, and what must agree.
//!
//! "Keys and values" of a token are one number, the digest of all that would change them in a model: the salt, the
//! adapter, every token up to it and the media at these positions.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use kvpager_core::{
    BlockId, BlockManager, BlockState, Config, EvictionPolicy, PinId, SequenceId, Slot, Stats,
};

use crate::bytes::Bytes;

pub(crate) type Item = (u64, u64, &'static str);

/// What a sequence says, whether the manager knows it or not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    pub(crate) salt: Option<&'static str>,
    pub(crate) adapter: Option<&'static str>,
    pub(crate) items: Vec<Item>,
    /// By position; longer than the sequence while a prompt is not all there.
    pub(crate) tokens: Vec<u32>,
    /// Whether the manager was told.
    pub(crate) is_told: Vec<bool>,
}

impl Text {
    /// The first `n` tokens, and nothing about later ones.
    pub(crate) fn cut(&self, n: u64) -> Self {
        let mut text = self.clone();
        text.tokens.truncate(n as usize);
        text.is_told.truncate(n as usize);
        text.items.retain(|item| item.0 < n);
        text.items.iter_mut().for_each(|item| item.1 = item.1.min(n));
        text
    }

    /// What is written for each position.
    fn digests(&self) -> Vec<u64> {
        let mut hasher = DefaultHasher::new();
        (self.salt, self.adapter).hash(&mut hasher);
        let digest = |(position, token): (usize, &u32)| {
            let position = position as u64;
            let media = self.items.iter().find(|item| (item.0..item.1).contains(&position));
            (token, media.map(|&(start, _, key)| (position - start, key))).hash(&mut hasher);
            hasher.clone().finish()
        };
        self.tokens.iter().enumerate().map(digest).collect()
    }
}

/// All that a caller can see.
#[derive(Debug, PartialEq)]
pub(crate) struct Visible {
    stats: Stats,
    free: Vec<BlockId>,
    states: Vec<BlockState>,
    owed: Vec<(BlockId, BlockId)>,
    sequences: Vec<(SequenceId, u64, u64, Vec<BlockId>)>,
}

pub(crate) struct Engine {
    pub(crate) manager: BlockManager,
    pub(crate) texts: BTreeMap<SequenceId, Text>,
    /// By slot; what was never written, or is on its way, is a number of its own.
    cache: Vec<u64>,
    next_garbage: u64,
    pub(crate) held: Vec<BlockId>,
    pub(crate) pins: Vec<PinId>,
}

impl Engine {
    pub(crate) fn new(bytes: &mut Bytes<'_>) -> Self {
        let num_blocks = 1 + bytes.below(6);
        let block_size = bytes.pick(&[1, 2, 4]);
        let mut config = Config::new(num_blocks, block_size)
            .expect("the shape is sound")
            .with_prefix_caching(bytes.below(4) > 0)
            .with_fences(bytes.coin())
            .with_constant_hash(bytes.below(4) == 0)
            .with_eviction_policy(bytes.pick(EvictionPolicy::ALL))
            .with_watermark_blocks(bytes.pick(&[0, 0, 1]))
            .expect("the pool has a block")
            .with_max_pinned_blocks(bytes.below(num_blocks + 1))
            .expect("the pool has as many");
        if bytes.below(8) == 0 {
            config = config.with_max_sequence_length(1 + bytes.below(16)).expect("it is above 0");
        }
        let manager = BlockManager::new(config).expect("there is memory");
        let cache = (0..num_blocks * block_size).map(|slot| !slot).collect();
        Self { manager, texts: BTreeMap::new(), cache, next_garbage: 0, held: Vec::new(), pins: Vec::new() }
    }

    /// One operation from the bytes, and everything that must hold after it.
    pub(crate) fn step(&mut self, bytes: &mut Bytes<'_>) {
        let before = self.visible();
        if self.operate(bytes).is_err() {
            assert_eq!(self.visible(), before, "a refused operation has changed something");
        }
        self.check();
    }

    /// Everything is given back.
    pub(crate) fn finish(&mut self) {
        for id in std::mem::take(&mut self.texts).into_keys() {
            self.manager.release_sequence(id).expect("it exists");
        }
        for block in std::mem::take(&mut self.held) {
            self.manager.free_block(block).expect("it is held");
        }
        for pin in std::mem::take(&mut self.pins) {
            self.manager.unpin(pin).expect("it is held");
        }
        self.manager.take_copies();
        let epoch = self.manager.advance_epoch().expect("few epochs wait");
        self.manager.retire(epoch).expect("it is closed");
        self.check();
        let stats = self.manager.stats();
        assert_eq!((stats.live, stats.fenced, stats.pinned), (0, 0, 0), "something leaked");
    }

    fn visible(&self) -> Visible {
        let manager = &self.manager;
        let sequence = |&id: &SequenceId| {
            let table = manager.block_table(id).expect("it exists").to_vec();
            let length = manager.sequence_length(id).expect("it exists");
            (id, length, manager.num_computed_tokens(id).expect("it exists"), table)
        };
        Visible {
            stats: manager.stats(),
            free: manager.free_blocks(),
            states: manager.block_states(),
            owed: manager.clone().take_copies(),
            sequences: self.texts.keys().map(sequence).collect(),
        }
    }

    fn check(&self) {
        assert_eq!(self.manager.check_invariants(), Vec::<String>::new());
        assert!(self.manager.sequence_ids().iter().eq(self.texts.keys()));
        for (block, state) in self.manager.block_states().into_iter().enumerate() {
            let info = self.manager.block_info(block as BlockId).expect("the pool has it");
            assert_eq!((info.state, info.ref_count > 0), (state, state == BlockState::Live));
        }
        // Until a copy is taken, what its destination will hold is read from its source.
        let owed: BTreeMap<BlockId, BlockId> = self
            .manager
            .clone()
            .take_copies()
            .into_iter()
            .map(|(source, destination)| (destination, source))
            .collect();
        let block_size = self.manager.config().block_size();
        for (&id, text) in &self.texts {
            let table = self.manager.block_table(id).expect("it exists");
            let computed = self.manager.num_computed_tokens(id).expect("it exists");
            for (position, digest) in (0..computed).zip(text.digests()) {
                let block = table[(position / block_size) as usize];
                let block = owed.get(&block).copied().unwrap_or(block);
                let slot = u64::from(block) * block_size + position % block_size;
                assert_eq!(
                    self.cache[slot as usize], digest,
                    "sequence {id} reads something else at position {position}, block {block}"
                );
            }
        }
    }

    // ---- what is written --------------------------------------------------------------------------------------------

    /// Runs the owed copies.
    pub(crate) fn copy(&mut self) {
        let block_size = self.manager.config().block_size() as usize;
        for (source, destination) in self.manager.take_copies() {
            let source = source as usize * block_size;
            self.cache.copy_within(source..source + block_size, destination as usize * block_size);
        }
    }

    /// Tokens from `start` on got these slots: without the index they count as written, so they are, at once. With it
    /// they are on their way: whatever is in their slots is nobody's.
    pub(crate) fn appended(&mut self, id: SequenceId, start: u64, slots: &[Slot]) {
        let digests = self.texts[&id].digests();
        for (position, &slot) in (start as usize..).zip(slots) {
            self.next_garbage += 1;
            let is_written = !self.manager.config().prefix_caching();
            self.cache[slot as usize] = if is_written { digests[position] } else { self.next_garbage };
        }
    }

    /// Before a commit says so: the positions `start..stop` are written.
    pub(crate) fn write(&mut self, id: SequenceId, start: u64, stop: u64) {
        let mut slots = Vec::new();
        self.manager.slots(id, start, stop, &mut slots).expect("they exist");
        for (digest, slot) in self.texts[&id].digests()[start as usize..].iter().zip(slots) {
            self.cache[slot as usize] = *digest;
        }
    }
}
