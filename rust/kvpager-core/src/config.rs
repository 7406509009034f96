//! The geometry of a pool, validated once: how many blocks, how many token positions each, and the arithmetic
//! between tokens, blocks and slots. Everything behind it may cast without a check.

use crate::{BlockId, Error, Result, SequenceId, Slot};

/// Largest number of blocks: ids must fit the int32 block tables that kernels read.
pub const MAX_BLOCKS: u64 = i32::MAX as u64;

/// Largest sequence id: ids travel in int64 tensors.
pub const MAX_SEQUENCE_ID: SequenceId = i64::MAX as SequenceId;

/// The validated shape of a pool.
///
/// ```
/// use kvpager_core::Config;
///
/// let config = Config::new(64, 16)?;
/// assert_eq!(config.blocks_for(17), 2);
/// assert_eq!(config.slot(3, 5), 53);
/// assert!(Config::new(64, 0).is_err());
/// # Ok::<(), kvpager_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    num_blocks: u32,
    block_size: u64,
}

impl Config {
    /// Checks and keeps the two numbers. O(1).
    ///
    /// # Errors
    /// [`Error::Config`] if one is 0, if there are more than [`MAX_BLOCKS`] blocks, or if the slots don't fit an i64.
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
            return Ok(Self { num_blocks: num_physical_blocks as u32, block_size });
        };
        Err(Error::Config { reason })
    }

    /// Blocks in the pool. O(1).
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Token positions of one block. O(1).
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Blocks that hold `num_tokens` tokens: ⌈`num_tokens` / S⌉. O(1).
    #[must_use]
    pub fn blocks_for(&self, num_tokens: u64) -> u64 {
        num_tokens.div_ceil(self.block_size)
    }

    /// The slot of `offset` in `block`; both must lie inside the pool. O(1).
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
    }
}
