"""What must hold between any two calls, as a list of questions. Each fault is named with the block or sequence at hand.

O(blocks + table entries). The bookkeeping is redone from nothing but the tables and the callers' holds, then compared.
"""

from collections import Counter

from kvpager.reference.index import Node, items_of_block
from kvpager.reference.state import ManagerState, Sequence


def find_broken_invariants(manager: ManagerState) -> list[str]:
    """One sentence for each broken invariant of `manager`, none if all is sound."""
    return [
        *_tables(manager),
        *_ref_counts(manager),
        *_states(manager),
        *_owed_copies(manager),
        *_nodes(manager),
        *_chains(manager),
        *_eviction_order(manager),
        *_counters(manager),
    ]


def _tables(manager: ManagerState) -> list[str]:
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
        if sequence.computed > sequence.length:
            faults.append(f"sequence {sequence_id} has {sequence.computed} computed of {sequence.length} tokens")
    return faults


def _ref_counts(manager: ManagerState) -> list[str]:
    """Ref count = table entries that name the block + pins + a caller's hold. More found: one owner too many."""
    found = Counter(block for sequence in manager._sequences.values() for block in sequence.table)
    found.update(block for blocks in manager._pins.values() for block in blocks)
    found.update(manager._held_by_caller)
    return [
        f"block {block} has {found[block]} owners but ref count {count}"
        + (": double owner" if found[block] > count else "")
        for block, count in enumerate(manager._pool.ref_counts)
        if found[block] != count
    ]


def _states(manager: ManagerState) -> list[str]:
    """Every block is live, fenced, cached or free: one of the four, once."""
    faults = []
    pool = manager._pool
    free, cached = Counter(pool.free), Counter(pool.cached)
    for block, count in enumerate(pool.ref_counts):
        if free[block] > 1:
            faults.append(f"block {block} is {free[block]} times in the free list: double free")
        if cached[block] > 1:
            faults.append(f"block {block} is {cached[block]} times in the eviction order")
        places = ["live"] * (count > 0) + ["fenced"] * (block in pool.fenced)
        places += ["in the eviction order"] * (cached[block] > 0) + ["in the free list"] * (free[block] > 0)
        if len(places) > 1:
            faults.append(f"block {block} is both {' and '.join(places)}")
        if not places:
            faults.append(f"block {block} is lost: not live, not fenced, not cached, not in the free list")
    return faults


def _owed_copies(manager: ManagerState) -> list[str]:
    """A destination is its writer's alone, nobody's source and unknown to the index. Who is fenced has a reason."""
    faults = []
    pool = manager._pool
    sources = set(pool.owed.values())
    for destination, source in pool.owed.items():
        copy = f"owed copy {source} -> {destination}"
        if pool.ref_counts[destination] != 1:
            faults.append(f"{copy}: destination has ref count {pool.ref_counts[destination]}, wanted 1")
        if destination in sources:
            faults.append(f"{copy}: destination is a source too")
        if destination in manager._index:
            faults.append(f"{copy}: destination is indexed")
        if source in pool.free:
            faults.append(f"{copy}: source is in the free list")
        if source in pool.cached:
            faults.append(f"{copy}: source is in the eviction order")
    faults += [
        f"block {block} is fenced but no owed copy reads it" + (f" and epoch {epoch} is retired" if pool.fences else "")
        for block, epoch in pool.fenced.items()
        if block not in sources and epoch <= pool.retired
    ]
    return faults


def _nodes(manager: ManagerState) -> list[str]:
    """Keys and blocks name the same nodes, whose parents are nodes too, and who count their children."""
    faults = []
    by_key, by_block = manager._index._by_key, manager._index._by_block
    for block, node in by_block.items():
        if node.block != block or by_key.get(node.key) is not node:
            faults.append(f"node {node.node_id} of block {block} is not found by its content")
        if node.parent is not None and by_block.get(node.parent.block) is not node.parent:
            faults.append(f"block {block} is indexed but node {node.parent.node_id} before it is not")
        if manager._pool.state(block) == "free" or block in manager._pool.free:
            faults.append(f"block {block} is indexed but free")
    if len(by_key) != len(by_block):
        faults.append(f"index finds {len(by_key)} nodes by content, {len(by_block)} by block")
    children = Counter(node.parent.node_id for node in by_block.values() if node.parent is not None)
    faults += [
        f"block {node.block} counts {node.num_children} continuations, the index has {children[node.node_id]}"
        for node in by_block.values()
        if node.num_children != children[node.node_id]
    ]
    return faults


def _chains(manager: ManagerState) -> list[str]:
    """The first `num_indexed` blocks of a sequence are full, committed, and the nodes of its own tokens."""
    faults = []
    for sequence_id, sequence in manager._sequences.items():
        if sequence.num_indexed * manager.block_size > sequence.computed:
            faults.append(f"sequence {sequence_id} has indexed blocks past its {sequence.computed} computed tokens")
        parent: Node | None = None
        for index, block in enumerate(sequence.table[: sequence.num_indexed]):
            node = manager._index._by_block.get(block)
            if node is None or not _is_named_by(sequence, index * manager.block_size, manager.block_size, parent, node):
                faults.append(f"block {block} of sequence {sequence_id} is not indexed under its tokens")
                break
            parent = node
    return faults


def _is_named_by(sequence: Sequence, start: int, size: int, parent: Node | None, node: Node) -> bool:
    """Whether the node has this parent, these tokens and these items (which a truncation may have cut since)."""
    before, tokens, indexed = node.key
    items = items_of_block(sequence.items, start, start + size)
    same_items = [(first, key) for first, _, key in items] == [(first, key) for first, _, key in indexed]
    only_cut = all(now[1] <= then[1] for now, then in zip(items, indexed, strict=False))
    same_tokens = tokens == tuple(sequence.token_ids[start : start + size])
    return same_tokens and same_items and only_cut and before == (parent.node_id if parent else sequence.namespace)


def _eviction_order(manager: ManagerState) -> list[str]:
    """It holds the cached blocks and no others, and no block before one that continues it."""
    faults = []
    pool = manager._pool
    for block in pool.cached:
        if block not in manager._index:
            faults.append(f"block {block} is in the eviction order but not indexed")
    rank = {block: place for place, block in enumerate(pool.cached)}
    for block, node in manager._index._by_block.items():
        before = node.parent
        if before is None or before.block not in rank:
            continue
        if pool.ref_counts[block] > 0:
            faults.append(f"block {before.block} may be evicted, but block {block} that continues it is live")
        elif rank.get(block, len(rank)) > rank[before.block]:
            faults.append(f"block {before.block} would be evicted before block {block} that continues it")
    return faults


def _counters(manager: ManagerState) -> list[str]:
    pool = manager._pool
    live = sum(count > 0 for count in pool.ref_counts)
    faults = []
    if pool.num_live != live:
        faults.append(f"counter of live blocks is {pool.num_live}, recount gives {live}")
    if pool.peak_live < live:
        faults.append(f"peak of live blocks is {pool.peak_live}, but {live} are live")
    if pool.num_copies < len(pool.owed):
        faults.append(f"counter of copies is {pool.num_copies}, but {len(pool.owed)} are owed")
    if manager._num_hit_tokens > manager._num_queried_tokens:
        faults.append(f"{manager._num_hit_tokens} tokens were hit, but {manager._num_queried_tokens} queried")
    return faults
