"""What must hold between any two calls, as a list of questions. Each fault is named with the block or sequence at hand.

O(blocks + table entries). The bookkeeping is redone from nothing but the tables and the callers' holds, then compared.
"""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.reference.block_manager import KVBlockManager


def find_broken_invariants(manager: "KVBlockManager") -> list[str]:
    """One sentence for each broken invariant of `manager`, none if all is sound."""
    return [
        *_tables(manager),
        *_ref_counts(manager),
        *_states(manager),
        *_owed_copies(manager),
        *_counters(manager),
    ]


def _tables(manager: "KVBlockManager") -> list[str]:
    faults = []
    for sequence_id, sequence in manager._sequences.items():
        wanted = -(-sequence.length // manager.block_size)
        if len(sequence.table) != wanted:
            faults.append(
                f"table of sequence {sequence_id} has {len(sequence.table)} entries, "
                f"its length {sequence.length} needs {wanted}"
            )
        for block in sequence.table:
            if not 0 <= block < manager.num_blocks:
                faults.append(f"table of sequence {sequence_id} names block {block}, outside of the pool")
    return faults


def _ref_counts(manager: "KVBlockManager") -> list[str]:
    """Ref count = table entries that name the block + a caller's hold. Fewer than found means one owner too many."""
    found = Counter(block for sequence in manager._sequences.values() for block in sequence.table)
    found.update(manager._held_by_caller)
    return [
        f"block {block} has {found[block]} owners but ref count {count}"
        + (": double owner" if found[block] > count else "")
        for block, count in enumerate(manager._pool.ref_counts)
        if found[block] != count
    ]


def _states(manager: "KVBlockManager") -> list[str]:
    """Every block is live, fenced or free: one of the three, once."""
    faults = []
    free = Counter(manager._pool.free)
    for block, count in enumerate(manager._pool.ref_counts):
        if free[block] > 1:
            faults.append(f"block {block} is {free[block]} times in the free list: double free")
        if count > 0 and free[block]:
            faults.append(f"block {block} is both live and in the free list")
        if count > 0 and block in manager._pool.fenced:
            faults.append(f"block {block} is both live and fenced")
        if free[block] and block in manager._pool.fenced:
            faults.append(f"block {block} is both fenced and in the free list")
        if count == 0 and not free[block] and block not in manager._pool.fenced:
            faults.append(f"block {block} is lost: not live, not fenced, not in the free list")
    return faults


def _owed_copies(manager: "KVBlockManager") -> list[str]:
    """A destination is its writer's alone and nobody's source. Only a source stays fenced."""
    faults = []
    sources = set(manager._pool.owed.values())
    for destination, source in manager._pool.owed.items():
        copy = f"owed copy {source} -> {destination}"
        if manager._pool.ref_counts[destination] != 1:
            faults.append(f"{copy}: destination has ref count {manager._pool.ref_counts[destination]}, wanted 1")
        if destination in sources:
            faults.append(f"{copy}: destination is a source too")
        if source in manager._pool.free:
            faults.append(f"{copy}: source is in the free list")
    faults += [
        f"block {block} is fenced but no owed copy reads it" for block in manager._pool.fenced if block not in sources
    ]
    return faults


def _counters(manager: "KVBlockManager") -> list[str]:
    live = sum(count > 0 for count in manager._pool.ref_counts)
    faults = []
    if manager._pool.num_live != live:
        faults.append(f"counter of live blocks is {manager._pool.num_live}, recount gives {live}")
    if manager._pool.peak_live < live:
        faults.append(f"peak of live blocks is {manager._pool.peak_live}, but {live} are live")
    if manager._pool.num_copies < len(manager._pool.owed):
        faults.append(f"counter of copies is {manager._pool.num_copies}, but {len(manager._pool.owed)} are owed")
    return faults
