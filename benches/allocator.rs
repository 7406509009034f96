//! What the block manager costs, without Python, tensors or a device: `cargo bench allocator`.
//!
//! An engine calls the allocator between two forward passes, while the device waits. A decode step of a small model on
//! a fast GPU takes about a millisecond, so bookkeeping should stay near a microsecond for a whole batch; in engines
//! that do it in Python it takes 50 to 2,600 µs for 256 sequences.
//!
//! * `allocator/append/B`: one `append_batch` of one token to each of B sequences, lengths staggered over the block.
//!   The price of a decode step; per element: of one token.
//! * `allocator/append_nearly_empty/B`: the same with fewer free blocks than sequences. Adds the exact demand pass.
//! * `allocator/lifecycle/256x1024`: 256 sequences made, 1,024 steps, all released, pool kept. Per element: a token
//!   over a whole life.
//! * `allocator/fork_copy_on_write`: fork of 1,032 tokens, one append that copies the tail, pairs taken, child
//!   released. One branch of a beam or of n samples.
//! * `allocator/release/1024_tokens`: release of one sequence of 64 blocks. Per element: a block.
//! * `allocator/block_tables/BxM`: whole int32 tables of B sequences with M blocks each, into a caller's buffer. The
//!   floor is the memory bandwidth: 4·B·M bytes written.
//!
//! Block size 16. Setting up and cutting back is not timed except in `lifecycle`. Criterion prints [low estimate high];
//! on a busy machine read the low end. Runs for about a minute; `-- --quick` for a glance.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvpager_core::{BlockManager, Config, SequenceId};

const BLOCK_SIZE: u64 = 16;

fn manager(num_blocks: u64) -> BlockManager {
    let config = Config::new(num_blocks, BLOCK_SIZE).expect("the shape is sound");
    BlockManager::new(config).expect("there is memory")
}

/// Sequences 0..`batch`, the i-th with `num_tokens` + i mod S tokens: as in a running engine, a different sixteenth of
/// them opens a block at each step.
fn staggered(num_blocks: u64, batch: u64, num_tokens: u64) -> (BlockManager, Vec<SequenceId>) {
    let mut manager = manager(num_blocks);
    let mut slots = Vec::new();
    for id in 0..batch {
        manager.create_sequence(id).expect("the id is new");
        let length = num_tokens + id % BLOCK_SIZE;
        manager.append_tokens(id, length, None, &mut slots).expect("the pool is large enough");
        slots.clear();
    }
    (manager, (0..batch).collect())
}

/// Times `num_steps` decode steps, rounds of `steps_per_round`; between rounds the sequences are cut back, untimed.
fn time_steps(
    (manager, ids): &mut (BlockManager, Vec<SequenceId>),
    num_tokens: u64,
    steps_per_round: u64,
    num_steps: u64,
) -> Duration {
    let mut slots = Vec::with_capacity(ids.len());
    let mut elapsed = Duration::ZERO;
    let mut remaining = num_steps;
    while remaining > 0 {
        let steps = remaining.min(steps_per_round);
        let start = Instant::now();
        for _ in 0..steps {
            slots.clear();
            manager.append_batch(black_box(ids), None, None, &mut slots).expect("the pool is large enough");
            black_box(&slots);
        }
        elapsed += start.elapsed();
        remaining -= steps;
        for &id in &*ids {
            manager.truncate_sequence(id, num_tokens + id % BLOCK_SIZE).expect("it has grown");
        }
    }
    elapsed
}

fn append(criterion: &mut Criterion) {
    const STEPS_PER_ROUND: u64 = 1024;
    let mut group = criterion.benchmark_group("allocator/append");
    for batch in [1, 32, 256] {
        let num_blocks = batch * (STEPS_PER_ROUND / BLOCK_SIZE + 3);
        let mut state = staggered(num_blocks + batch, batch, BLOCK_SIZE);
        group.throughput(Throughput::Elements(batch));
        group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
            bencher.iter_custom(|num_steps| time_steps(&mut state, BLOCK_SIZE, STEPS_PER_ROUND, num_steps));
        });
    }
    group.finish();
}

fn append_nearly_empty(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocator/append_nearly_empty");
    for batch in [32, 256] {
        // Half a block's worth of steps takes half a block per sequence, and there is not one for each.
        let steps_per_round = BLOCK_SIZE / 2;
        let num_used = batch * (BLOCK_SIZE + 1) - batch.div_ceil(BLOCK_SIZE);
        let mut state = staggered(num_used + batch - 1, batch, BLOCK_SIZE * BLOCK_SIZE);
        assert!(u64::from(state.0.num_free_blocks()) < batch);
        group.throughput(Throughput::Elements(batch));
        group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
            bencher.iter_custom(|num_steps| {
                time_steps(&mut state, BLOCK_SIZE * BLOCK_SIZE, steps_per_round, num_steps)
            });
        });
    }
    group.finish();
}

fn lifecycle(criterion: &mut Criterion) {
    const BATCH: u64 = 256;
    const NUM_TOKENS: u64 = 1024;
    let mut group = criterion.benchmark_group("allocator/lifecycle");
    let mut manager = manager(BATCH * NUM_TOKENS / BLOCK_SIZE);
    let ids: Vec<SequenceId> = (0..BATCH).collect();
    let mut slots = Vec::with_capacity(ids.len());
    group.throughput(Throughput::Elements(BATCH * NUM_TOKENS));
    group.bench_function("256x1024", |bencher| {
        bencher.iter(|| {
            for &id in &ids {
                manager.create_sequence(id).expect("the id is new");
            }
            for _ in 0..NUM_TOKENS {
                slots.clear();
                manager.append_batch(&ids, None, None, &mut slots).expect("the pool holds them all");
                black_box(&slots);
            }
            for &id in &ids {
                manager.release_sequence(id).expect("it exists");
            }
        });
    });
    group.finish();
}

fn fork_copy_on_write(criterion: &mut Criterion) {
    let (parent, child) = (0, 1);
    let (mut manager, _) = staggered(128, 1, 1032);
    criterion.benchmark_group("allocator").bench_function("fork_copy_on_write", |bencher| {
        bencher.iter(|| {
            manager.fork_sequence(parent, child, None).expect("the id is new");
            let slot = manager.append_token(child, None).expect("there is a block for the copy");
            let pairs = manager.take_copies();
            manager.release_sequence(child).expect("it exists");
            (slot, pairs)
        });
    });
}

fn release(criterion: &mut Criterion) {
    const NUM_TOKENS: u64 = 1024;
    const BATCH: u64 = 64;
    let mut group = criterion.benchmark_group("allocator/release");
    let mut manager = manager(BATCH * NUM_TOKENS / BLOCK_SIZE);
    let mut slots = Vec::new();
    group.throughput(Throughput::Elements(NUM_TOKENS / BLOCK_SIZE));
    group.bench_function("1024_tokens", |bencher| {
        bencher.iter_custom(|num_releases| {
            let mut elapsed = Duration::ZERO;
            let mut remaining = num_releases;
            while remaining > 0 {
                let batch = remaining.min(BATCH);
                for id in 0..batch {
                    manager.create_sequence(id).expect("the id is new");
                    slots.clear();
                    manager.append_tokens(id, NUM_TOKENS, None, &mut slots).expect("the pool holds them all");
                }
                let start = Instant::now();
                for id in 0..batch {
                    manager.release_sequence(black_box(id)).expect("it exists");
                }
                elapsed += start.elapsed();
                remaining -= batch;
            }
            elapsed
        });
    });
    group.finish();
}

fn block_tables(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocator/block_tables");
    for (batch, max_blocks) in [(32, 64), (256, 64), (256, 512)] {
        let num_tokens = (max_blocks - 1) * BLOCK_SIZE;
        let (manager, ids) = staggered(batch * max_blocks, batch, num_tokens);
        let mut tables = vec![0; (batch * max_blocks) as usize];
        group.throughput(Throughput::Bytes(4 * batch * max_blocks));
        group.bench_function(format!("{batch}x{max_blocks}"), |bencher| {
            bencher.iter(|| {
                manager.write_block_tables(&ids, max_blocks as usize, &mut tables).expect("they fit");
                black_box(&tables);
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    targets = append, append_nearly_empty, lifecycle, fork_copy_on_write, release, block_tables
}
criterion_main!(benches);
