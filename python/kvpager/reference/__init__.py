"""The block manager as a lesson: the contract of ``kvpager.KVBlockManager`` in plain, readable Python.

Read `block_manager.py`, which names the chapters: `pool.py`, `appending.py`, `index.py`, `admission.py`, `eviction.py`,
`pins.py`. On top of it stands `decode_batch.py`; `audit.py` lists what must always hold. The rest is plumbing:
`state.py` has the configuration and the sequences, `arguments.py` reads what callers pass, `questions.py`, `tensors.py`
and `buffers.py` give answers, `snapshots.py` and `kvpager.records` have the values that a manager hands out.

The tests drive this version and the Rust one with the same operations and compare every answer, so what is written here
is what the fast one does. It needs neither the Rust module nor, until a tensor is asked for, torch.
"""

from kvpager.records import Admission, BatchBuffers, SequenceState
from kvpager.reference.block_manager import KVBlockManager
from kvpager.reference.decode_batch import DecodeBatch
from kvpager.reference.snapshots import BatchStep, BlockInfo, PoolStats

__all__ = [
    "Admission",
    "BatchBuffers",
    "BatchStep",
    "BlockInfo",
    "DecodeBatch",
    "KVBlockManager",
    "PoolStats",
    "SequenceState",
]
