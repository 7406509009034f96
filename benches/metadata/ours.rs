//! The same workloads on `kvpager-core`, through its public calls alone.

use std::collections::VecDeque;
use std::hint::black_box;

use kvpager_core::{
    AdmitOptions, BatchId, BatchMemory, BatchShape, BlockManager, Config, Prompt, SequenceId,
};

use super::meter::Meter;
use super::workloads::{
    APPEND_POOL, BATCH, BLOCK_SIZE, DECODE_POOL, DECODE_STEPS, EVICTING_POOL, HOLDING_POOL, MAX_BLOCKS,
    NUM_PROMPTS, NUM_STEPS, PROMPT_TOKENS, Row, WINDOW, decode_length,
};

fn manager(num_blocks: usize, indexed: bool) -> BlockManager {
    let config = Config::new(num_blocks as u64, BLOCK_SIZE as u64).expect("the shape is sound");
    BlockManager::new(config.with_prefix_caching(indexed)).expect("there is memory")
}

/// One `append_batch` a step; with `indexed` it is followed by one `commit_batch` of all rows, which brings the ids.
/// Then all sequences, 65 blocks each, are released.
pub(crate) fn lifecycle(indexed: bool, generated: &[Vec<u32>], meter: &mut Meter) {
    let mut manager = manager(APPEND_POOL, indexed);
    let ids: Vec<SequenceId> = (0..BATCH as u64).collect();
    let mut slots = Vec::with_capacity(BATCH);
    for &id in &ids {
        manager.create_sequence(id).expect("the id is new");
    }
    let mut lengths = vec![0; BATCH];
    let mut step = |tokens: &[u32]| {
        slots.clear();
        manager.append_batch(&ids, None, None, &mut slots).expect("the pool is large enough");
        black_box(&slots);
        if indexed {
            let length = lengths[0] + 1;
            lengths.fill(length);
            manager.commit_batch(&ids, &lengths, Some(tokens)).expect("they were appended");
        }
    };
    let row = if indexed { Row::AppendIndexed } else { Row::Append };
    meter.region(row, NUM_STEPS, || generated.iter().for_each(|tokens| step(tokens)));
    step(&generated[0]); // opens the 65th block
    if indexed {
        return;
    }
    meter.region(Row::Release, BATCH, || {
        for &id in &ids {
            manager.release_sequence(id).expect("it exists");
        }
    });
}

/// The same with a batch's `step`, which writes tables, lengths, starts and slots, and lists the new table entries;
/// with `indexed` it is followed by `commit`, which brings the ids.
pub(crate) fn steps(indexed: bool, generated: &[Vec<u32>], meter: &mut Meter) {
    let mut manager = manager(APPEND_POOL, indexed);
    for id in 0..BATCH as u64 {
        manager.create_sequence(id).expect("the id is new");
    }
    let (mut memory, batch) = batch_of_all(&mut manager);
    let row = if indexed { Row::StepIndexed } else { Row::Step };
    meter.region(row, NUM_STEPS, || {
        for tokens in generated {
            let mut sets = memory.each_mut().map(BatchMemory::lend);
            manager
                .batch(batch)
                .expect("it exists")
                .step(&mut sets, None, None)
                .expect("the pool is large enough");
            black_box(&memory);
            if indexed {
                manager
                    .batch(batch)
                    .expect("it exists")
                    .commit(None, Some(tokens))
                    .expect("they were appended");
            }
        }
    });
}

/// A batch of all sequences, in the order of their ids.
fn batch_of_all(manager: &mut BlockManager) -> ([BatchMemory; 2], BatchId) {
    let shape = BatchShape {
        max_rows: BATCH,
        max_blocks: MAX_BLOCKS,
        max_tokens: BATCH,
        max_changes: BATCH + MAX_BLOCKS,
    };
    let mut memory = [BatchMemory::new(shape), BatchMemory::new(shape)];
    let batch = manager.create_batch(shape, &mut memory.each_mut().map(BatchMemory::lend)).expect("they fit");
    for id in manager.sequence_ids() {
        manager.batch(batch).expect("it exists").add(id).expect("there is a row for each");
    }
    (memory, batch)
}

/// Each prompt is admitted and committed; all are held to the end, or the oldest of more than `WINDOW` is released.
pub(crate) fn prompts(evicting: bool, prompts: &[Vec<u32>], meter: &mut Meter) {
    let (row, num_blocks, window) = if evicting {
        (Row::PromptsEvicting, EVICTING_POOL, WINDOW)
    } else {
        (Row::PromptsHeld, HOLDING_POOL, NUM_PROMPTS)
    };
    let mut manager = manager(num_blocks, true);
    let mut held: VecDeque<SequenceId> = VecDeque::new();
    let mut slots = Vec::with_capacity(PROMPT_TOKENS);
    let mut num_hit_tokens = 0;
    meter.region(row, prompts.len(), || {
        for (id, tokens) in prompts.iter().enumerate() {
            let id = id as SequenceId;
            slots.clear();
            let admitted = manager.admit(id, &Prompt::new(tokens), &AdmitOptions::default(), &mut slots);
            num_hit_tokens += admitted.expect("the pool is large enough").num_computed_tokens as usize;
            black_box(&slots);
            manager.commit(id, PROMPT_TOKENS as u64, None).expect("they were admitted");
            held.push_back(id);
            if held.len() > window {
                let oldest = held.pop_front().expect("it is not empty");
                manager.release_sequence(oldest).expect("it exists");
            }
        }
        while let Some(oldest) = held.pop_front() {
            manager.release_sequence(oldest).expect("it exists");
        }
    });
    super::check_hits(num_hit_tokens);
}

/// A batch at 8k tokens: everything from the sequences' own tables with `append_batch`, `write_block_tables` and
/// `write_seq_lens`; then what changed with `DecodeBatch::step`.
pub(crate) fn decode(meter: &mut Meter) {
    let (mut manager, ids) = at_8k();
    let mut slots = Vec::with_capacity(BATCH);
    let mut tables = vec![0; BATCH * MAX_BLOCKS];
    let mut seq_lens = vec![0_i32; BATCH];
    meter.region(Row::DecodeRebuild, DECODE_STEPS, || {
        for _ in 0..DECODE_STEPS {
            slots.clear();
            manager.append_batch(&ids, None, None, &mut slots).expect("the pool is large enough");
            manager.write_block_tables(&ids, MAX_BLOCKS, &mut tables).expect("they fit");
            manager.write_seq_lens(&ids, &mut seq_lens).expect("they fit");
            black_box((&tables, &seq_lens, &slots));
        }
    });

    let (mut manager, _) = at_8k();
    let (mut memory, batch) = batch_of_all(&mut manager);
    let mut step = || {
        let mut sets = memory.each_mut().map(BatchMemory::lend);
        manager
            .batch(batch)
            .expect("it exists")
            .step(&mut sets, None, None)
            .expect("the pool is large enough");
        black_box(&memory);
    };
    // The first step of each set writes it whole.
    step();
    step();
    meter.region(Row::DecodeDelta, DECODE_STEPS - 2, || {
        for _ in 2..DECODE_STEPS {
            step();
        }
    });
}

/// `BATCH` sequences just below 8,192 tokens, staggered over the block.
fn at_8k() -> (BlockManager, Vec<SequenceId>) {
    let mut manager = manager(DECODE_POOL, false);
    let ids: Vec<SequenceId> = (0..BATCH as u64).collect();
    for (row, &id) in ids.iter().enumerate() {
        manager.create_sequence(id).expect("the id is new");
        manager
            .append_tokens(id, decode_length(row) as u64, None, &mut Vec::new())
            .expect("the pool is large enough");
    }
    (manager, ids)
}
