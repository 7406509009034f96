//! One manager under a lock, hammered by threads: whatever the interleaving, it audits clean, refuses only what it may
//! refuse, and ends empty.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Mutex;

use kvpager_core::{AdmitOptions, BlockManager, Config, Error, EvictionPolicy, Prompt, Slot, TokenId};

const NUM_THREADS: u64 = 4;
const NUM_ROUNDS: u64 = 400;

/// A small generator, so that each thread has its own fixed stream.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// One life of a sequence: admitted, committed in chunks, grown, perhaps forked and cut, released.
fn live(manager: &Mutex<BlockManager>, id: u64, random: &mut Random) -> Result<(), Error> {
    let token_ids: Vec<TokenId> =
        (0..4 + random.below(20)).map(|at| (at / 6 + random.below(8) / 7) as TokenId).collect();
    let mut slots: Vec<Slot> = Vec::new();
    let call = || manager.lock().unwrap();
    let options = AdmitOptions { num_new_tokens: Some(random.below(20)), ..AdmitOptions::default() };
    call().admit(id, &Prompt::new(&token_ids), &options, &mut slots)?;
    for _ in 0..random.below(12) {
        let mut manager = call();
        let length = manager.sequence_length(id)?;
        match random.below(8) {
            0 => manager.truncate_sequence(id, random.below(length + 1))?,
            1 => {
                let _ = manager.fork_sequence(id, id + 1, None);
                let _ = manager.append_token(id + 1, None);
                if manager.sequence_length(id + 1).is_ok() {
                    manager.release_sequence(id + 1)?;
                }
            }
            2 => drop(manager.take_copies()),
            3 => {
                if let Ok(pin) = manager.pin_prefix(&Prompt::new(&token_ids)) {
                    manager.unpin(pin)?;
                }
            }
            4 => {
                let epoch = manager.advance_epoch()?;
                manager.retire(epoch)?;
            }
            5 | 6 => {
                let _ = manager.append_tokens(id, 1, None, &mut slots);
            }
            _ => {
                let _ = manager.commit(id, length, None);
            }
        }
        assert_eq!(manager.check_invariants(), Vec::<String>::new());
    }
    call().release_sequence(id)
}

#[test]
fn b126_any_interleaving_audits_clean() {
    for &policy in EvictionPolicy::ALL {
        let config = Config::new(24, 4).unwrap().with_prefix_caching(true).with_fences(true);
        let manager = Mutex::new(BlockManager::new(config.with_eviction_policy(policy)).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..NUM_THREADS {
                let manager = &manager;
                scope.spawn(move || {
                    let mut random = Random(thread + 1);
                    for round in 0..NUM_ROUNDS {
                        match live(manager, (thread * NUM_ROUNDS + round) * 2, &mut random) {
                            Ok(()) | Err(Error::OutOfBlocks { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        });
        let mut manager = manager.into_inner().unwrap();
        manager.take_copies();
        let epoch = manager.advance_epoch().unwrap();
        manager.retire(epoch).unwrap();
        let stats = manager.stats();
        assert_eq!((stats.live, stats.fenced, stats.num_sequences), (0, 0, 0));
        assert!(stats.num_hit_tokens > 0 && stats.num_evictions > 0, "{stats:?}");
        assert_eq!(manager.check_invariants(), Vec::<String>::new());
    }
}
