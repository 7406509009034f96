//! The manager against a naive model: the same random operations on both, everything visible compared after each one,
//! and the whole state audited.
//!
//! Worlds are small (1 to 6 blocks, 2 to 6 sequences, three token ids): there the corners are met all the time, and
//! every allocation is refused sooner or later. `KVPAGER_OPERATIONS` sets how many operations are done at least,
//! `KVPAGER_SEED` which ones; both are printed, so that a failure can be repeated.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod operations;
mod oracle;

use std::cell::RefCell;
use std::collections::BTreeMap;

use kvpager_core::{BlockId, BlockManager, BlockState, Config, Error, EvictionPolicy};
use operations::{Answer, Operation, on_manager, on_model, operations};
use oracle::Model;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

// ---- comparison -----------------------------------------------------------------------------------------------------

fn assert_same(manager: &BlockManager, model: &Model, context: &str) {
    let stats = manager.stats();
    let have = [
        stats.live,
        stats.cached,
        stats.fenced,
        stats.free,
        stats.num_sequences,
        stats.num_copies,
        stats.peak_live,
        stats.indexed,
        stats.pinned,
        stats.num_hit_tokens,
        stats.num_queried_tokens,
        stats.num_resumed_tokens,
        stats.num_evictions,
    ];
    let want = [
        model.live(),
        model.cached().len() as u64,
        model.fenced.len() as u64,
        model.free.len() as u64,
        model.sequences.len() as u64,
        model.num_copies,
        model.peak_live,
        model.num_indexed() as u64,
        model.num_pinned() as u64,
        model.counted[0],
        model.counted[1],
        model.counted[2],
        model.num_evictions,
    ];
    assert_eq!(have, want, "counters, {context}");
    let order: Vec<BlockId> = model.free.iter().chain(&model.cached()).copied().collect();
    assert_eq!(manager.free_blocks(), order, "order of hand-out, {context}");
    assert_eq!(manager.clone().take_copies(), model.owed, "owed copies, {context}");

    let mut ids: Vec<_> = model.sequences.keys().copied().collect();
    ids.sort_unstable();
    assert_eq!(manager.sequence_ids(), ids, "{context}");
    for (&id, sequence) in &model.sequences {
        assert_eq!(manager.block_table(id).unwrap(), sequence.table, "table of {id}, {context}");
        assert_eq!(manager.sequence_length(id), Ok(sequence.length), "length of {id}, {context}");
        assert_eq!(manager.num_computed_tokens(id), Ok(model.computed(id)), "computed of {id}, {context}");
        let wasted = sequence.table.len() as u64 * model.size() - sequence.length;
        assert_eq!(manager.internal_fragmentation_tokens(Some(id)), Ok(wasted), "{context}");
    }
    let mut wasted = 0;
    for (block, state) in manager.block_states().into_iter().enumerate() {
        let block = block as BlockId;
        let info = manager.block_info(block).unwrap();
        assert_eq!(info.ref_count as usize, model.ref_count(block), "ref count of block {block}, {context}");
        assert_eq!(
            (info.state, info.num_filled),
            (state, model.num_filled(block)),
            "block {block}, {context}"
        );
        assert_eq!(info.is_indexed, model.is_indexed(block), "block {block}, {context}");
        let is_fenced = model.fenced.iter().any(|&(fenced, _)| fenced == block);
        assert_eq!(state == BlockState::Fenced, is_fenced, "block {block}, {context}");
        if state == BlockState::Live {
            wasted += model.size() - model.num_filled(block);
        }
    }
    assert_eq!(manager.internal_fragmentation_tokens(None), Ok(wasted), "{context}");
}

/// How often something happened, over all worlds.
type Tally = BTreeMap<&'static str, usize>;

/// What became of one operation, for the tally: a run that never meets a corner has not tested it.
fn kind(answer: &Result<Answer, Error>) -> &'static str {
    match answer {
        Ok(Answer::Pairs(pairs)) if pairs.len() > 1 => "several copies taken",
        Ok(Answer::Admitted(1.., slots)) if !slots.is_empty() => "admitted with a hit",
        Ok(_) => "done",
        Err(Error::Argument { .. }) => "bad argument",
        Err(Error::OutOfBlocks { row: Some(1..), .. }) => "no block for a later row",
        Err(Error::OutOfBlocks { watermark: 1.., .. }) => "no block above the watermark",
        Err(Error::OutOfBlocks { .. }) => "no block",
        Err(Error::SequenceTooLong { .. }) => "too long",
        Err(Error::UnknownSequence { .. }) => "unknown sequence",
        Err(Error::DuplicateSequence { .. }) => "duplicate sequence",
        Err(Error::State { .. }) => "not in this state",
        Err(Error::Slot { .. }) => "no such token",
        Err(Error::Config { .. }) => "bad pool",
    }
}

/// What changed between two states.
fn tally_changes(before: &Model, after: &Model, operation: &Operation, tally: &mut Tally) {
    let is_commit = matches!(operation, Operation::Commit(..) | Operation::CommitBatch(..));
    let tables = |model: &Model| {
        let mut tables: Vec<_> = model.sequences.iter().map(|(id, s)| (*id, s.table.clone())).collect();
        tables.sort_unstable();
        tables
    };
    for (corner, happened) in [
        ("copy owed", after.num_copies > before.num_copies),
        ("several blocks fenced", after.fenced.len() > 1),
        (
            "copies dropped",
            after.owed.len() < before.owed.len() && !matches!(operation, Operation::TakeCopies),
        ),
        ("evicted", after.num_evictions > before.num_evictions),
        ("duplicate collapsed", is_commit && tables(before) != tables(after)),
        ("node dropped for a write", {
            let appends = matches!(operation, Operation::Append(..) | Operation::AppendIds(..));
            appends
                && after.num_indexed() < before.num_indexed()
                && after.num_evictions == before.num_evictions
        }),
        ("pinned", after.num_pinned() > before.num_pinned()),
        ("the step of a batch committed", {
            let is_next =
                |&(id, n): &(_, u64)| before.computed(id) + 1 == n && before.sequences[&id].length == n;
            let has_all = |id| before.sequences.contains_key(id);
            matches!(operation, Operation::CommitBatch(rows, Some(ids))
                if after != before
                    && rows.len() == ids.len()
                    && rows.iter().all(|(id, _)| has_all(id))
                    && rows.iter().all(is_next))
        }),
    ] {
        *tally.entry(corner).or_default() += usize::from(happened);
    }
}

/// Drives both with the same operations.
fn drive(config: Config, num_sequences: u64, drawn: &[Operation], tally: &mut Tally) {
    let mut manager = BlockManager::new(config).unwrap();
    let mut model = Model::new(config);
    for (step, drawn) in drawn.iter().enumerate() {
        let operation = &model.resolve(drawn, num_sequences);
        let before = model.clone();
        let (have, want) = (on_manager(&mut manager, operation), on_model(&mut model, operation));
        let context = format!("step {step}: {operation:?}");
        assert_eq!(have, want, "{context}");
        *tally.entry("operations").or_default() += 1;
        *tally.entry(kind(&have)).or_default() += 1;
        tally_changes(&before, &model, operation, tally);
        if have.is_err() {
            assert_eq!(model, before, "the model itself must refuse without a change, {context}");
        }
        assert_same(&manager, &model, &context);
        assert_eq!(manager.check_invariants(), Vec::<String>::new(), "{context}");
    }
}

// ---- the runs -------------------------------------------------------------------------------------------------------

/// A pool with its rules: mostly with the index, sometimes with each of the others.
fn config() -> impl Strategy<Value = Config> {
    let num_blocks = prop::sample::select(vec![1_u64, 2, 3, 4, 5, 6, 6, 6, 6, 6]);
    let block_size = prop::sample::select(vec![1_u64, 2, 2, 3, 4]);
    let often = prop::bool::weighted(0.8);
    let policy = prop::sample::select(EvictionPolicy::ALL);
    let switches = (often, prop::bool::weighted(0.3), policy, prop::bool::weighted(0.2));
    let limits = (0..3_u64, 0..8_u64, prop::option::weighted(0.2, 1..20_u64));
    (num_blocks, block_size, switches, limits).prop_map(|(num_blocks, block_size, switches, limits)| {
        let (caching, fences, policy, equal_hashes) = switches;
        let config = Config::new(num_blocks, block_size).unwrap();
        let config = config.with_prefix_caching(caching).with_fences(fences).with_eviction_policy(policy);
        let config = config.with_constant_hash(equal_hashes).with_hash_seed(limits.1);
        let config = config.with_watermark_blocks(limits.0.saturating_sub(1).min(num_blocks)).unwrap();
        let config = config.with_max_pinned_blocks(limits.1.min(num_blocks)).unwrap();
        limits.2.map_or(config, |length| config.with_max_sequence_length(length).unwrap())
    })
}

/// A pool, ids in use, and a list of drawn operations for it.
fn world() -> impl Strategy<Value = (Config, u64, Vec<Operation>)> {
    (config(), prop::sample::select(vec![2_u64, 4, 5, 6, 6])).prop_flat_map(|(config, num_sequences)| {
        let operations = operations(u64::from(config.num_blocks()), config.block_size());
        (Just(config), Just(num_sequences), operations)
    })
}

/// At least this many operations in all, if the environment does not ask for another number.
const NUM_OPERATIONS: usize = 120_000;

/// A list has 125 operations on average; this many are sure to come together.
const SURE_PER_LIST: usize = 120;

/// Without a seed of its own: the same worlds on every machine. A failure is shrunk to a short list by proptest.
#[test]
fn random_operations_agree_with_the_model() {
    let from_environment = |name: &str| std::env::var(name).ok().map(|number| number.parse::<u64>().unwrap());
    let num_operations =
        from_environment("KVPAGER_OPERATIONS").map_or(NUM_OPERATIONS, |number| number as usize);
    let seed = from_environment("KVPAGER_SEED").unwrap_or(0);
    eprintln!("{num_operations} operations, seed {seed}");
    let cases = num_operations.div_ceil(SURE_PER_LIST) as u32;
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut bytes = *b"kvpager: who owns which block...";
    bytes[24..].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let tally = RefCell::new(Tally::new());
    runner
        .run(&world(), |(config, num_sequences, operations)| {
            drive(config, num_sequences, &operations, &mut tally.borrow_mut());
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let tally = tally.into_inner();
    eprintln!("{tally:?}");
    assert!(tally["operations"] >= num_operations, "{tally:?}");
    for corner in [
        "done",
        "admitted with a hit",
        "bad argument",
        "no block",
        "no block for a later row",
        "no block above the watermark",
        "too long",
        "unknown sequence",
        "duplicate sequence",
        "not in this state",
        "no such token",
        "copy owed",
        "several blocks fenced",
        "copies dropped",
        "evicted",
        "duplicate collapsed",
        "node dropped for a write",
        "pinned",
        "several copies taken",
        "the step of a batch committed",
    ] {
        let count = tally.get(corner).copied().unwrap_or(0);
        assert!(count * 10_000 >= num_operations, "too few `{corner}`: {tally:?}");
    }
}
