"""The block manager as a lesson: the contract of ``kvpager.KVBlockManager`` in plain, readable Python.

Read `block_manager.py`, top to bottom, then `pool.py`; `audit.py` lists what must always hold. The rest is plumbing:
`arguments.py` reads what callers pass, `tensors.py` turns answers into tensors and buffers, `snapshots.py` has the
values in which a manager tells about itself.

The tests drive this version and the Rust one with the same operations and compare every answer, so what is written here
is what the fast one does. It needs neither the Rust module nor, until a tensor is asked for, torch.
"""

from kvpager.reference.block_manager import KVBlockManager
from kvpager.reference.snapshots import PoolStats, SequenceState

__all__ = ["KVBlockManager", "PoolStats", "SequenceState"]
