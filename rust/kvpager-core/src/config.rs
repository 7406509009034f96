//! The shape and the rules of a pool, validated once: how many blocks, how many token positions each, whether content
//! is indexed, and the arithmetic between tokens, blocks and slots. Everything behind it may cast without a check.

use crate::error::{Error, Result};
use crate::eviction::EvictionPolicy;
use crate::ids::{BlockId, SequenceId, Slot, TokenId};

/// Largest number of blocks: ids must fit the int32 block tables that kernels read.
pub const MAX_BLOCKS: u64 = i32::MAX as u64;

/// Largest sequence id: ids travel in int64 tensors.
pub const MAX_SEQUENCE_ID: SequenceId = i64::MAX as SequenceId;

/// Largest token id: ids travel in int32 tensors.
pub const MAX_TOKEN_ID: TokenId = i32::MAX as TokenId;

/// The validated shape of a pool, and its rules. [`new`](Self::new) gives the bare manager; each `with_…` changes one
/// rule.
///
/// ```
/// use kvpager_core::Config;
///
/// let config = Config::new(64, 16)?;
/// assert_eq!(config.blocks_for(17), 2);
/// assert_eq!(config.slot(3, 5), 53);
/// assert!(Config::new(64, 0).is_err());
///
/// let config = config.with_prefix_caching(true).with_watermark_blocks(4)?;
/// assert!(config.prefix_caching());
/// # Ok::<(), kvpager_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    num_blocks: u32,
    block_size: u64,
    prefix_caching: bool,
    fences: bool,
    has_constant_hash: bool,
    eviction_policy: EvictionPolicy,
    watermark_blocks: u32,
    max_pinned_blocks: u32,
    max_sequence_length: u64,
    hash_seed: u64,
}

impl Config {
    /// Checks and keeps the two numbers. O(1).
    ///
    /// # Errors
    /// [`Error::Config`] if one is 0, if there are more than [`MAX_BLOCKS`] blocks, or if the slots don't fit an i64.
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.num_blocks(), 64);
    /// assert!(Config::new(64, 0).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn new(num_physical_blocks: u64, block_size: u64) -> Result<Self> {
        let reason = if num_physical_blocks == 0 || num_physical_blocks > MAX_BLOCKS {
            format!("`num_physical_blocks`: wanted 1 to {MAX_BLOCKS} blocks, got {num_physical_blocks}")
        } else if block_size == 0 {
            "`block_size`: wanted at least 1 token, got 0".to_owned()
        } else if num_physical_blocks.checked_mul(block_size).is_none_or(|slots| slots > i64::MAX as u64) {
            format!(
                "{num_physical_blocks} blocks of {block_size} tokens: the slots don't fit a 64-bit integer"
            )
        } else {
            return Ok(Self {
                num_blocks: num_physical_blocks as u32,
                block_size,
                prefix_caching: false,
                fences: false,
                has_constant_hash: false,
                eviction_policy: EvictionPolicy::default(),
                watermark_blocks: 0,
                max_pinned_blocks: num_physical_blocks as u32,
                max_sequence_length: u64::MAX,
                hash_seed: 0,
            });
        };
        Err(Error::Config { reason })
    }

    /// With or without the prefix index. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert!(Config::new(64, 16)?.with_prefix_caching(true).prefix_caching());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_prefix_caching(self, prefix_caching: bool) -> Self {
        Self { prefix_caching, ..self }
    }

    /// With or without fences: whether blocks freed in an epoch wait until it is retired. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert!(Config::new(64, 16)?.with_fences(true).fences());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_fences(self, fences: bool) -> Self {
        Self { fences, ..self }
    }

    /// With another order of eviction. O(1).
    ///
    /// ```
    /// # use kvpager_core::{Config, EvictionPolicy};
    /// let config = Config::new(64, 16)?.with_eviction_policy(EvictionPolicy::Slru);
    /// assert_eq!(config.eviction_policy(), EvictionPolicy::Slru);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_eviction_policy(self, eviction_policy: EvictionPolicy) -> Self {
        Self { eviction_policy, ..self }
    }

    /// With another seed of the chain hashes: equal seeds give blocks equal names in every process. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.with_hash_seed(7).hash_seed(), 7);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_hash_seed(self, hash_seed: u64) -> Self {
        Self { hash_seed, ..self }
    }

    /// A hook for tests: makes every hash equal, which must change nothing but speed. O(1).
    #[must_use]
    #[doc(hidden)]
    pub fn with_constant_hash(self, has_constant_hash: bool) -> Self {
        Self { has_constant_hash, ..self }
    }

    /// With blocks kept back when admitting. O(1).
    ///
    /// # Errors
    /// [`Error::Config`] if the pool has fewer.
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.with_watermark_blocks(4)?.watermark_blocks(), 4);
    /// assert!(Config::new(64, 16)?.with_watermark_blocks(65).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn with_watermark_blocks(self, num_blocks: u64) -> Result<Self> {
        Ok(Self { watermark_blocks: self.at_most_all("watermark_blocks", num_blocks)?, ..self })
    }

    /// With a quota of pinned blocks. O(1).
    ///
    /// # Errors
    /// [`Error::Config`] if the pool has fewer.
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.with_max_pinned_blocks(8)?.max_pinned_blocks(), 8);
    /// assert!(Config::new(64, 16)?.with_max_pinned_blocks(65).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn with_max_pinned_blocks(self, num_blocks: u64) -> Result<Self> {
        Ok(Self { max_pinned_blocks: self.at_most_all("max_pinned_blocks", num_blocks)?, ..self })
    }

    /// With a bound on the tokens of a sequence. O(1).
    ///
    /// # Errors
    /// [`Error::Config`] if it is 0 or above 2⁶³ − 1.
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.with_max_sequence_length(100)?.max_sequence_length(), 100);
    /// assert!(Config::new(64, 16)?.with_max_sequence_length(0).is_err());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn with_max_sequence_length(self, num_tokens: u64) -> Result<Self> {
        if num_tokens == 0 || num_tokens > i64::MAX as u64 {
            let reason = format!("`max_sequence_length`: wanted 1 to 2^63-1, got {num_tokens}");
            return Err(Error::Config { reason });
        }
        Ok(Self { max_sequence_length: num_tokens, ..self })
    }

    fn at_most_all(&self, parameter: &str, num_blocks: u64) -> Result<u32> {
        if num_blocks > u64::from(self.num_blocks) {
            let all = self.num_blocks;
            return Err(Error::Config {
                reason: format!("`{parameter}`: wanted 0 to {all}, got {num_blocks}"),
            });
        }
        Ok(num_blocks as u32)
    }

    /// Blocks in the pool. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.num_blocks(), 64);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Token positions of one block. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.block_size(), 16);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Whether there is a prefix index. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert!(!Config::new(64, 16)?.prefix_caching());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn prefix_caching(&self) -> bool {
        self.prefix_caching
    }

    /// Whether freed blocks wait for their epoch to be retired. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert!(!Config::new(64, 16)?.fences());
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn fences(&self) -> bool {
        self.fences
    }

    /// The order of eviction. O(1).
    ///
    /// ```
    /// # use kvpager_core::{Config, EvictionPolicy};
    /// assert_eq!(Config::new(64, 16)?.eviction_policy(), EvictionPolicy::Lru);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn eviction_policy(&self) -> EvictionPolicy {
        self.eviction_policy
    }

    /// Blocks kept back when admitting. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.watermark_blocks(), 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn watermark_blocks(&self) -> u32 {
        self.watermark_blocks
    }

    /// Most blocks that may be pinned at once. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.max_pinned_blocks(), 64);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn max_pinned_blocks(&self) -> u32 {
        self.max_pinned_blocks
    }

    /// Most tokens of a sequence; `u64::MAX` says that there is no bound. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.max_sequence_length(), u64::MAX);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn max_sequence_length(&self) -> u64 {
        self.max_sequence_length
    }

    /// Seed of the chain hashes. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.hash_seed(), 0);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn hash_seed(&self) -> u64 {
        self.hash_seed
    }

    pub(crate) fn has_constant_hash(&self) -> bool {
        self.has_constant_hash
    }

    /// Blocks that hold `num_tokens` tokens: ⌈`num_tokens` / S⌉. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.blocks_for(17), 2);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn blocks_for(&self, num_tokens: u64) -> u64 {
        num_tokens.div_ceil(self.block_size)
    }

    /// The slot of `offset` in `block`; both must lie inside the pool. O(1).
    ///
    /// ```
    /// # use kvpager_core::Config;
    /// assert_eq!(Config::new(64, 16)?.slot(3, 5), 53);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    #[must_use]
    pub fn slot(&self, block: BlockId, offset: u64) -> Slot {
        debug_assert!(block < self.num_blocks && offset < self.block_size);
        (u64::from(block) * self.block_size + offset) as Slot
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn limits_are_inclusive() {
        assert!(Config::new(1, 1).is_ok());
        assert!(Config::new(MAX_BLOCKS, 16).is_ok());
        assert!(Config::new(1, i64::MAX as u64).is_ok());
        for (num_blocks, block_size) in [(0, 1), (1, 0), (MAX_BLOCKS + 1, 1), (2, 1 << 62), (1, u64::MAX)] {
            assert!(
                matches!(Config::new(num_blocks, block_size), Err(Error::Config { .. })),
                "{num_blocks} × {block_size}"
            );
        }
    }

    #[test]
    fn messages_name_the_parameter() {
        let message = Config::new(0, 4).unwrap_err().to_string();
        assert_eq!(message, "`num_physical_blocks`: wanted 1 to 2147483647 blocks, got 0");
        let config = Config::new(8, 4).unwrap();
        let messages = [
            config.with_watermark_blocks(9).unwrap_err().to_string(),
            config.with_max_pinned_blocks(9).unwrap_err().to_string(),
            config.with_max_sequence_length(0).unwrap_err().to_string(),
        ];
        assert_eq!(
            messages,
            [
                "`watermark_blocks`: wanted 0 to 8, got 9",
                "`max_pinned_blocks`: wanted 0 to 8, got 9",
                "`max_sequence_length`: wanted 1 to 2^63-1, got 0",
            ]
        );
        assert!(config.with_watermark_blocks(8).is_ok() && config.with_max_pinned_blocks(0).is_ok());
    }
}
