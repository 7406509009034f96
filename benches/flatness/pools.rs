//! A pool of any size, and the operations whose price must not depend on it.

use std::hint::black_box;

use kvpager_core::{AdmitOptions, BlockManager, Config, Prompt, SequenceId};

pub(crate) const BLOCK_SIZE: u64 = 16;

/// Blocks of a sequence or a prompt: 8,192 tokens. (With short sequences in a large pool, what is slow to reach is the
/// sequence, not its blocks.)
const LENGTH: u64 = 512;
const LENGTH_TOKENS: u64 = LENGTH * BLOCK_SIZE;

/// Sequences that grow together.
const GROUP: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Append,
    Release,
    AppendRandom,
    ReleaseRandom,
    Evict,
}

impl Operation {
    pub(crate) const ALL: [Self; 5] =
        [Self::Append, Self::Release, Self::AppendRandom, Self::ReleaseRandom, Self::Evict];

    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Release => "release",
            Self::AppendRandom => "append_random",
            Self::ReleaseRandom => "release_random",
            Self::Evict => "evict",
        }
    }

    pub(crate) fn needs_index(self) -> bool {
        self == Self::Evict
    }

    /// Largest ratio of times; operations in random order are only reported.
    pub(crate) fn bar(self) -> Option<f64> {
        matches!(self, Self::Append | Self::Release).then_some(2.0)
    }
}

/// One manager, empty or full of sequences (or of cached prompts, with the index).
pub(crate) struct World {
    manager: BlockManager,
    /// Sequences of the whole pool, group after group.
    ids: Vec<SequenceId>,
    slots: Vec<i64>,
    is_full: bool,
    next_prompt: u64,
    tokens: Vec<u32>,
    draws: u64,
}

impl World {
    /// A pool that has been full once.
    pub(crate) fn new(num_blocks: u64, indexed: bool) -> Self {
        let config =
            Config::new(num_blocks, BLOCK_SIZE).expect("the shape is sound").with_prefix_caching(indexed);
        let mut world = Self {
            manager: BlockManager::new(config).expect("there is memory"),
            ids: if indexed { Vec::new() } else { (0..num_blocks / LENGTH / GROUP * GROUP).collect() },
            slots: Vec::with_capacity(LENGTH_TOKENS as usize),
            is_full: false,
            next_prompt: 0,
            tokens: vec![0; LENGTH_TOKENS as usize],
            draws: 0x9E37_79B9_7F4A_7C15,
        };
        if indexed {
            for _ in 0..=num_blocks / LENGTH {
                world.next_prompt();
            }
        } else {
            world.create();
            world.append(world.ids.len());
            world.release();
        }
        world
    }

    pub(crate) fn num_blocks(&self) -> u64 {
        u64::from(self.manager.config().num_blocks())
    }

    /// Brings the pool to where the operation starts.
    pub(crate) fn prepare(&mut self, operation: Operation) {
        match operation {
            Operation::Append | Operation::AppendRandom => {
                if self.is_full {
                    self.release();
                }
                self.order_blocks(operation == Operation::AppendRandom);
                self.create();
            }
            Operation::Release | Operation::ReleaseRandom => {
                if self.is_full {
                    self.release();
                }
                self.order_blocks(operation == Operation::ReleaseRandom);
                self.create();
                self.append(self.ids.len());
                if operation == Operation::ReleaseRandom {
                    let mut ids = std::mem::take(&mut self.ids);
                    self.shuffle(&mut ids);
                    self.ids = ids;
                }
            }
            Operation::Evict => {}
        }
    }

    /// The operation over the whole pool; answers how often.
    pub(crate) fn run(&mut self, operation: Operation) -> u64 {
        match operation {
            Operation::Append | Operation::AppendRandom => self.append(self.ids.len()),
            Operation::Release | Operation::ReleaseRandom => self.release(),
            Operation::Evict => self.evict(self.num_blocks() / LENGTH),
        }
    }

    /// The operation a fixed number of times, whatever the pool, for counting.
    pub(crate) fn run_some(&mut self, operation: Operation) -> u64 {
        match operation {
            Operation::Append | Operation::AppendRandom => self.append(GROUP as usize),
            Operation::Release | Operation::ReleaseRandom => {
                for at in 0..GROUP as usize {
                    self.manager.release_sequence(self.ids[at]).expect("it exists");
                }
                GROUP * LENGTH
            }
            Operation::Evict => self.evict(16),
        }
    }

    fn create(&mut self) {
        for &id in &self.ids {
            self.manager.create_sequence(id).expect("the id is new");
        }
    }

    /// The first `num_sequences` grow to their full length, group after group.
    fn append(&mut self, num_sequences: usize) -> u64 {
        for group in self.ids[..num_sequences].chunks_exact(GROUP as usize) {
            for _ in 0..LENGTH_TOKENS {
                self.slots.clear();
                self.manager.append_batch(group, None, None, &mut self.slots).expect("the pool holds them");
                black_box(&self.slots);
            }
        }
        self.is_full = true;
        num_sequences as u64 * LENGTH_TOKENS
    }

    fn release(&mut self) -> u64 {
        for &id in &self.ids {
            self.manager.release_sequence(id).expect("it exists");
        }
        self.is_full = false;
        self.ids.len() as u64 * LENGTH
    }

    fn evict(&mut self, num_prompts: u64) -> u64 {
        for _ in 0..num_prompts {
            self.next_prompt();
        }
        num_prompts * LENGTH
    }

    /// Admits, commits and releases a prompt that no other begins like.
    fn next_prompt(&mut self) {
        self.next_prompt += 1;
        self.tokens[0] = (self.next_prompt >> 20) as u32;
        self.tokens[1] = (self.next_prompt & 0xF_FFFF) as u32;
        self.slots.clear();
        let admitted =
            self.manager.admit(0, &Prompt::new(&self.tokens), &AdmitOptions::default(), &mut self.slots);
        let admitted = admitted.expect("the pool holds it");
        assert_eq!(admitted.num_computed_tokens, 0, "a new prompt finds nothing");
        self.manager.commit(0, LENGTH_TOKENS, None).expect("it was admitted");
        self.manager.release_sequence(0).expect("it exists");
    }

    /// Lays the free list out from block 0 up, or at random.
    fn order_blocks(&mut self, at_random: bool) {
        let mut blocks = Vec::new();
        while let Ok(block) = self.manager.allocate_block() {
            blocks.push(block);
        }
        if at_random {
            self.shuffle(&mut blocks);
        } else {
            blocks.sort_unstable_by_key(|&block| std::cmp::Reverse(block));
        }
        for block in blocks {
            self.manager.free_block(block).expect("it is held");
        }
        self.ids.sort_unstable();
    }

    /// Fisher and Yates.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            self.draws ^= self.draws << 13;
            self.draws ^= self.draws >> 7;
            self.draws ^= self.draws << 17;
            items.swap(last, (self.draws % (last as u64 + 1)) as usize);
        }
    }
}
