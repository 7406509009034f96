"""Random operations on the Rust manager and on the reference: every answer, error and visible state is the same.

Both are audited after every operation, also after those that fail, and a toy cache follows what an engine would write
(`shadow.py`). A plain seeded generator drives the bulk; hypothesis adds thousands that it can shrink. A failure prints
the operations that led to it; `replay(world, operations)` runs them again.
"""

import random
from collections import Counter

import pytest
from driver import SALTS, World, answer, is_error, random_operation, random_world, visible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shadow import Shadow

import kvpager.manager
import kvpager.reference
import kvpager.reference.pool

RUNS, OPERATIONS = 20, 300  # of each of the 18 worlds


class Pair:
    """Both managers of one world, kept in step, and the operations so far."""

    def __init__(self, world, *, follow=True, equal_hashes=False):
        self.world = world
        self.reference = world.make(kvpager.reference.KVBlockManager)
        self.rust = world.make(kvpager.manager.KVBlockManager, _equal_hashes=equal_hashes)
        self.shadow = Shadow(self.reference) if follow else None
        self.operations = []
        self.seen = visible(self.reference)

    def run(self, operation):
        """Run one operation on both; fail where they part, or where an error changed something."""
        self.operations.append(operation)
        before = self.seen
        wanted, got = answer(self.reference, operation), answer(self.rust, operation)
        self.seen, found = visible(self.reference), visible(self.rust)
        failed = is_error(wanted)
        if got != wanted or found != self.seen or self.seen["audit"] or (failed and self.seen != before):
            self.fail(
                f"answers: rust {got}\n      reference {wanted}\n  after:   rust {found}\n      reference {self.seen}"
            )
        if self.shadow and not failed:
            self.shadow.follow(operation, wanted)
            if self.shadow.faults:
                self.fail("\n  ".join(self.shadow.faults))
        return wanted

    def fail(self, what):
        pytest.fail(f"{self.operations[-1]}\n  {what}\nreplay({self.world}, {self.operations})", pytrace=False)


def replay(world, operations):
    """Run `operations` in a `world` on both."""
    pair = Pair(world, follow=False)
    for operation in operations:
        pair.run(operation)


@pytest.mark.parametrize("num_blocks", range(1, 7))
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_random_operations(num_blocks, block_size):
    """108,000 operations in all; options of the managers by chance, every hash equal in one run of five."""
    for seed in range(RUNS):
        rng = random.Random(f"{num_blocks} {block_size} {seed}")
        pair = Pair(random_world(rng, num_blocks, block_size), equal_hashes=seed % 5 == 0)
        for _ in range(OPERATIONS):
            pair.run(random_operation(rng, pair.reference, pair.shadow))


@pytest.mark.parametrize("num_blocks", [30, 100])
def test_random_operations_in_larger_worlds(num_blocks):
    """Longer chains and many nodes, so that the index moves its entries about; more of them found than evicted."""
    for seed in range(4):
        rng = random.Random(f"{num_blocks} {seed}")
        pair = Pair(random_world(rng, num_blocks, rng.choice((1, 2, 3))), equal_hashes=seed == 3)
        for _ in range(OPERATIONS):
            pair.run(random_operation(rng, pair.reference, pair.shadow))


def test_the_corners_are_met():
    """What the random operations are there for does happen, in a sample of them."""
    met = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        world = random_world(rng, rng.randint(2, 6), rng.choice((1, 2, 4)))
        manager = world.make(kvpager.reference.KVBlockManager)
        shadow = Shadow(manager)
        for _ in range(OPERATIONS):
            operation = random_operation(rng, manager, shadow)
            result = answer(manager, operation)
            met[operation[0], result[0].__name__ if is_error(result) else "done"] += 1
            if not is_error(result):
                shadow.follow(operation, result)
        met.update({f"stats {name}": bool(getattr(manager.stats, name)) for name in ("pinned", "fenced", "indexed")})
        for name in ("num_copies", "num_hit_tokens", "num_resumed_tokens", "num_evictions"):
            met[name] += getattr(manager.stats, name)
    wanted = {
        ("admit", "OutOfBlocksError"),
        ("admit", "SequenceTooLongError"),
        ("append_token", "OutOfBlocksError"),
        ("commit", "StateError"),
        ("fork_sequence", "StateError"),
        ("pin_prefix", "done"),
        ("reset_prefix_cache", "done"),
        ("retire", "done"),
        ("slot_mapping", "OutOfBlocksError"),
        ("slot_mapping", "SequenceTooLongError"),
        ("unpin", "done"),
        "num_copies",
        "num_evictions",
        "num_hit_tokens",
        "num_resumed_tokens",
        "stats fenced",
        "stats indexed",
        "stats pinned",
    }
    assert {name for name in wanted if not met[name]} == set()


def operations_of(world):
    """Lists of operations that hypothesis can shrink."""
    size = world.block_size
    ids = st.integers(0, 3)
    positions = st.integers(-1, 3 * size)
    tokens = st.lists(st.integers(0, 1), max_size=2 * size + 1)
    counts = st.one_of(st.integers(-1, 2 * size), st.sampled_from([10**6, 2**63 - 1, 2**63]))
    batch = st.lists(st.tuples(ids, st.integers(0, 2 * size)), max_size=4)
    options = st.fixed_dictionaries(
        {}, optional={"salt": st.sampled_from(SALTS), "items": st.sampled_from([(), [(0, 1, "x")]])}
    )
    admissions = st.tuples(st.just("admit"), ids, tokens, options)
    calls = [
        admissions,
        admissions,
        st.tuples(st.just("append_token"), ids, st.integers(0, 1)),
        st.tuples(st.just("append_tokens"), ids, counts | tokens),
        st.tuples(st.just("commit"), ids, positions),
        st.tuples(st.just("commit"), ids, positions, tokens),
        batch.map(lambda rows: ("commit_batch", [row[0] for row in rows], [row[1] for row in rows])),
        batch.map(lambda rows: ("slot_mapping", [row[0] for row in rows], [row[1] for row in rows], None)),
        st.tuples(st.just("create_sequence"), ids),
        st.tuples(st.just("fork_sequence"), ids, ids, st.none() | positions),
        st.tuples(st.just("truncate_sequence"), ids, positions),
        st.tuples(st.just("release_sequence"), ids),
        st.tuples(st.sampled_from(["take_copies", "allocate_block", "advance_epoch", "reset_prefix_cache"])),
        st.tuples(st.just("retire"), st.integers(0, 2)),
        st.tuples(st.just("free_block"), st.integers(-1, world.num_blocks)),
        st.tuples(st.just("pin_prefix"), tokens, options),
        st.tuples(st.just("unpin"), st.integers(0, 2)),
        st.tuples(st.just("match_prefix"), tokens, options),
        st.tuples(st.just("block_info"), st.integers(0, world.num_blocks - 1)),
    ]
    return st.tuples(st.just(world), st.lists(st.one_of(calls), max_size=40))


worlds = st.builds(
    World,
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.fixed_dictionaries(
        {
            "enable_prefix_caching": st.just(True),
            "fences": st.booleans(),
            "eviction_policy": st.sampled_from(kvpager.manager.KVBlockManager.eviction_policies),
        }
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(worlds.flatmap(operations_of))
def test_shrinkable_operations(world_and_operations):
    replay(*world_and_operations)


def test_a_difference_is_found_and_printed(monkeypatch):
    """The harness itself: a reference that never frees a block does not pass."""
    monkeypatch.setattr(kvpager.reference.pool.BlockPool, "settle", lambda pool: None)
    with pytest.raises(pytest.fail.Exception, match="replay"):
        test_random_operations(3, 2)
