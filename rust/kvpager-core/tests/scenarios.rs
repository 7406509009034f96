//! Scenarios that read like the articles' examples and the bug reports they come from; the number in a name is the
//! case's id in the catalogue of bug cases.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use kvpager_core::{BlockId, BlockManager, Config, Error, SequenceId, Slot};

fn pool(num_blocks: u64, block_size: u64) -> BlockManager {
    BlockManager::new(Config::new(num_blocks, block_size).unwrap()).unwrap()
}

fn admit(manager: &mut BlockManager, id: SequenceId, num_tokens: u64) -> Vec<Slot> {
    manager.create_sequence(id).unwrap();
    let mut slots = Vec::new();
    manager.append_tokens(id, num_tokens, None, &mut slots).unwrap();
    slots
}

fn ref_counts(manager: &BlockManager, blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|&block| manager.ref_count(block).unwrap()).collect()
}

/// Makes the next hand-outs exactly `order`.
fn lay_out(manager: &mut BlockManager, order: &[BlockId]) {
    let num_blocks = manager.config().num_blocks();
    let rest = (0..num_blocks).filter(|block| !order.contains(block));
    let wanted: Vec<BlockId> = order.iter().copied().chain(rest).collect();
    for _ in 0..num_blocks {
        manager.allocate_block().unwrap();
    }
    for &block in wanted.iter().rev() {
        manager.free_block(block).unwrap();
    }
    assert_eq!(manager.free_blocks(), wanted);
}

fn assert_sound(manager: &BlockManager) {
    assert_eq!(manager.check_invariants(), Vec::<String>::new());
}

// ---- the articles' examples -----------------------------------------------------------------------------------------

#[test]
fn a_permuted_table_maps_tokens_to_slots() {
    let mut manager = pool(12, 4);
    lay_out(&mut manager, &[5, 2, 9, 1]);
    let slots = admit(&mut manager, 1, 13);
    assert_eq!(manager.block_table(1).unwrap(), [5, 2, 9, 1]);
    assert_eq!(slots[6], 10); // block 2, offset 2
    assert_eq!(manager.locate(1, 6), Ok((2, 2)));
}

#[test]
fn the_ninth_token_takes_a_block_and_ten_waste_two() {
    let mut manager = pool(12, 4);
    lay_out(&mut manager, &[5, 2, 9]);
    admit(&mut manager, 1, 8);
    assert_eq!(manager.block_table(1).unwrap(), [5, 2]);
    assert_eq!(manager.append_token(1, None), Ok(36));
    assert_eq!(manager.block_table(1).unwrap(), [5, 2, 9]);
    assert_eq!(manager.append_token(1, None), Ok(37));
    assert_eq!(manager.internal_fragmentation_tokens(None), Ok(2));
    assert_eq!(manager.internal_fragmentation_tokens(Some(1)), Ok(2));
}

#[test]
fn blocks_of_sixteen() {
    let mut manager = pool(128, 16);
    lay_out(&mut manager, &[37, 102, 58]);
    admit(&mut manager, 1, 40);
    assert_eq!(manager.locate(1, 0), Ok((37, 0)));
    assert_eq!(manager.locate(1, 16), Ok((102, 0)));
    assert_eq!(manager.locate(1, 39), Ok((58, 7)));
}

#[test]
fn a_batch_of_three_lengths() {
    let mut manager = pool(10, 4);
    lay_out(&mut manager, &[7, 2, 9, 4, 1, 8, 5, 3, 6]);
    for (id, num_tokens) in [(1, 10), (2, 6), (3, 15)] {
        admit(&mut manager, id, num_tokens);
    }
    assert_eq!(manager.locate(1, 5), Ok((2, 1)));
    let mut tables = [0; 12];
    manager.write_block_tables(&[1, 2, 3], 4, &mut tables).unwrap();
    assert_eq!(tables, [7, 2, 9, -1, 4, 1, -1, -1, 8, 5, 3, 6]);
    let mut lengths = [0; 3];
    manager.write_seq_lens(&[1, 2, 3], &mut lengths).unwrap();
    assert_eq!(lengths, [10, 6, 15]);
}

// ---- pool -----------------------------------------------------------------------------------------------------------

#[test]
fn b001_second_free_is_an_error_and_changes_nothing() {
    let mut manager = pool(4, 4);
    admit(&mut manager, 1, 4);
    manager.release_sequence(1).unwrap();
    assert_eq!(manager.release_sequence(1), Err(Error::UnknownSequence { sequence_id: 1 }));
    let block = manager.allocate_block().unwrap();
    manager.free_block(block).unwrap();
    assert!(matches!(manager.free_block(block), Err(Error::State { .. })));
    assert_eq!(manager.num_free_blocks(), 4);
    assert_sound(&manager);

    let mut blocks: Vec<BlockId> = (0..4).map(|_| manager.allocate_block().unwrap()).collect();
    blocks.sort_unstable();
    assert_eq!(blocks, [0, 1, 2, 3]);
    assert!(matches!(manager.allocate_block(), Err(Error::OutOfBlocks { needed: 1, free: 0, .. })));
}

#[test]
fn b002_only_blocks_of_the_caller_can_be_freed() {
    let mut manager = pool(4, 4);
    admit(&mut manager, 1, 8); // blocks 0 and 1
    for block in [0, 1, 2] {
        assert!(matches!(manager.free_block(block), Err(Error::State { .. })), "block {block}");
    }
    for block in [4, BlockId::MAX] {
        let refused = manager.free_block(block);
        assert!(matches!(refused, Err(Error::Argument { argument: "block_id", .. })), "block {block}");
    }
    assert_eq!(ref_counts(&manager, &[0, 1]), [1, 1]);
    assert_eq!(manager.num_free_blocks(), 2);
    manager.release_sequence(1).unwrap();
    assert_eq!(manager.num_free_blocks(), 4);
    for _ in 0..1_000 {
        let block = manager.allocate_block().unwrap();
        assert!(block < 4);
        manager.free_block(block).unwrap();
    }
    assert_sound(&manager);
}

/// A slot reserved ahead of the token, and the sequence ends before it is used: rolled back or not, each block comes
/// back exactly once.
#[test]
fn b004_one_release_per_allocated_slot() {
    for rolls_back in [false, true] {
        let mut manager = pool(8, 4);
        admit(&mut manager, 1, 7);
        for length in 8..=12 {
            manager.append_token(1, None).unwrap(); // the token
            manager.append_token(1, None).unwrap(); // one ahead
            if rolls_back || length < 12 {
                manager.truncate_sequence(1, length).unwrap();
            }
        }
        manager.release_sequence(1).unwrap();
        let mut free = manager.free_blocks();
        free.sort_unstable();
        assert_eq!(free, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_sound(&manager);
    }
}

#[test]
fn b005_counts_on_exact_multiples() {
    for (num_tokens, num_blocks, last_fill) in
        [(0, 0, 0), (1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (12, 3, 4)]
    {
        let mut manager = pool(4, 4);
        admit(&mut manager, 1, num_tokens);
        let table = manager.block_table(1).unwrap().to_vec();
        assert_eq!(table.len(), num_blocks, "{num_tokens} tokens");
        assert!(ref_counts(&manager, &table).iter().all(|&count| count == 1));
        let wasted = manager.internal_fragmentation_tokens(Some(1)).unwrap();
        assert_eq!(wasted, if num_tokens == 0 { 0 } else { 4 - last_fill }, "{num_tokens} tokens");
        manager.release_sequence(1).unwrap();
        assert_eq!(manager.num_free_blocks(), 4);
        assert_eq!(ref_counts(&manager, &[0, 1, 2, 3]), [0; 4]);
    }
}

#[test]
fn last_freed_is_handed_out_first_and_a_release_goes_backwards() {
    let mut manager = pool(6, 2);
    admit(&mut manager, 1, 6); // 0, 1, 2
    admit(&mut manager, 2, 2); // 3
    manager.release_sequence(1).unwrap(); // 2, then 1, then 0
    assert_eq!(manager.free_blocks(), [0, 1, 2, 4, 5]);
    manager.release_sequence(2).unwrap();
    assert_eq!(manager.free_blocks(), [3, 0, 1, 2, 4, 5]);
}

#[test]
fn a_large_pool_costs_nothing_until_it_is_used() {
    let mut manager = pool(1 << 27, 16); // 3 GiB of bookkeeping, reserved but not touched
    assert_eq!(manager.allocate_block(), Ok(0));
    assert_eq!(manager.num_free_blocks(), (1 << 27) - 1);
    assert_sound(&manager);
}

// ---- copy-on-write --------------------------------------------------------------------------------------------------

#[test]
fn b031_shared_tail_is_copied_on_first_write() {
    let mut manager = pool(8, 4);
    admit(&mut manager, 1, 6);
    manager.fork_sequence(1, 2, None).unwrap();
    let (by_parent, by_child) =
        (manager.append_token(1, None).unwrap(), manager.append_token(2, None).unwrap());
    assert_eq!(manager.block_table(1).unwrap(), [0, 2]);
    assert_eq!(manager.block_table(2).unwrap(), [0, 1]);
    assert_eq!(ref_counts(&manager, &[0, 1, 2]), [2, 1, 1]);
    assert_eq!((by_parent, by_child), (10, 6)); // row 6 of each in a block of its own
    assert_eq!(manager.take_copies(), [(1, 2)]);
    assert_eq!(manager.stats().live, 3);
    assert_sound(&manager);
}

#[test]
fn b032_fork_at_an_exact_boundary() {
    for (num_tokens, num_copies, num_used) in [(8, 0, 4), (9, 1, 4), (1, 1, 2)] {
        let mut manager = pool(8, 4);
        admit(&mut manager, 1, num_tokens);
        manager.fork_sequence(1, 2, None).unwrap();
        manager.append_token(1, None).unwrap();
        manager.append_token(2, None).unwrap();
        let (first, second) = (manager.block_table(1).unwrap(), manager.block_table(2).unwrap());
        assert_eq!(first.len(), second.len());
        assert_ne!(first.last(), second.last());
        let shared = &first[..first.len() - 1];
        assert_eq!(shared, &second[..second.len() - 1]);
        assert!(ref_counts(&manager, shared).iter().all(|&count| count == 2));
        assert_eq!(manager.stats().live, num_used, "{num_tokens} tokens");
        assert_eq!(manager.take_copies().len(), num_copies, "{num_tokens} tokens");
    }
}

#[test]
fn b035_copy_on_write_with_no_free_block() {
    let mut manager = pool(2, 4);
    admit(&mut manager, 1, 6);
    manager.fork_sequence(1, 2, None).unwrap();
    let refused = manager.append_token(2, None);
    assert_eq!(
        refused,
        Err(Error::OutOfBlocks { needed: 1, free: 0, fenced: 0, total: 2, row: None, watermark: 0 })
    );
    assert_eq!(manager.sequence_length(2), Ok(6));
    assert_eq!(ref_counts(&manager, &[0, 1]), [2, 2]);
    assert_eq!(manager.clone().take_copies(), []);
    manager.release_sequence(2).unwrap();
    assert_eq!(ref_counts(&manager, &[0, 1]), [1, 1]);
    assert_eq!(manager.append_token(1, None), Ok(6)); // in place
    assert_eq!(manager.take_copies(), []);
    assert_sound(&manager);
}

/// Of three holders of a tail that all write, two copy it and the last one writes in place.
#[test]
fn a_batch_of_forks_takes_one_copy_less_than_holders() {
    let mut manager = pool(3, 4);
    admit(&mut manager, 1, 2);
    manager.fork_sequence(1, 2, None).unwrap();
    manager.fork_sequence(1, 3, None).unwrap();
    let mut slots = Vec::new();
    manager.append_batch(&[1, 2, 3], None, None, &mut slots).unwrap(); // two free blocks are just enough
    assert_eq!(slots, [6, 10, 2]);
    assert_eq!(manager.take_copies(), [(0, 1), (0, 2)]);
    assert_sound(&manager);
}

#[test]
fn a_source_without_holders_stays_back_until_its_copy_is_taken() {
    let mut manager = pool(2, 4);
    admit(&mut manager, 1, 2);
    manager.fork_sequence(1, 2, None).unwrap();
    manager.append_token(2, None).unwrap();
    manager.release_sequence(1).unwrap();
    assert_eq!((manager.stats().fenced, manager.num_free_blocks()), (1, 0));
    assert_eq!(manager.allocate_block().unwrap_err().to_string(), "need 1 blocks, 0 free of 2 (1 fenced)");
    assert_eq!(manager.take_copies(), [(0, 1)]);
    assert_eq!(manager.allocate_block(), Ok(0));
    assert_sound(&manager);
}

/// A source that lost its holders before the destination's sequence is released becomes free before that one's blocks.
#[test]
fn a_dropped_copy_frees_its_source_first() {
    let mut manager = pool(4, 4);
    admit(&mut manager, 1, 2);
    manager.fork_sequence(1, 2, None).unwrap();
    manager.append_tokens(2, 4, None, &mut Vec::new()).unwrap(); // copy 0 → 1, then block 2
    manager.release_sequence(1).unwrap(); // 0 is fenced
    manager.release_sequence(2).unwrap(); // drops the pair: 0 is free, then 2, then 1
    assert_eq!(manager.free_blocks(), [1, 2, 0, 3]);
    assert_eq!(manager.take_copies(), []);
    assert_eq!(manager.stats().num_copies, 1);
    assert_sound(&manager);
}

#[test]
fn a_block_that_waits_for_its_copy_is_not_shared() {
    let mut manager = pool(8, 4);
    admit(&mut manager, 1, 6);
    manager.fork_sequence(1, 2, None).unwrap();
    manager.append_token(2, None).unwrap();
    assert!(matches!(manager.fork_sequence(2, 3, None), Err(Error::State { .. })));
    manager.fork_sequence(2, 3, Some(4)).unwrap(); // the shorter prefix is written
    manager.take_copies();
    manager.fork_sequence(2, 4, None).unwrap();
    assert_sound(&manager);
}

// ---- arguments ------------------------------------------------------------------------------------------------------

#[test]
fn ids_stop_at_63_bits() {
    let mut manager = pool(4, 4);
    let largest = i64::MAX as SequenceId;
    manager.create_sequence(largest).unwrap();
    let refused = manager.create_sequence(largest + 1);
    assert!(matches!(refused, Err(Error::Argument { argument: "sequence_id", .. })));
    let refused = manager.fork_sequence(largest, largest + 1, None);
    assert!(matches!(refused, Err(Error::Argument { argument: "child", .. })));
}

/// A batch looks first where the batch before found its sequences: rows may have changed hands since.
#[test]
fn a_batch_finds_sequences_that_moved() {
    let mut manager = pool(8, 4);
    for id in [1, 2] {
        admit(&mut manager, id, 1);
    }
    let mut slots = Vec::new();
    manager.append_batch(&[1, 2], None, None, &mut slots).unwrap();
    manager.release_sequence(1).unwrap();
    for unknown in [1, 0, SequenceId::MAX] {
        let refused = manager.append_batch(&[unknown, 2], None, None, &mut slots);
        assert_eq!(refused, Err(Error::UnknownSequence { sequence_id: unknown }));
    }
    admit(&mut manager, 3, 1); // takes over the row of 1
    slots.clear();
    manager.append_batch(&[2, 3], None, None, &mut slots).unwrap();
    manager.append_batch(&[3, 2, 3], None, None, &mut slots).unwrap();
    assert_eq!(slots, [6, 1, 2, 7, 3]);
    assert_eq!(manager.sequence_ids(), [2, 3]);
    assert_sound(&manager);
}

#[test]
fn absurd_counts_are_refused_with_the_number() {
    let mut manager = pool(4, 4);
    admit(&mut manager, 1, 3);
    let before = manager.free_blocks();
    for n in [1 << 62, u64::MAX] {
        assert!(matches!(manager.append_tokens(1, n, None, &mut Vec::new()), Err(Error::OutOfBlocks { .. })));
        let refused = manager.append_batch(&[1, 1], Some(&[n, n]), None, &mut Vec::new());
        assert!(matches!(refused, Err(Error::OutOfBlocks { row: Some(0), .. })), "{refused:?}");
        assert!(matches!(manager.truncate_sequence(1, n), Err(Error::Argument { argument: "n", .. })));
        assert!(matches!(manager.locate(1, n), Err(Error::Slot { .. })));
        assert!(matches!(manager.slots(1, 0, n, &mut Vec::new()), Err(Error::Slot { .. })));
    }
    assert_eq!(manager.free_blocks(), before);
    assert_sound(&manager);
}

#[test]
fn outputs_of_the_wrong_size_are_refused() {
    let mut manager = pool(4, 4);
    admit(&mut manager, 1, 5);
    let refused = |result: Result<(), Error>, wanted: &str| match result {
        Err(Error::Argument { argument, .. }) => assert_eq!(argument, wanted),
        other => panic!("{other:?}"),
    };
    refused(manager.write_block_tables(&[1], 2, &mut [0; 3]), "out");
    refused(manager.write_block_tables(&[1], 1, &mut [0; 1]), "max_blocks");
    refused(manager.write_seq_lens(&[1], &mut []), "out");
    refused(manager.append_batch(&[1], Some(&[]), None, &mut Vec::new()), "counts");
    manager.write_block_tables(&[], 0, &mut []).unwrap();
}

#[test]
fn a_sequence_named_twice_in_a_commit_indexes_what_each_mention_filled() {
    for block_size in [1, 2, 3] {
        let config = Config::new(8, block_size).unwrap().with_prefix_caching(true);
        let mut manager = BlockManager::new(config).unwrap();
        manager.create_sequence(1).unwrap();
        manager.append_tokens(1, block_size + 1, None, &mut Vec::new()).unwrap();
        manager.commit(1, block_size - 1, Some(&vec![7; block_size as usize - 1])).unwrap();
        manager.commit_batch(&[1, 1], &[block_size, block_size + 1], Some(&[7, 7])).unwrap();
        assert_eq!(manager.stats().indexed, (block_size + 1) / block_size);
        assert_sound(&manager);
    }
}

#[test]
fn a_batch_named_again_finds_sequences_that_came_back_in_other_rows() {
    let mut manager = pool(8, 4);
    admit(&mut manager, 1, 1);
    admit(&mut manager, 2, 2);
    let mut slots = Vec::new();
    manager.append_batch(&[1, 2], None, None, &mut slots).unwrap();
    assert_eq!(slots, [1, 6]);

    manager.release_sequence(1).unwrap();
    let refused = manager.append_batch(&[1, 2], None, None, &mut slots);
    assert_eq!(refused, Err(Error::UnknownSequence { sequence_id: 1 }));
    let refused = manager.append_batch(&[1, 2], None, None, &mut slots); // nor is it remembered half found
    assert_eq!(refused, Err(Error::UnknownSequence { sequence_id: 1 }));
    assert_eq!(manager.sequence_length(2), Ok(3));

    manager.release_sequence(2).unwrap();
    admit(&mut manager, 1, 3); // in the row that 2 had
    admit(&mut manager, 2, 1);
    slots.clear();
    manager.append_batch(&[1, 2], None, None, &mut slots).unwrap();
    assert_eq!((manager.sequence_length(1), manager.sequence_length(2)), (Ok(4), Ok(2)));
    assert_eq!(slots, [7, 1]);
}
