"""Who owns which block of the cache: the block manager and the batch that steps, both in Rust, integers only."""

from kvpager.manager.block_manager import KVBlockManager, PrefixItem
from kvpager.manager.decode_batch import BatchStep, DecodeBatch
from kvpager.records import Admission, BatchBuffers, SequenceState

__all__ = [
    "Admission",
    "BatchBuffers",
    "BatchStep",
    "DecodeBatch",
    "KVBlockManager",
    "PrefixItem",
    "SequenceState",
]
