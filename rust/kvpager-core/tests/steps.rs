//! The fast ways of a decode step, and what happens where they end.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use kvpager_core::{BlockManager, Config, Prompt};

#[test]
fn blocks_longer_than_a_run_is_counted() {
    // Open positions are counted in 16 bits: of a longer block the rest is looked at again.
    let config = Config::new(3, 100_000).unwrap().with_prefix_caching(true);
    let mut manager = BlockManager::new(config).unwrap();
    let mut slots = Vec::new();
    manager.create_sequence(1).unwrap();
    manager.append_tokens(1, 65_534, None, &mut slots).unwrap();
    for position in 65_534..65_540 {
        assert_eq!(manager.append_token(1, None).unwrap(), position);
    }
    manager.append_tokens(1, 140_000, None, &mut slots).unwrap();
    assert!(slots.iter().copied().eq((0..65_534).chain(65_540..205_540)));
    assert_eq!((manager.block_table(1).unwrap(), manager.check_invariants()), (&[0, 1, 2][..], vec![]));
    let ids: Vec<u32> = (0..205_540).collect();
    manager.commit(1, 205_539, Some(&ids[..205_539])).unwrap();
    manager.commit_batch(&[1], &[205_540], Some(&ids[205_539..])).unwrap();
    assert_eq!((manager.stats().indexed, manager.check_invariants()), (2, vec![]));
}

#[test]
fn ids_of_a_decode_step_come_home_when_something_else_happens() {
    let decoded = |n: u64| {
        let config = Config::new(8, 4).unwrap().with_prefix_caching(true);
        let mut manager = BlockManager::new(config).unwrap();
        manager.create_sequence(1).unwrap();
        for at in 0..n {
            manager.append_token(1, None).unwrap();
            manager.commit_batch(&[1], &[at + 1], Some(&[10 + at as u32])).unwrap();
            assert_eq!(manager.check_invariants(), [""; 0]);
        }
        manager
    };
    let finds = |manager: &mut BlockManager, ids: &[u32]| manager.match_prefix(&Prompt::new(ids)).unwrap();

    let mut manager = decoded(6); // the second block is half full
    manager.fork_sequence(1, 2, None).unwrap();
    manager.append_tokens(2, 2, Some(&[16, 17]), &mut Vec::new()).unwrap();
    manager.take_copies();
    manager.commit(2, 8, None).unwrap();
    assert_eq!(finds(&mut manager, &[10, 11, 12, 13, 14, 15, 16, 17, 0]), 8);

    let mut manager = decoded(7);
    manager.truncate_sequence(1, 5).unwrap();
    manager.append_tokens(1, 3, None, &mut Vec::new()).unwrap();
    manager.commit(1, 8, Some(&[7, 8, 9])).unwrap();
    assert_eq!(finds(&mut manager, &[10, 11, 12, 13, 14, 7, 8, 9, 0]), 8);

    let mut manager = decoded(3); // a commit that lags behind an append, then one that catches up
    manager.append_tokens(1, 2, None, &mut Vec::new()).unwrap();
    manager.commit_batch(&[1], &[4], Some(&[13])).unwrap();
    manager.commit_batch(&[1], &[5], Some(&[14])).unwrap();
    assert_eq!((finds(&mut manager, &[10, 11, 12, 13, 0]), manager.stats().indexed), (4, 1));

    let mut manager = decoded(4); // a commit of two rows, the second of which can't be
    manager.create_sequence(2).unwrap();
    manager.append_token(1, None).unwrap();
    assert!(manager.commit_batch(&[1, 2], &[5, 1], Some(&[14, 0])).is_err());
    assert_eq!((manager.num_computed_tokens(1).unwrap(), manager.check_invariants()), (4, vec![]));
    manager.reset_prefix_cache();
    manager.commit_batch(&[1], &[5], Some(&[14])).unwrap();
    assert_eq!((manager.stats().indexed, manager.check_invariants()), (0, vec![]));
}
