//! The numbers that things are named by. They travel in int32 and int64 tensors, so none uses its topmost bit.

/// A physical block: an index into the pool, below 2³¹ so that an int32 table can hold it.
pub type BlockId = u32;

/// A token of a vocabulary, 0 to 2³¹ − 1 so that an int32 tensor can hold it.
pub type TokenId = u32;

/// The caller's name of a sequence, at most 2⁶³ − 1 so that an int64 tensor can hold it.
pub type SequenceId = u64;

/// One token position in the pool: `block * block_size + offset`.
pub type Slot = i64;
