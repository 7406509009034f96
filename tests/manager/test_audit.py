"""A planted corruption of each kind makes the audit fail, and the audit names it. (The Rust core plants its own.)"""

from array import array

import pytest

from kvpager.reference import KVBlockManager


@pytest.fixture
def manager():
    """Blocks 0, 1 belong to sequence 1, block 2 is its fork's copy of 1, block 3 is a caller's, 4..7 are free."""
    manager = KVBlockManager(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 6)
    manager.fork_sequence(1, 2)
    manager.append_token(2)
    assert manager.allocate_block() == 3
    assert manager.invariants_ok()
    return manager


def double_owner(manager):
    manager.create_sequence(3)
    manager.append_token(3)
    manager._sequences[3].table[0] = 2


def live_and_free(manager):
    manager._pool.free.append(0)


def lost(manager):
    manager._pool.free.remove(5)


def double_free(manager):
    manager._pool.free.append(4)


def wrong_ref_count(manager):
    manager._pool.ref_counts[3] = 2


def forgotten_hold(manager):
    manager._held_by_caller.remove(3)


def table_too_short(manager):
    manager._sequences[1].length = 9


def outside_of_the_pool(manager):
    manager._sequences[1].table[1] = 8


def copy_into_a_shared_block(manager):
    manager._pool.ref_counts[2] = 2


def copy_into_a_source(manager):
    manager._pool.owed[0] = 2


def free_source(manager):
    manager._pool.owed[2] = 6


def fenced_for_nothing(manager):
    manager._pool.free.remove(7)
    manager._pool.fenced[7] = -1


def fenced_and_free(manager):
    manager._pool.fenced[6] = -1


def live_and_fenced(manager):
    manager._pool.fenced[3] = -1


def wrong_live_counter(manager):
    manager._pool.num_live -= 1


def wrong_peak(manager):
    manager._pool.peak_live = 1


def wrong_copy_counter(manager):
    manager._pool.num_copies = 0


CORRUPTIONS = {
    double_owner: "block 2 has 2 owners but ref count 1: double owner",
    live_and_free: "block 0 is both live and in the free list",
    lost: "block 5 is lost",
    double_free: "block 4 is 2 times in the free list: double free",
    wrong_ref_count: "block 3 has 1 owners but ref count 2",
    forgotten_hold: "block 3 has 0 owners but ref count 1",
    table_too_short: "table of sequence 1 has 2 entries, its length 9 needs 3",
    outside_of_the_pool: "table of sequence 1 names block 8, outside of the pool",
    copy_into_a_shared_block: "owed copy 1 -> 2: destination has ref count 2, wanted 1",
    copy_into_a_source: "owed copy 1 -> 2: destination is a source too",
    free_source: "owed copy 6 -> 2: source is in the free list",
    fenced_for_nothing: "block 7 is fenced but no owed copy reads it",
    fenced_and_free: "block 6 is both fenced and in the free list",
    live_and_fenced: "block 3 is both live and fenced",
    wrong_live_counter: "counter of live blocks is 3, recount gives 4",
    wrong_peak: "peak of live blocks is 1, but 4 are live",
    wrong_copy_counter: "counter of copies is 0, but 1 are owed",
}


@pytest.mark.parametrize(("corrupt", "named"), CORRUPTIONS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_planted_corruption_is_named(manager, corrupt, named):
    corrupt(manager)
    assert not manager.invariants_ok()
    assert any(fault.startswith(named) for fault in manager.check_invariants()), manager.check_invariants()


@pytest.fixture
def caching():
    """Sequence 1 over the indexed blocks 0, 1 and the tail 2; sequence 2 forked off at block 0, its copy 3 not taken;
    blocks 4, 5 cached, 6 fenced by epoch 0, 7 pinned, 8 and 9 free."""
    manager = KVBlockManager(10, 2, enable_prefix_caching=True, fences=True)
    manager.admit(1, [1, 2, 3, 4, 5], out=array("q", [0] * 5))
    manager.commit(1, 5)
    manager.fork_sequence(1, 2, 2)
    manager.truncate_sequence(2, 1)
    manager.append_token(2, 9)
    for sequence_id, prompt in ((3, [11, 12, 13, 14]), (4, [21, 22]), (5, [31, 32])):
        manager.admit(sequence_id, prompt, out=array("q", [0] * 4))
        manager.commit(sequence_id, len(prompt))
    manager.pin_prefix([31, 32])
    manager.release_sequence(3)
    manager.release_sequence(5)
    manager.retire(manager.advance_epoch())
    manager.release_sequence(4)
    states = ["live"] * 4 + ["cached"] * 2 + ["fenced", "live", "free", "free"]
    assert manager.block_states() == states
    assert manager.invariants_ok()
    return manager


def node(manager, block):
    return manager._index._by_block[block]


def index_free_block(manager):
    manager._index.insert(("x", None), (1, 2), (), 8)


def index_destination(manager):
    manager._index.insert(("x", None), (1, 2), (), 3)


def cut_off(manager):
    manager._index.drop(0)


def renamed(manager):
    node(manager, 1).key = (0, (3, 9), ())


def wrong_children(manager):
    node(manager, 0).num_children = 2


def other_tokens(manager):
    manager._sequences[1].token_ids[3] = 9


def indexed_past_computed(manager):
    manager._sequences[1].computed = 3


def computed_past_length(manager):
    manager._sequences[1].computed = 6


def cached_and_free(manager):
    manager._pool.free.append(4)


def cached_and_fenced(manager):
    manager._pool.fenced[5] = 1


def cached_not_indexed(manager):
    manager._pool.cached.add(9)
    manager._pool.free.remove(9)


def parent_first(manager):
    manager._pool.cached.remove(5)
    manager._pool.cached.add(5)


def live_child(manager):
    manager._pool.cached.remove(5)
    manager._pool.ref_counts[5] = 1


def retired_but_fenced(manager):
    manager._pool.fenced[6] = 0


def forgotten_pin(manager):
    manager._pins.clear()


def too_many_hits(manager):
    manager._num_hit_tokens = 99


INDEX_CORRUPTIONS = {
    index_free_block: "block 8 is indexed but free",
    index_destination: "owed copy 0 -> 3: destination is indexed",
    cut_off: "block 1 is indexed but node 0 before it is not",
    renamed: "node 1 of block 1 is not found by its content",
    wrong_children: "block 0 counts 2 continuations, the index has 1",
    other_tokens: "block 1 of sequence 1 is not indexed under its tokens",
    indexed_past_computed: "sequence 1 has indexed blocks past its 3 computed tokens",
    computed_past_length: "sequence 1 has 6 computed of 5 tokens",
    cached_and_free: "block 4 is both in the eviction order and in the free list",
    cached_and_fenced: "block 5 is both fenced and in the eviction order",
    cached_not_indexed: "block 9 is in the eviction order but not indexed",
    parent_first: "block 4 would be evicted before block 5 that continues it",
    live_child: "block 4 may be evicted, but block 5 that continues it is live",
    retired_but_fenced: "block 6 is fenced but no owed copy reads it and epoch 0 is retired",
    forgotten_pin: "block 7 has 0 owners but ref count 1",
    too_many_hits: "99 tokens were hit, but 13 queried",
}


@pytest.mark.parametrize(
    ("corrupt", "named"), INDEX_CORRUPTIONS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_corruption_of_the_index_is_named(caching, corrupt, named):
    corrupt(caching)
    assert any(fault.startswith(named) for fault in caching.check_invariants()), caching.check_invariants()


def test_a_sound_manager_has_no_faults(make):
    manager = make(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 9)
    assert manager.check_invariants() == []
    assert manager.invariants_ok() is True
