"""Faults known from other projects, by id (tests/cases.md): pool, copy-on-write, slots."""

import random
from array import array

import pytest

from kvpager.errors import (
    ArgumentError,
    OutOfBlocksError,
    StateError,
    UnknownSequenceError,
)


def ref_counts(manager):
    """Table entries that name each block; a caller's own blocks aren't counted."""
    counts = [0] * manager.num_blocks
    for state in manager.sequences.values():
        for block in state.block_table:
            counts[block] += 1
    return counts


# Pool


def test_b001_second_free_is_an_error_and_changes_nothing(make, observe):
    manager = make(4, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 4)
    manager.release_sequence(1)
    before = observe(manager)
    with pytest.raises(UnknownSequenceError):
        manager.release_sequence(1)
    assert observe(manager) == before
    block = manager.allocate_block()
    manager.free_block(block)
    before = observe(manager)
    with pytest.raises(StateError):
        manager.free_block(block)
    assert observe(manager) == before
    assert manager.num_free_blocks == 4
    for sequence_id in range(4):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, 4)
    assert len({manager.sequences[i].block_table for i in range(4)}) == 4
    with pytest.raises(OutOfBlocksError):
        manager.allocate_block()


@pytest.mark.parametrize(
    ("freed", "error"),
    [
        (0, StateError),
        (1, StateError),
        (3, StateError),
        (-1, ArgumentError),
        (4, ArgumentError),
        (2**63, ArgumentError),
    ],
)
def test_b002_bad_free_is_refused(make, observe, freed, error):
    """Blocks of a sequence, a block that is free already, and ids outside of the pool; there is no null block."""
    manager = make(4, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 5)
    before = observe(manager)
    with pytest.raises(error):
        manager.free_block(freed)
    assert observe(manager) == before
    assert ref_counts(manager) == [1, 1, 0, 0]
    assert manager.num_free_blocks == 2
    manager.release_sequence(1)
    assert manager.num_free_blocks == 4


def test_b002_only_blocks_of_the_pool_are_handed_out(make, observe):
    rng = random.Random(2)
    manager, held = make(4, 4), []
    for _ in range(1000):
        if held and (len(held) == 4 or rng.random() < 0.5):
            manager.free_block(held.pop(rng.randrange(len(held))))
        else:
            block = manager.allocate_block()
            assert 0 <= block < 4
            assert block not in held
            held.append(block)
    observe(manager)


@pytest.mark.parametrize("length", range(13))
def test_b003_live_and_free_sum_to_the_pool(make, observe, length):
    """Without an index nothing is cached: a finished request leaves no live block behind."""
    manager = make(64, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, length)
    stats = observe(manager)["stats"]
    assert (stats["live"], stats["cached"], stats["fenced"]) == (-(-length // 4), 0, 0)
    manager.release_sequence(0)
    stats = observe(manager)["stats"]
    assert (stats["live"], stats["cached"], stats["fenced"], stats["free"]) == (0, 0, 0, 64)


@pytest.mark.parametrize("finish_at_boundary", [False, True])
def test_b004_a_look_ahead_slot_is_released_once(make, observe, finish_at_boundary):
    manager = make(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 7)
    last = 12 if finish_at_boundary else 11
    while (length := manager.sequence_length(1)) < last:
        manager.append_token(1)  # the look-ahead slot
        manager.truncate_sequence(1, length)
        manager.append_token(1)  # the accepted token
    manager.append_token(1)  # finished with a look-ahead slot still taken
    manager.release_sequence(1)
    assert manager.num_free_blocks == 8
    assert sorted(manager.free_blocks) == list(range(8))
    observe(manager)


@pytest.mark.parametrize(
    ("length", "num_blocks", "last_fill"),
    [(0, 0, 0), (1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (12, 3, 4)],
)
def test_b005_counts_on_exact_multiples(make, observe, length, num_blocks, last_fill):
    manager = make(4, 4)
    manager.create_sequence(1)
    slots = manager.append_tokens(1, length)
    table = manager.sequences[1].block_table
    assert len(table) == num_blocks
    assert all(ref_counts(manager)[block] == 1 for block in table)
    if table:
        assert sum(slot // 4 == table[-1] for slot in slots) == last_fill
    assert manager.internal_fragmentation_tokens(1) == num_blocks * 4 - length
    manager.release_sequence(1)
    assert ref_counts(manager) == [0, 0, 0, 0]
    assert manager.num_free_blocks == 4
    observe(manager)


# Copy-on-write


def test_b031_shared_tail_is_copied(make, observe):
    """Run with a toy cache, one number a slot: the two writers use different numbers."""
    manager, cache = make(8, 4), [None] * 32

    def write(sequence_id, *numbers):
        for number in numbers:
            slot = manager.append_token(sequence_id)
            for source, destination in manager.take_copies():
                cache[destination * 4 : destination * 4 + 4] = cache[source * 4 : source * 4 + 4]
            cache[slot] = number

    def read(sequence_id):
        return [cache[slot] for slot in manager.slots(sequence_id, 0, manager.sequence_length(sequence_id))]

    manager.create_sequence(1)
    write(1, 1, 2, 3, 4, 5, 6)
    manager.fork_sequence(1, 2)
    write(1, 7)
    write(2, 17)
    tables = manager.sequences[1].block_table, manager.sequences[2].block_table
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    assert [ref_counts(manager)[block] for block in (tables[0][0], tables[0][1], tables[1][1])] == [2, 1, 1]
    assert manager.stats.num_copies == 1
    assert manager.stats.live == 3
    assert read(1) == [1, 2, 3, 4, 5, 6, 7]
    assert read(2) == [1, 2, 3, 4, 5, 6, 17]
    observe(manager)


@pytest.mark.parametrize(("length", "num_copies", "num_used"), [(8, 0, 4), (9, 1, 4), (1, 1, 2)])
def test_b032_fork_at_an_exact_boundary(make, observe, length, num_copies, num_used):
    manager = make(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, length)
    manager.fork_sequence(1, 2)
    manager.append_token(1)
    manager.append_token(2)
    first, second = manager.sequences[1].block_table, manager.sequences[2].block_table
    full = length // 4
    assert first[:full] == second[:full]
    assert first[full] != second[full]
    assert [ref_counts(manager)[block] for block in first[:full]] == [2] * full
    assert len(manager.take_copies()) == num_copies
    assert manager.stats.live == num_used
    observe(manager)


def test_b034_truncate_into_a_shared_block_does_not_write_it(make, observe):
    """The prefix index is not there yet, so a fork is the other holder of the full block."""
    manager = make(8, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 8)
    manager.fork_sequence(1, 2)
    shared = manager.sequences[2].block_table
    manager.truncate_sequence(1, 6)
    assert manager.take_copies() == []
    slots = manager.append_tokens(1, 2)
    (copy,) = manager.take_copies()
    assert copy[0] == shared[1]
    assert manager.sequences[1].block_table == (shared[0], copy[1])
    assert slots == [copy[1] * 4 + 2, copy[1] * 4 + 3]
    assert manager.sequences[2].block_table == shared
    assert manager.sequence_length(1) == 8
    observe(manager)


def test_b035_copy_on_write_with_no_free_block(make, observe):
    manager = make(2, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 6)
    manager.fork_sequence(1, 2)
    before = observe(manager)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.append_token(2)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (1, 0, 2)
    assert observe(manager) == before
    assert manager.sequence_length(2) == 6
    assert ref_counts(manager) == [2, 2]
    assert manager.take_copies() == []
    manager.release_sequence(2)
    assert ref_counts(manager) == [1, 1]
    assert manager.append_token(1) == 6
    assert manager.take_copies() == []


# Slots


def test_b060_a_reused_row_keeps_nothing_of_the_longer_one(make, arrange):
    manager = make(9, 4)
    arrange(manager, [5, 6, 7, 8, 2])
    manager.create_sequence(1)
    manager.append_tokens(1, 16)
    rows = array("i", [0] * 4)
    assert manager.get_block_table_tensor([1], out=rows) is rows
    assert rows.tolist() == [5, 6, 7, 8]
    manager.create_sequence(2)
    manager.append_tokens(2, 3)
    manager.release_sequence(1)
    manager.get_block_table_tensor([2], out=rows)
    assert rows.tolist() == [2, -1, -1, -1]
