//! Batches against a naive rebuild: random operations, and after each step both sets, the list of changes and a device
//! table that is kept by it alone are compared with tables written from scratch.
//!
//! Worlds are small (a few blocks, rows and columns, too few of each), so that refusals are met all the time.
//! `KVPAGER_OPERATIONS` and `KVPAGER_SEED` as in the test `model`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use kvpager_core::{
    AdmitOptions, BatchId, BatchMemory, BatchShape, BatchStep, BlockId, BlockManager, Config, Error, Prompt,
    SequenceId, TokenId,
};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// Ids and positions are drawn as raw numbers and bent towards what exists when they are used.
#[derive(Clone, Debug)]
enum Operation {
    Create(usize),
    Admit(usize, Vec<TokenId>),
    Fork(usize, usize, usize),
    Release(usize),
    Truncate(usize, usize),
    Append(usize, u64),
    TakeCopies,
    Add(usize),
    Remove(usize),
    Step,
    /// Without ids, with the index too: they come with the next commit.
    StepWithoutIds,
    StepBy(Vec<u64>),
    /// With the ids of the new tokens, all equal, so that blocks come to have the same content.
    StepWithIds(TokenId),
    CommitAll,
    /// All rows, with one id for each: what follows a step without ids.
    CommitStep(TokenId),
    /// The first n tokens of each row, bent towards what it has, and what ids are told then.
    Commit(Vec<u64>, Vec<TokenId>),
    Invalidate,
    Renew,
}

#[derive(Clone, Copy, Debug)]
struct World {
    num_blocks: u64,
    block_size: u64,
    prefix_caching: bool,
    shape: BatchShape,
}

/// One manager, one batch, and what is known of them without it.
struct Subject {
    world: World,
    manager: BlockManager,
    batch: BatchId,
    memory: [BatchMemory; 2],
    /// Of each row.
    ids: Vec<SequenceId>,
    turn: usize,
    /// Rows that came or moved since the last step.
    new_rows: BTreeSet<usize>,
    is_invalid: bool,
    /// Tables `[B, M]` as the last step showed them, and as a device has them that only hears of changes.
    shown: Vec<i32>,
    device: Vec<i32>,
    tally: BTreeMap<&'static str, usize>,
}

type Lent<'a> = [kvpager_core::BatchBuffers<'a>; 2];

fn lend(memory: &mut [BatchMemory; 2]) -> Lent<'_> {
    memory.each_mut().map(BatchMemory::lend)
}

fn garbage(shape: BatchShape) -> BatchMemory {
    let mut memory = BatchMemory::new(shape);
    for buffer in
        [&mut memory.block_tables, &mut memory.seq_lens, &mut memory.query_start_loc, &mut memory.changed]
    {
        buffer.fill(77);
    }
    memory.slot_mapping.fill(77);
    memory
}

impl Subject {
    fn new(world: World) -> Self {
        let config = Config::new(world.num_blocks, world.block_size).unwrap();
        let config = config.with_prefix_caching(world.prefix_caching);
        let mut manager = BlockManager::new(config).unwrap();
        let mut memory = [garbage(world.shape), garbage(world.shape)];
        let batch = manager.create_batch(world.shape, &mut lend(&mut memory)).unwrap();
        let nothing = vec![-1; world.shape.max_rows * world.shape.max_blocks];
        for set in &memory {
            assert_eq!(set.block_tables, nothing);
            assert!(set.seq_lens.iter().chain(&set.query_start_loc).all(|&entry| entry == 0));
            assert!(set.slot_mapping.iter().all(|&slot| slot == -1));
        }
        Self {
            world,
            manager,
            batch,
            memory,
            ids: Vec::new(),
            turn: 0,
            new_rows: BTreeSet::new(),
            is_invalid: false,
            shown: nothing.clone(),
            device: nothing,
            tally: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// An existing sequence, or an id that does not exist.
    fn existing(&self, raw: usize) -> SequenceId {
        let ids = self.manager.sequence_ids();
        if raw >= 60 || ids.is_empty() { 100 } else { ids[raw % ids.len()] }
    }

    /// A row's sequence most of the time.
    fn member(&self, raw: usize) -> SequenceId {
        if raw >= 50 || self.ids.is_empty() { self.existing(raw) } else { self.ids[raw % self.ids.len()] }
    }

    fn position(&self, id: SequenceId, raw: usize) -> u64 {
        raw as u64 % (self.manager.sequence_length(id).unwrap_or(0) + 1)
    }

    fn tables(&self) -> Vec<i32> {
        let BatchShape { max_rows, max_blocks, .. } = self.world.shape;
        let mut tables = vec![-1; max_rows * max_blocks];
        for (row, &id) in self.ids.iter().enumerate() {
            for (column, &block) in self.manager.block_table(id).unwrap().iter().enumerate() {
                tables[row * max_blocks + column] = block as i32;
            }
        }
        tables
    }

    /// Entry by entry: what differs, and all of the rows that came or moved.
    fn changes(&self, tables: &[i32]) -> Vec<i32> {
        let max_blocks = self.world.shape.max_blocks;
        let mut changes = Vec::new();
        for (at, (&now, &before)) in tables.iter().zip(&self.shown).enumerate() {
            let (row, column) = (at / max_blocks, at % max_blocks);
            if now != before || (now != -1 && self.new_rows.contains(&row)) {
                changes.extend([row as i32, column as i32, now]);
            }
        }
        changes
    }

    /// What a step has to be refused with, its words aside.
    fn refusal(&self, counts: Option<&[u64]>, token_ids: Option<&[TokenId]>) -> Option<Error> {
        let BatchShape { max_blocks, max_tokens, .. } = self.world.shape;
        let ones = vec![1; self.ids.len()];
        let played = counts.unwrap_or(&ones);
        let num_tokens: u64 = played.iter().sum();
        if played.len() == self.ids.len()
            && num_tokens <= max_tokens as u64
            && token_ids.is_some_and(|token_ids| token_ids.len() as u64 != num_tokens)
        {
            return Some(Error::Argument {
                argument: "token_ids",
                wanted: String::new(),
                got: String::new(),
            });
        }
        if played.len() != self.ids.len() || num_tokens > max_tokens as u64 {
            return Some(Error::Argument { argument: "counts", wanted: String::new(), got: String::new() });
        }
        let too_long = self.ids.iter().zip(played).any(|(&id, count)| {
            let length = self.manager.sequence_length(id).unwrap() + count;
            length.div_ceil(self.world.block_size) > max_blocks as u64
        });
        if too_long {
            return Some(Error::SequenceTooLong { reason: String::new() });
        }
        let mut played = self.manager.clone();
        match token_ids {
            None => played.append_batch(&self.ids, counts, None, &mut Vec::new()),
            Some(token_ids) => played.append_batch(&self.ids, counts, Some(token_ids), &mut Vec::new()),
        }
        .map_err(without_words)
        .err()
    }

    fn step(&mut self, counts: Option<&[u64]>, token_ids: Option<&[TokenId]>) {
        let refusal = self.refusal(counts, token_ids);
        let lengths: Vec<u64> =
            self.ids.iter().map(|&id| self.manager.sequence_length(id).unwrap()).collect();
        let before = self.memory.clone();
        let num_copies = self.manager.stats().num_copies;
        let answer =
            self.manager.batch(self.batch).unwrap().step(&mut lend(&mut self.memory), counts, token_ids);
        let step = match (answer.map_err(without_words), refusal) {
            (Ok(step), None) => step,
            (Err(error), Some(refusal)) => {
                assert_eq!(error, refusal);
                assert_eq!(self.memory, before);
                let unchanged = self.ids.iter().map(|&id| self.manager.sequence_length(id).unwrap());
                assert!(unchanged.eq(lengths));
                self.count(match error {
                    Error::OutOfBlocks { .. } => "no block",
                    Error::SequenceTooLong { .. } => "too long",
                    Error::Argument { argument: "token_ids", .. } => "bad token ids",
                    _ => "bad counts",
                });
                return;
            }
            (answer, refusal) => panic!("{answer:?} where {refusal:?} was expected"),
        };
        assert_eq!(self.memory[1 - self.turn], before[1 - self.turn], "the exported step was touched");
        let set = self.memory[self.turn].clone();

        let mut slots = Vec::new();
        let mut starts = vec![0; self.world.shape.max_rows + 1];
        let mut seq_lens = vec![0; self.world.shape.max_rows];
        for (row, &id) in self.ids.iter().enumerate() {
            let length = self.manager.sequence_length(id).unwrap();
            assert_eq!(length, lengths[row] + counts.map_or(1, |counts| counts[row]));
            self.manager.slots(id, lengths[row], length, &mut slots).unwrap();
            seq_lens[row] = length as i32;
            starts[row + 1..].fill(slots.len() as i32);
        }
        let tables = self.tables();
        let changes = self.changes(&tables);
        let num_changes = changes.len() / 3;
        let expected = BatchStep {
            buffer_set: self.turn,
            num_rows: self.ids.len(),
            num_tokens: slots.len(),
            num_changes,
            upload_table: self.is_invalid || num_changes > self.world.shape.max_changes,
        };
        assert_eq!(step, expected);
        assert_eq!(set.block_tables, tables);
        assert_eq!(set.seq_lens, seq_lens);
        assert_eq!(set.query_start_loc, starts);
        slots.resize(self.world.shape.max_tokens, -1);
        assert_eq!(set.slot_mapping, slots);

        if step.upload_table {
            self.device.copy_from_slice(&set.block_tables);
            self.count("uploaded");
        } else {
            assert_eq!(set.changed[..num_changes * 3], changes);
            assert_eq!(set.changed[num_changes * 3..], before[self.turn].changed[num_changes * 3..]);
            for change in changes.chunks(3) {
                self.device[change[0] as usize * self.world.shape.max_blocks + change[1] as usize] =
                    change[2];
            }
            assert_eq!(self.device, tables);
            self.count("device kept by changes");
        }
        if changes.chunks(3).any(|change| change[2] == -1) {
            self.count("entries gone");
        }
        if self.manager.stats().num_copies > num_copies {
            self.count("copied in a step");
        }
        self.count("steps");
        if self.world.prefix_caching && counts.is_none() && token_ids.is_none() {
            self.count("steps of one token each, index on");
        }
        self.shown = tables;
        self.new_rows.clear();
        self.is_invalid = false;
        self.turn = 1 - self.turn;
    }

    fn add(&mut self, id: SequenceId) {
        let BatchShape { max_rows, max_blocks, .. } = self.world.shape;
        let answer = self.manager.batch(self.batch).unwrap().add(id);
        let expected = match self.manager.block_table(id) {
            Err(error) => Err(error),
            Ok(_) if self.ids.contains(&id) || self.ids.len() == max_rows => {
                Err(Error::State { reason: String::new() })
            }
            Ok(table) if table.len() > max_blocks => Err(Error::SequenceTooLong { reason: String::new() }),
            Ok(_) => Ok(self.ids.len()),
        };
        assert_eq!(answer.map_err(without_words), expected);
        if let Ok(row) = expected {
            self.ids.push(id);
            self.new_rows.insert(row);
            self.count("added");
        }
    }

    fn remove(&mut self, id: SequenceId) {
        let answer = self.manager.batch(self.batch).unwrap().remove(id).map_err(without_words);
        let Some(row) = self.ids.iter().position(|&member| member == id) else {
            assert!(matches!(answer, Err(Error::State { .. } | Error::UnknownSequence { .. })));
            return;
        };
        self.ids.swap_remove(row);
        self.new_rows.remove(&self.ids.len());
        let moved = self.ids.get(row).copied();
        assert_eq!(answer, Ok((row, moved)));
        if moved.is_some() {
            self.new_rows.insert(row);
            self.count("moved");
        }
    }

    /// As the same commit by id.
    fn commit(&mut self, ns: Option<&[u64]>, token_ids: Option<&[TokenId]>) {
        let lengths: Vec<u64> =
            self.ids.iter().map(|&id| self.manager.sequence_length(id).unwrap()).collect();
        let mut by_id = self.manager.clone();
        let expected = by_id.commit_batch(&self.ids, ns.unwrap_or(&lengths), token_ids);
        let tables = |manager: &BlockManager| -> Vec<Vec<BlockId>> {
            self.ids.iter().map(|&id| manager.block_table(id).unwrap().to_vec()).collect()
        };
        let before = tables(&self.manager);
        let answer = self.manager.batch(self.batch).unwrap().commit(ns, token_ids);
        assert_eq!(answer.map_err(without_words), expected.clone().map_err(without_words));
        assert_eq!(self.manager.stats(), by_id.stats());
        let after = tables(&self.manager);
        assert_eq!(after, tables(&by_id));
        if after != before {
            self.count("collapsed");
        }
        if expected.is_ok() && token_ids.is_some_and(|ids| !ids.is_empty() && ids.len() == self.ids.len()) {
            self.count("step committed with its ids");
        }
    }

    /// The batch is dropped and another takes its memory.
    fn renew(&mut self) {
        self.manager.drop_batch(self.batch).unwrap();
        let Self { manager, tally, world, .. } = std::mem::replace(self, Self::new(self.world));
        (self.manager, self.tally) = (manager, tally);
        self.batch = self.manager.create_batch(world.shape, &mut lend(&mut self.memory)).unwrap();
        self.count("renewed");
    }

    fn run(&mut self, operation: &Operation) {
        let before = self.memory.clone();
        match *operation {
            Operation::Step if self.world.prefix_caching => {
                return self.step(None, Some(&vec![0; self.ids.len()]));
            }
            Operation::Step | Operation::StepWithoutIds => return self.step(None, None),
            Operation::StepWithIds(token_id) => {
                let one_too_many = usize::from(token_id == 8);
                return self.step(None, Some(&vec![token_id / 6; self.ids.len() + one_too_many]));
            }
            Operation::StepBy(ref counts) => {
                let mut counts = counts.clone();
                if counts.len() > 1 {
                    counts.resize(self.ids.len(), 1); // rarely of another length
                }
                return self.step(Some(&counts), None);
            }
            Operation::Renew => return self.renew(),
            Operation::Create(raw) => _ = self.manager.create_sequence(raw as u64 % 6),
            Operation::Admit(raw, ref token_ids) => {
                let prompt = Prompt::new(token_ids);
                _ = self.manager.admit(raw as u64 % 6, &prompt, &AdmitOptions::default(), &mut Vec::new());
            }
            Operation::Fork(parent, child, n) => {
                let (parent, child) = (self.existing(parent), child as u64 % 6);
                let n = (n < 24).then(|| self.position(parent, n));
                if self.manager.fork_sequence(parent, child, n).is_ok() {
                    self.count("forked");
                }
            }
            Operation::Release(raw) => {
                let id = self.existing(raw);
                let answer = self.manager.release_sequence(id);
                if self.ids.contains(&id) {
                    assert!(matches!(answer, Err(Error::State { .. })), "{answer:?}");
                    self.count("kept from release");
                }
            }
            Operation::Truncate(raw, n) => {
                let id = self.member(raw);
                _ = self.manager.truncate_sequence(id, self.position(id, n));
            }
            Operation::Append(raw, n) => {
                let id = self.member(raw);
                _ = self.manager.append_tokens(id, n, None, &mut Vec::new());
            }
            Operation::TakeCopies => _ = self.manager.take_copies(),
            Operation::Add(raw) => self.add(self.existing(raw)),
            Operation::Remove(raw) => self.remove(self.member(raw)),
            Operation::CommitAll => self.commit(None, None),
            Operation::CommitStep(token_id) => self.commit(None, Some(&vec![token_id; self.ids.len()])),
            Operation::Commit(ref ns, ref token_ids) => {
                let bent = self.ids.iter().zip(ns).map(|(&id, &n)| {
                    let computed = self.manager.num_computed_tokens(id).unwrap();
                    computed + n % (self.manager.sequence_length(id).unwrap() - computed + 1)
                });
                let ns: Vec<u64> = bent.collect();
                let token_ids = (!token_ids.is_empty()).then_some(token_ids.as_slice());
                self.commit(Some(&ns), token_ids);
            }
            Operation::Invalidate => {
                self.manager.batch(self.batch).unwrap().invalidate().unwrap();
                let row = self.ids.len();
                self.new_rows.extend(0..row);
                self.is_invalid = true;
                // Somebody scribbles over everything.
                self.memory = [garbage(self.world.shape), garbage(self.world.shape)];
                self.device.fill(77);
                return;
            }
        }
        assert_eq!(self.memory, before, "only a step writes");
    }
}

/// The error without its words, which the other side does not know.
fn without_words(error: Error) -> Error {
    match error {
        Error::Argument { argument, .. } => {
            Error::Argument { argument, wanted: String::new(), got: String::new() }
        }
        Error::State { .. } => Error::State { reason: String::new() },
        Error::SequenceTooLong { .. } => Error::SequenceTooLong { reason: String::new() },
        other => other,
    }
}

fn operation() -> impl Strategy<Value = Operation> {
    let raw = || 0..64_usize;
    prop_oneof![
        4 => raw().prop_map(Operation::Create),
        4 => (raw(), prop::collection::vec((0..9 as TokenId).prop_map(|raw| raw / 8), 0..9))
            .prop_map(|(id, ids)| Operation::Admit(id, ids)),
        6 => (raw(), raw(), raw()).prop_map(|(parent, child, n)| Operation::Fork(parent, child, n)),
        5 => raw().prop_map(Operation::Release),
        6 => (raw(), raw()).prop_map(|(id, n)| Operation::Truncate(id, n)),
        2 => (raw(), 0..4_u64).prop_map(|(id, n)| Operation::Append(id, n)),
        2 => Just(Operation::TakeCopies),
        10 => raw().prop_map(Operation::Add),
        6 => raw().prop_map(Operation::Remove),
        15 => Just(Operation::Step),
        8 => Just(Operation::StepWithoutIds),
        10 => prop::collection::vec(0..4_u64, 0..5).prop_map(Operation::StepBy),
        9 => (0..9 as TokenId).prop_map(Operation::StepWithIds),
        8 => Just(Operation::CommitAll),
        8 => (0..2 as TokenId).prop_map(Operation::CommitStep),
        3 => (prop::collection::vec(0..64_u64, 0..5), prop::collection::vec(0..3 as TokenId, 0..2))
            .prop_map(|(ns, token_ids)| Operation::Commit(ns, token_ids)),
        1 => Just(Operation::Invalidate),
        1 => Just(Operation::Renew),
    ]
}

fn world() -> impl Strategy<Value = World> {
    let shape =
        (1..5_usize, 1..5_usize, 1..9_usize, 0..13_usize).prop_map(|(rows, blocks, tokens, changes)| {
            BatchShape { max_rows: rows, max_blocks: blocks, max_tokens: tokens, max_changes: changes }
        });
    (2..13_u64, 1..5_u64, any::<bool>(), shape).prop_map(|(num_blocks, block_size, prefix_caching, shape)| {
        World { num_blocks, block_size, prefix_caching, shape }
    })
}

/// At least this many operations in all, if the environment does not ask for another number.
const NUM_OPERATIONS: usize = 190_000;

/// A list has 100 operations on average; this many are sure to come together.
const SURE_PER_LIST: usize = 95;

/// Without a seed of its own: the same worlds on every machine. A failure is shrunk to a short list by proptest.
#[test]
fn both_sets_and_the_changes_agree_with_a_naive_rebuild() {
    let from_environment = |name: &str| std::env::var(name).ok().map(|number| number.parse::<u64>().unwrap());
    let num_operations =
        from_environment("KVPAGER_OPERATIONS").map_or(NUM_OPERATIONS, |number| number as usize);
    let seed = from_environment("KVPAGER_SEED").unwrap_or(0);
    eprintln!("{num_operations} operations, seed {seed}");
    let cases = num_operations.div_ceil(SURE_PER_LIST) as u32;
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut bytes = *b"kvpager: what the kernels see...";
    bytes[24..].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let tally = RefCell::new(BTreeMap::<&'static str, usize>::new());
    runner
        .run(&(world(), prop::collection::vec(operation(), 50..150)), |(world, operations)| {
            let mut subject = Subject::new(world);
            for operation in &operations {
                subject.count("operations");
                subject.run(operation);
                assert_eq!(subject.manager.check_invariants(), Vec::<String>::new(), "{operation:?}");
                assert!(
                    subject
                        .manager
                        .batch(subject.batch)
                        .unwrap()
                        .sequence_ids()
                        .unwrap()
                        .eq(subject.ids.iter().copied())
                );
            }
            for (what, count) in subject.tally {
                *tally.borrow_mut().entry(what).or_default() += count;
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let tally = tally.into_inner();
    eprintln!("{tally:?}");
    assert!(tally["operations"] >= num_operations, "{tally:?}");
    for corner in [
        "steps",
        "steps of one token each, index on",
        "step committed with its ids",
        "collapsed",
        "no block",
        "too long",
        "bad counts",
        "bad token ids",
        "uploaded",
        "device kept by changes",
        "entries gone",
        "copied in a step",
        "added",
        "moved",
        "forked",
        "kept from release",
        "renewed",
    ] {
        let count = tally.get(corner).copied().unwrap_or(0);
        assert!(count * 2_000 >= num_operations, "too few `{corner}`: {tally:?}");
    }
}
