//! Any list of operations on a small block manager, drawn from bytes, with a toy engine around it.
//!
//! The bytes say which world (1 to 6 blocks of 1, 2 or 4 tokens, with or without index, fences, watermark, either
//! policy, hashes that are all equal or not) and then which operation with which arguments, so that a fuzzer that
//! changes bytes changes operations. Three token values, few salts: equal prompts and near misses are common.
//!
//! After every operation:
//! * the manager's own audit finds nothing;
//! * every computed token of every sequence still reads what was written for exactly its history (tokens, salt,
//!   adapter, media): nobody wrote into what others share, nothing wrong was shared, nothing was evicted under a
//!   holder;
//! * a refused operation has changed nothing that can be seen;
//! * a fenced block that the index does not name is not held by anybody.
//!
//! At the end everything is given back and nothing is live or fenced.
//!
//! ```text
//! cargo install cargo-fuzz
//! cargo +nightly fuzz run operations -- -max_len=400 -max_total_time=600      # at the root of the repository
//! cargo test --manifest-path fuzz/Cargo.toml                                  # a few thousand random byte strings
//! ```

mod bytes;
mod engine;
mod operations;

use bytes::Bytes;
use engine::Engine;

/// Plays the operations that the bytes stand for.
///
/// # Panics
/// If anything above does not hold.
pub fn play(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let mut engine = Engine::new(&mut bytes);
    while !bytes.is_empty() {
        engine.step(&mut bytes);
    }
    engine.finish();
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_bytes_find_nothing() {
        let mut state = 0x2545_F491_4F6C_DD1D_u64;
        for _ in 0..20_000 {
            let data: Vec<u8> = (0..300)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    (state >> 32) as u8
                })
                .collect();
            super::play(&data);
        }
    }
}
