"""Random operations on the Rust manager and on the reference: every answer, error and visible state is the same.

Both are audited after every operation, also after those that fail. The worlds are small, so that boundaries, shared
tails and empty pools are met all the time. A plain seeded generator drives the bulk; hypothesis adds thousands that it
can shrink. A failure prints the operations that led to it; `replay(world, operations)` runs them again.
"""

import random
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpager.block_manager
import kvpager.reference.pool
from kvpager.errors import KVPagerError

STATS = ("num_blocks", "live", "cached", "fenced", "free", "num_sequences", "num_copies", "peak_live")


def slot_mapping(manager, ids, counts):
    out = array("q", [-7] * (len(ids) if counts is None else min(99, max(0, sum(counts)))))
    try:
        manager.slot_mapping_for_append(ids, counts, out=out)
    except KVPagerError:
        assert set(out) <= {-7}
        raise
    return out.tolist()


def block_tables(manager, ids, max_blocks):
    out = array("i", [-7] * (len(ids) * max_blocks))
    try:
        manager.get_block_table_tensor(ids, out=out)
    except KVPagerError:
        assert set(out) <= {-7}
        raise
    return out.tolist()


def seq_lens(manager, ids):
    out = array("i", [-7] * len(ids))
    try:
        manager.get_seq_lens_tensor(array("q", ids), out=out)
    except KVPagerError:
        assert set(out) <= {-7}
        raise
    return out.tolist()


# Name -> how to call it, and what kinds of arguments it takes.
CALLS = {
    "create_sequence": lambda m, *a: m.create_sequence(*a),
    "append_token": lambda m, *a: m.append_token(*a),
    "append_tokens": lambda m, *a: m.append_tokens(*a),
    "slot_mapping": slot_mapping,
    "commit": lambda m, *a: m.commit(*a),
    "release_sequence": lambda m, *a: m.release_sequence(*a),
    "truncate_sequence": lambda m, *a: m.truncate_sequence(*a),
    "fork_sequence": lambda m, *a: m.fork_sequence(*a),
    "take_copies": lambda m: m.take_copies(),
    "locate": lambda m, *a: m.locate(*a),
    "slots": lambda m, *a: m.slots(*a),
    "allocate_block": lambda m: m.allocate_block(),
    "free_block": lambda m, *a: m.free_block(*a),
    "block_tables": block_tables,
    "seq_lens": seq_lens,
    "fragmentation": lambda m, *a: m.internal_fragmentation_tokens(*a),
}
SCHEMAS = {
    "create_sequence": ("new id",),
    "append_token": ("id",),
    "append_tokens": ("id", "count"),
    "slot_mapping": ("ids", "counts"),
    "commit": ("id", "position"),
    "release_sequence": ("id",),
    "truncate_sequence": ("id", "position"),
    "fork_sequence": ("id", "new id", "position or None"),
    "take_copies": (),
    "locate": ("id", "position"),
    "slots": ("id", "position", "position"),
    "allocate_block": (),
    "free_block": ("block",),
    "block_tables": ("ids", "width"),
    "seq_lens": ("ids",),
    "fragmentation": ("id",),
}
WEIGHTS = {
    "append_token": 10,
    "append_tokens": 5,
    "slot_mapping": 10,
    "create_sequence": 4,
    "fork_sequence": 8,
    "truncate_sequence": 4,
    "release_sequence": 3,
    "take_copies": 1,
    "free_block": 2,
}


def answer(manager, operation):
    """What the call returns, or class, text and values of the error it raises."""
    name, *arguments = operation
    try:
        return CALLS[name](manager, *arguments)
    except KVPagerError as error:
        return type(error), str(error), vars(error)


def visible(manager):
    stats = manager.stats
    return {
        "free_blocks": manager.free_blocks,
        "num_free_blocks": manager.num_free_blocks,
        "stats": [getattr(stats, name) for name in STATS],
        "usage": manager.usage,
        "sequences": [(s.sequence_id, s.sequence_length, s.block_table) for s in manager.sequences.values()],
        "fragmentation": manager.internal_fragmentation_tokens(),
        "audit": manager.check_invariants(),
    }


class Pair:
    """Both managers of one world (blocks, block size), kept in step, and the operations so far."""

    def __init__(self, world):
        self.world = world
        self.rust = kvpager.block_manager.KVBlockManager(*world)
        self.reference = kvpager.reference.KVBlockManager(*world)
        self.operations = []
        self.seen = visible(self.reference)

    def run(self, operation):
        """Run one operation on both; fail where they part, or where an error changed something."""
        self.operations.append(operation)
        before = self.seen
        got, wanted = answer(self.rust, operation), answer(self.reference, operation)
        found, self.seen = visible(self.rust), visible(self.reference)
        failed = isinstance(wanted, tuple) and isinstance(wanted[0], type)
        if got != wanted or found != self.seen or self.seen["audit"] or (failed and self.seen != before):
            pytest.fail(
                f"{operation}\n  answers: rust {got}\n      reference {wanted}\n"
                f"  after:   rust {found}\n      reference {self.seen}\n"
                f"replay({self.world}, {self.operations})",
                pytrace=False,
            )


def replay(world, operations):
    """Run `operations` in a pool of (blocks, block size) = `world` on both."""
    pair = Pair(world)
    for operation in operations:
        pair.run(operation)


def random_operation(rng, reference):
    """An operation that mostly makes sense in the present state."""
    num_blocks, block_size = reference.num_blocks, reference.block_size
    alive = reference.sequence_ids()

    def an_id():
        return rng.choice(alive) if alive and rng.random() < 0.93 else rng.randrange(5)

    def a_count():
        count = rng.choice((0, 1, 1, 1, 2, 3, block_size, block_size + 1))
        return count if rng.random() < 0.98 else rng.choice((-1, 10**6, 2**63 - 1, 2**63))

    def a_position(sequence_id):
        length = reference.sequence_length(sequence_id) if sequence_id in alive else 3
        return rng.randint(0, length) if rng.random() < 0.9 else rng.choice((-1, length + 1, 2**64))

    name = rng.choices(list(SCHEMAS), [WEIGHTS.get(name, 1) for name in SCHEMAS])[0]
    if reference.num_free_blocks == 0 and rng.random() < 0.3:
        name = rng.choice(("release_sequence", "truncate_sequence", "truncate_sequence", "free_block"))
    sequence_id = an_id()
    ids = [an_id() for _ in range(rng.randrange(4))]
    held = sorted(reference._held_by_caller)
    values = {
        "id": sequence_id,
        "new id": rng.choice([new for new in range(5) if new not in alive] or [0]),
        "ids": ids,
        "count": a_count(),
        "counts": [a_count() for _ in ids] + [1] * (rng.random() < 0.01) if rng.random() < 0.7 else None,
        "position": a_position(sequence_id),
        "position or None": rng.choice((None, a_position(sequence_id))),
        "block": rng.choice(held) if held and rng.random() < 0.9 else rng.randrange(-1, num_blocks + 1),
        "width": rng.randrange(6),
    }
    if name == "slots":
        return (name, sequence_id, *sorted((a_position(sequence_id), a_position(sequence_id))))
    if rng.random() < 0.05:
        values["new id"] = rng.randrange(5)
    return (name, *(values[kind] for kind in SCHEMAS[name]))


@pytest.mark.parametrize("num_blocks", range(1, 7))
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_random_operations(num_blocks, block_size):
    """18 worlds of 6,000 operations, in runs of 200: 108,000 in all."""
    for seed in range(30):
        rng = random.Random(f"{num_blocks} {block_size} {seed}")
        pair = Pair((num_blocks, block_size))
        for _ in range(200):
            pair.run(random_operation(rng, pair.reference))


def operations_of(world):
    """Lists of operations that hypothesis can shrink."""
    num_blocks, block_size = world
    positions = st.integers(-1, 3 * block_size)
    counts = st.one_of(st.integers(-1, 2 * block_size), st.sampled_from([10**6, 2**63 - 1, 2**63]))
    ids = st.integers(0, 4)
    batch = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2 * block_size)), max_size=4)
    kinds = {
        "id": ids,
        "new id": ids,
        "ids": st.lists(st.integers(0, 3), max_size=3),
        "count": counts,
        "position": positions,
        "position or None": st.none() | positions,
        "block": st.integers(-1, num_blocks),
        "width": st.integers(0, 5),
    }
    batches = batch.map(lambda rows: ("slot_mapping", [row[0] for row in rows], [row[1] for row in rows]))
    others = [
        st.tuples(st.just(name), *(kinds[kind] for kind in schema))
        for name, schema in SCHEMAS.items()
        if name != "slot_mapping"
    ]
    return st.tuples(st.just(world), st.lists(st.one_of(batches, *others), max_size=40))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4])).flatmap(operations_of))
def test_shrinkable_operations(world_and_operations):
    replay(*world_and_operations)


def test_a_difference_is_found_and_printed(monkeypatch):
    """The harness itself: a reference that never frees a block does not pass."""
    monkeypatch.setattr(kvpager.reference.pool.BlockPool, "settle", lambda pool: None)
    with pytest.raises(pytest.fail.Exception, match="replay"):
        test_random_operations(3, 2)
