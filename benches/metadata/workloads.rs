//! The workloads: what is done, how often, with which inputs. Both sides get the same ones, and every run the same.

/// Token positions in a block.
pub(crate) const BLOCK_SIZE: usize = 16;

/// Sequences of the appends, rows of the decode batch.
pub(crate) const BATCH: usize = 256;

/// One-token appends to each sequence.
pub(crate) const NUM_STEPS: usize = 1024;

/// Blocks of a sequence that is released: `NUM_STEPS` tokens and one more.
pub(crate) const RELEASED_BLOCKS: usize = NUM_STEPS / BLOCK_SIZE + 1;

/// Blocks in the pool of the appends.
pub(crate) const APPEND_POOL: usize = 20_000;

/// Prompts and their tokens; the first half of each is the same.
pub(crate) const NUM_PROMPTS: usize = 2_000;
pub(crate) const PROMPT_TOKENS: usize = 2_048;
pub(crate) const SHARED_TOKENS: usize = 1_024;

/// Pools of the prompts: one holds all of them at once, the other 256 of them and what it remembers of others.
pub(crate) const HOLDING_POOL: usize = 140_000;
pub(crate) const EVICTING_POOL: usize = 32_768;
pub(crate) const WINDOW: usize = 256;

/// Decode metadata: tables of `BATCH` rows × `MAX_BLOCKS` entries, lengths that end just below 8,192 tokens.
pub(crate) const MAX_BLOCKS: usize = 512;
/// More blocks than the batch ever holds at once: nearly empty pools have a bench of their own.
pub(crate) const DECODE_POOL: usize = BATCH * (MAX_BLOCKS + 1);
pub(crate) const DECODE_STEPS: usize = 176;

/// Length of row `row` before the first decode step: staggered, so that at each step 16 rows open a block.
pub(crate) fn decode_length(row: usize) -> usize {
    MAX_BLOCKS * BLOCK_SIZE - BLOCK_SIZE - DECODE_STEPS + row % BLOCK_SIZE
}

/// What is timed; each is one line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Append,
    AppendIndexed,
    /// The two above once more, with everything that a step hands to kernels.
    Step,
    StepIndexed,
    PromptsHeld,
    PromptsEvicting,
    DecodeDelta,
    DecodeRebuild,
    Release,
}

impl Row {
    pub(crate) const ALL: [Self; 9] = [
        Self::Append,
        Self::AppendIndexed,
        Self::Step,
        Self::StepIndexed,
        Self::PromptsHeld,
        Self::PromptsEvicting,
        Self::DecodeDelta,
        Self::DecodeRebuild,
        Self::Release,
    ];

    /// The row of the floor that it is compared with.
    pub(crate) fn floor(self) -> Self {
        match self {
            Self::Step => Self::Append,
            Self::StepIndexed => Self::AppendIndexed,
            other => other,
        }
    }

    /// As in JSON and on the command line.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::AppendIndexed => "append_indexed",
            Self::Step => "step",
            Self::StepIndexed => "step_indexed",
            Self::PromptsHeld => "prompts_held",
            Self::PromptsEvicting => "prompts_evicting",
            Self::DecodeDelta => "decode_delta",
            Self::DecodeRebuild => "decode_rebuild",
            Self::Release => "release",
        }
    }

    /// As in the table.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Append => "append to 256 sequences, no index",
            Self::AppendIndexed => "append + commit, 256, index on",
            Self::Step => "DecodeBatch step of 256, no index",
            Self::StepIndexed => "DecodeBatch step + commit, 256, index on",
            Self::PromptsHeld => "prompt of 2,048, 1,024 shared, all held",
            Self::PromptsEvicting => "the same, window 256, 32k blocks: evicts",
            Self::DecodeDelta => "decode metadata, 256 at 8k: what changed",
            Self::DecodeRebuild => "decode metadata, 256 at 8k: everything",
            Self::Release => "release of 65 blocks",
        }
    }
}

/// Prompts of `PROMPT_TOKENS` ids below 128,000; the first `SHARED_TOKENS` are the same in all.
pub(crate) fn prompts() -> Vec<Vec<u32>> {
    let mut draws = Draws::new(0x0123_4567_89AB_CDEF);
    let mut run = |num_tokens| -> Vec<u32> { (0..num_tokens).map(|_| draws.below(128_000)).collect() };
    let shared = run(SHARED_TOKENS);
    (0..NUM_PROMPTS).map(|_| [shared.clone(), run(PROMPT_TOKENS - SHARED_TOKENS)].concat()).collect()
}

/// The id of each sequence's token at each step, `[step][sequence]`. No two sequences agree in a block, so that with
/// the index on each holds its own.
pub(crate) fn generated() -> Vec<Vec<u32>> {
    let mut draws = Draws::new(0xFEDC_BA98_7654_3210);
    (0..NUM_STEPS).map(|_| (0..BATCH).map(|_| draws.below(128_000)).collect()).collect()
}

/// Repeatable pseudo-random numbers (xorshift64, Marsaglia 2003); the state must not be 0.
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(bound)) >> 32) as u32
    }
}
