"""Who owns which block of the cache: the block manager and the batch that steps, both in Rust, integers only."""

from kvpager.manager.block_manager import Admission, KVBlockManager, PrefixItem, SequenceState
from kvpager.manager.decode_batch import BatchBuffers, BatchStep, DecodeBatch

__all__ = [
    "Admission",
    "BatchBuffers",
    "BatchStep",
    "DecodeBatch",
    "KVBlockManager",
    "PrefixItem",
    "SequenceState",
]
