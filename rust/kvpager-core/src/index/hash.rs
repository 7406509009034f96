//! The 128-bit chain hash of a block: its parent's hash, its token ids and its extra keys, under a seed.
//!
//! Two lanes of multiply-and-fold over 64-bit words, four token ids a round, in the manner of wyhash. It only finds
//! candidates (the index compares the tokens themselves) and names blocks outside of the process, so it need not be
//! cryptographic; equal inputs under equal seeds give equal hashes on every machine. The words that are multiplied with
//! can't be 0: ids have at most 31 bits, the constants have bit 63 set.
//!
//! The parent enters last, so that the tokens of many blocks are mixed side by side and a chain waits for one
//! multiplication a block.
//!
//! Costs: about 10 ns a block of 16 tokens.

use crate::ids::TokenId;

/// 128 bits in two words.
pub(crate) type Hash = [u64; 2];

const LANES: Hash = [0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03];
const WORDS: Hash = [0xA076_1D64_78BD_642F, 0xE703_7ED1_A0B4_28DB];
const ENDS: Hash = [0x8EBC_6AF0_9C88_C6E3, 0xB897_65CC_7537_4CC3];

/// A seed, and whether every hash is made equal (a hook for tests: it must change nothing but speed).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hasher {
    seed: Hash,
    is_constant: bool,
}

impl Hasher {
    pub(crate) fn new(seed: u64, is_constant: bool) -> Self {
        let first = fold(seed ^ LANES[0], ENDS[0]);
        Self { seed: [first, fold(first ^ LANES[1], ENDS[1])], is_constant }
    }

    /// The hash of a block: `parent` is the hash of the block before it (of the namespace, for a first block), `key`
    /// that of its extra keys, 0 for none.
    #[expect(
        clippy::inline_always,
        reason = "half of its cost would be the call, which hands everything through memory"
    )]
    #[inline(always)]
    pub(crate) fn chain(&self, parent: Hash, token_ids: &[TokenId], key: Hash) -> Hash {
        let mut lanes = self.seed;
        if key != [0, 0] {
            lanes = round(lanes, key[0], key[1]);
        }
        let mut quads = token_ids.chunks_exact(4);
        for quad in &mut quads {
            lanes = round(lanes, word(quad[0], quad[1]), word(quad[2], quad[3]));
        }
        if let [first, rest @ ..] = quads.remainder() {
            // No id has these bits.
            let padded = |at: usize| rest.get(at).copied().unwrap_or(TokenId::MAX);
            lanes = round(lanes, word(*first, padded(0)), word(padded(1), TokenId::MAX >> 1));
        }
        self.finish([lanes[0] ^ parent[0], lanes[1] ^ parent[1]])
    }

    /// The hash of an encoded key or namespace.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> Hash {
        let mut lanes = self.seed;
        for chunk in bytes.chunks(14) {
            // Seven bytes a word, and the length on top: different strings give different words.
            let mut words = [0_u64; 2];
            for (at, &byte) in chunk.iter().enumerate() {
                words[at / 7] |= u64::from(byte) << (8 * (at % 7));
            }
            words[0] |= (chunk.len() as u64) << 56;
            lanes = round(lanes, words[0], words[1]);
        }
        self.finish(lanes)
    }

    #[inline]
    fn finish(&self, lanes: Hash) -> Hash {
        if self.is_constant {
            return [0, 0];
        }
        [fold(lanes[0] ^ lanes[1].rotate_left(32), ENDS[0]), fold(lanes[1], ENDS[1])]
    }
}

#[inline]
fn word(low: TokenId, high: TokenId) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
fn round(lanes: Hash, a: u64, b: u64) -> Hash {
    [fold(a ^ lanes[0], b ^ WORDS[0]), fold(b ^ lanes[1], a ^ WORDS[1])]
}

/// The two halves of the 128-bit product, folded together.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const NO_KEY: Hash = [0, 0];

    #[test]
    fn golden_vectors() {
        // A change here renames every block outside of the process.
        let hasher = Hasher::new(0, false);
        let root = hasher.bytes(b"");
        let first = hasher.chain(root, &[1, 2, 3, 4], NO_KEY);
        assert_eq!(root, GOLDEN[0]);
        assert_eq!(first, GOLDEN[1]);
        assert_eq!(hasher.chain(first, &[5], root), GOLDEN[2]);
    }

    const GOLDEN: [Hash; 3] = [
        [0xACAB_DCA3_2C6B_005F, 0xF9FB_ED1B_8A25_3445],
        [0x0BED_7769_D6CA_0B9D, 0xEA80_4D99_4ED6_9B4E],
        [0x57ED_4030_A74D_1C3C, 0x7745_F49C_96F3_4DE3],
    ];

    #[test]
    fn every_input_matters() {
        let hasher = Hasher::new(7, false);
        let mut seen = HashSet::new();
        for parent in [[0, 0], [0, 1], [1, 0]] {
            for key in [NO_KEY, [1, 0], [0, 1]] {
                for at in 0..7 {
                    for id in [1, 2, 65_536, 65_537, i32::MAX as u32] {
                        let mut token_ids = [0; 7];
                        token_ids[at] = id;
                        assert!(seen.insert(hasher.chain(parent, &token_ids, key)));
                    }
                }
            }
        }
        for num_tokens in 1..9 {
            assert!(seen.insert(hasher.chain([0, 0], &vec![0; num_tokens], NO_KEY)));
        }
        assert!(seen.insert(Hasher::new(8, false).bytes(b"ab")));
        for bytes in [&b"ab"[..], b"abc", b"", b"\0", b"\0\0", b"abcdefghijklmno", b"abcdefghijklmnp"] {
            assert!(seen.insert(hasher.bytes(bytes)));
        }
    }

    #[test]
    fn the_hook_makes_every_hash_equal() {
        let hasher = Hasher::new(7, true);
        assert_eq!(hasher.chain([1, 2], &[3], [4, 5]), hasher.bytes(b"x"));
    }
}
