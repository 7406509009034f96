"""A planted corruption of each kind makes the audit fail, and the audit names it. (The Rust core plants its own.)"""

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


def test_a_sound_manager_has_no_faults(make):
    manager = make(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 9)
    assert manager.check_invariants() == []
    assert manager.invariants_ok() is True
