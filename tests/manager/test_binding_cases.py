"""Faults known from other projects, by id (tests/cases.md): bindings and concurrency."""

import random
import threading
from array import array

import numpy as np
import pytest

from kvpager.errors import (
    ArgumentError,
    ConfigError,
    DuplicateSequenceError,
    KVPagerError,
    OutOfBlocksError,
    SlotError,
    StateError,
    UnknownSequenceError,
)
from kvpager.manager import KVBlockManager


def act(manager, rng, own, alive):
    """One random step of a thread that touches only its own sequences, some of them alive."""
    sequence_id, choice = rng.choice(own), rng.random()
    if sequence_id not in alive and alive and choice < 0.5:
        manager.fork_sequence(alive[0], sequence_id)
        alive.append(sequence_id)
    elif sequence_id not in alive:
        manager.create_sequence(sequence_id)
        alive.append(sequence_id)
    elif choice < 0.2:
        manager.release_sequence(sequence_id)
        alive.remove(sequence_id)
    elif choice < 0.3:
        manager.truncate_sequence(sequence_id, manager.sequence_length(sequence_id) // 2)
    elif choice < 0.6:
        slots = array("q", [-1] * len(alive))
        manager.slot_mapping_for_append(array("q", alive), out=slots)
        assert slots.tolist() == [manager.slots(i, n - 1, n)[0] for i in alive if (n := manager.sequence_length(i))]
    else:
        manager.append_tokens(sequence_id, rng.randrange(6))


def test_b126_eight_threads_on_one_manager(observe):
    """The reference is for one thread at a time."""
    manager = KVBlockManager(24, 4)
    failures = []

    def work(thread):
        rng, alive = random.Random(thread), []
        try:
            for _ in range(2000):
                try:
                    act(manager, rng, range(thread * 10, thread * 10 + 4), alive)
                except OutOfBlocksError:
                    pass
                except StateError:  # a fork over an owed copy
                    manager.take_copies()
            for sequence_id in alive:
                manager.release_sequence(sequence_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.take_copies() == []
    assert manager.stats.live == 0
    assert observe(manager)["stats"]["free"] == 24


class ReentrantId:
    """An id that calls back into the manager while the manager reads it."""

    def __init__(self, manager):
        self.manager = manager

    def __index__(self):
        if 77 not in self.manager.sequences:
            self.manager.create_sequence(77)
        return 1


def test_b126_re_entrant_use_neither_hangs_nor_crashes(make, observe):
    manager = make(4, 4)
    manager.create_sequence(1)
    assert manager.append_tokens(ReentrantId(manager), 2) == [0, 1]
    manager.release_sequence(77)
    out = array("q", [0])
    assert manager.slot_mapping_for_append([ReentrantId(manager)], out=out) is out
    assert sorted(manager.sequences) == [1, 77]
    manager.release_sequence(ReentrantId(manager))
    assert list(manager.sequences) == [77]
    observe(manager)


BAD_IDS = [-1, 2**63, 2**64, -(2**70), "1", 1.0, None]  # out of range, or no integer at all
SINGLE_ID_CALLS = {
    "append_token": lambda m, i: m.append_token(i),
    "append_tokens": lambda m, i: m.append_tokens(i, 1),
    "slot_mapping_for_append": lambda m, i: m.slot_mapping_for_append([i]),
    "get_block_table_tensor": lambda m, i: m.get_block_table_tensor([i]),
    "get_seq_lens_tensor": lambda m, i: m.get_seq_lens_tensor([i]),
    "commit": lambda m, i: m.commit(i, 0),
    "release_sequence": lambda m, i: m.release_sequence(i),
    "truncate_sequence": lambda m, i: m.truncate_sequence(i, 0),
    "fork_sequence": lambda m, i: m.fork_sequence(i, 99),
    "locate": lambda m, i: m.locate(i, 0),
    "slots": lambda m, i: m.slots(i, 0, 0),
    "sequence_length": lambda m, i: m.sequence_length(i),
    "block_table": lambda m, i: m.block_table(i),
    "sequences": lambda m, i: m.sequences[i],
}


@pytest.fixture
def used(make):
    """A manager in the middle of its life: a length, an empty sequence, a released one, a held block, an owed copy."""
    manager = make(8, 4)
    for sequence_id in (1, 2, 3):
        manager.create_sequence(sequence_id)
    manager.append_tokens(1, 6)
    manager.release_sequence(3)
    manager.fork_sequence(1, 4)
    manager.append_token(4)
    manager.allocate_block()
    return manager


def refuse(manager, observe, error, call):
    """`call` raises `error`, never a panic, changes nothing, and the manager still works."""
    before = observe(manager)
    with pytest.raises(error) as caught:
        call(manager)
    assert isinstance(caught.value, KVPagerError | KeyError | TypeError)
    assert observe(manager) == before
    manager.create_sequence(1000)
    manager.append_token(1000)
    manager.release_sequence(1000)
    assert manager.check_invariants() == []


@pytest.mark.parametrize("call", SINGLE_ID_CALLS.values(), ids=SINGLE_ID_CALLS)
@pytest.mark.parametrize("sequence_id", [3, 5, 2**32, 2**63 - 1])
def test_b127_unknown_and_released_sequences(used, observe, call, sequence_id):
    refuse(used, observe, UnknownSequenceError, lambda manager: call(manager, sequence_id))


@pytest.mark.parametrize("call", SINGLE_ID_CALLS.values(), ids=SINGLE_ID_CALLS)
@pytest.mark.parametrize("sequence_id", BAD_IDS, ids=repr)
def test_b127_what_is_no_sequence_id(used, observe, call, sequence_id):
    error = ArgumentError if isinstance(sequence_id, int) else TypeError
    if call is SINGLE_ID_CALLS["sequences"]:
        error = KeyError
    refuse(used, observe, error, lambda manager: call(manager, sequence_id))


BAD_CALLS = {
    "create a known id": (DuplicateSequenceError, lambda m: m.create_sequence(1)),
    "create -1": (ArgumentError, lambda m: m.create_sequence(-1)),
    "create 2^63": (ArgumentError, lambda m: m.create_sequence(2**63)),
    "fork onto an existing name": (DuplicateSequenceError, lambda m: m.fork_sequence(1, 2)),
    "fork onto itself": (DuplicateSequenceError, lambda m: m.fork_sequence(1, 1)),
    "fork onto -1": (ArgumentError, lambda m: m.fork_sequence(1, -1)),
    "fork more than there is": (ArgumentError, lambda m: m.fork_sequence(1, 9, 7)),
    "fork -1 tokens": (ArgumentError, lambda m: m.fork_sequence(1, 9, -1)),
    "fork 2^64 tokens": (ArgumentError, lambda m: m.fork_sequence(1, 9, 2**64)),
    "fork over an owed copy": (StateError, lambda m: m.fork_sequence(4, 9)),
    "truncate beyond the end": (ArgumentError, lambda m: m.truncate_sequence(1, 7)),
    "truncate to -1": (ArgumentError, lambda m: m.truncate_sequence(1, -1)),
    "truncate an empty one to 1": (ArgumentError, lambda m: m.truncate_sequence(2, 1)),
    "truncate to 2^64": (ArgumentError, lambda m: m.truncate_sequence(1, 2**64)),
    "commit too few": (ArgumentError, lambda m: m.commit(1, 5)),
    "commit too many": (ArgumentError, lambda m: m.commit(1, 7)),
    "commit -1": (ArgumentError, lambda m: m.commit(1, -1)),
    "locate in an empty sequence": (SlotError, lambda m: m.locate(2, 0)),
    "locate past the end": (SlotError, lambda m: m.locate(1, 6)),
    "locate -1": (SlotError, lambda m: m.locate(1, -1)),
    "locate 2^64": (SlotError, lambda m: m.locate(1, 2**64)),
    "slots past the end": (SlotError, lambda m: m.slots(1, 0, 7)),
    "slots from -1": (SlotError, lambda m: m.slots(1, -1, 2)),
    "slots backwards": (SlotError, lambda m: m.slots(1, 3, 2)),
    "append -1": (ArgumentError, lambda m: m.append_tokens(1, -1)),
    "append 2^63": (ArgumentError, lambda m: m.append_tokens(1, 2**63)),
    "append more than the pool": (OutOfBlocksError, lambda m: m.append_tokens(1, 10**6)),
    "append 2^63-1": (OutOfBlocksError, lambda m: m.append_tokens(1, 2**63 - 1)),
    "batch of huge counts": (
        OutOfBlocksError,
        lambda m: m.slot_mapping_for_append([1, 2, 1], [2**63 - 1, 2**63 - 1, 2**63 - 1]),
    ),
    "counts of another length": (ArgumentError, lambda m: m.slot_mapping_for_append([1, 2], [1])),
    "counts of -1": (ArgumentError, lambda m: m.slot_mapping_for_append([1, 2], [3, -1])),
    "counts of words": (TypeError, lambda m: m.slot_mapping_for_append([1], ["2"])),
    "float ids": (ArgumentError, lambda m: m.slot_mapping_for_append(np.array([1.0]))),
    "int16 ids": (ArgumentError, lambda m: m.get_seq_lens_tensor(np.array([1], dtype=np.int16))),
    "uint64 ids": (ArgumentError, lambda m: m.get_block_table_tensor(np.array([1], dtype=np.uint64))),
    "bytes as ids": (ArgumentError, lambda m: m.get_seq_lens_tensor(b"\1")),
    "text as ids": (TypeError, lambda m: m.get_seq_lens_tensor("1")),
    "2-D ids": (ArgumentError, lambda m: m.slot_mapping_for_append(np.array([[1, 2]]))),
    "a number as ids": (TypeError, lambda m: m.slot_mapping_for_append(1)),
    "float counts": (ArgumentError, lambda m: m.slot_mapping_for_append([1], np.array([1.0]))),
    "free a block nobody holds": (StateError, lambda m: m.free_block(7)),
    "free a sequence's block": (StateError, lambda m: m.free_block(0)),
    "free block -1": (ArgumentError, lambda m: m.free_block(-1)),
    "free block N": (ArgumentError, lambda m: m.free_block(8)),
    "free block 2^32": (ArgumentError, lambda m: m.free_block(2**32)),
    "free block 2^64": (ArgumentError, lambda m: m.free_block(2**64)),
    "max_blocks too small": (ArgumentError, lambda m: m.get_block_table_tensor([1], 1)),
    "max_blocks of -1": (ArgumentError, lambda m: m.get_block_table_tensor([1], -1)),
    "fragmentation of nobody": (UnknownSequenceError, lambda m: m.internal_fragmentation_tokens(5)),
}


@pytest.mark.parametrize(("error", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_b127_errors_not_panics(used, observe, error, call):
    refuse(used, observe, error, call)


def test_b127_length_zero_is_no_error(used, observe):
    before = observe(used)
    assert used.append_tokens(2, 0) == []
    assert used.slots(2, 0, 0) == []
    assert used.slot_mapping_for_append([1, 2], [0, 0]).tolist() == []
    assert used.slot_mapping_for_append([]).tolist() == []
    used.truncate_sequence(2, 0)
    used.commit(2, 0)
    assert used.internal_fragmentation_tokens(2) == 0
    assert used.get_block_table_tensor([2]).shape == (1, 0)
    assert observe(used) == before


@pytest.mark.parametrize(
    ("num_blocks", "block_size"), [(0, 4), (-1, 4), (4, 0), (4, -1), (2**31, 1), (2**64, 4), (4, 2**62), (1, 2**64)]
)
def test_b127_impossible_pools(make, num_blocks, block_size):
    with pytest.raises(ConfigError):
        make(num_blocks, block_size)


@pytest.mark.parametrize(("num_blocks", "block_size"), [("4", 4), (4, 4.0), (None, 4)])
def test_b127_pools_of_what_is_no_integer(make, num_blocks, block_size):
    with pytest.raises(TypeError, match="wanted an int"):
        make(num_blocks, block_size)


# Concurrency


def test_b130_exported_tensors_are_snapshots(make):
    manager = make(8, 4)
    for sequence_id in (1, 2):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, 4)
    slots = manager.slot_mapping_for_append([1, 2])
    tables, lengths = manager.get_block_table_tensor([1, 2]), manager.get_seq_lens_tensor([1, 2])
    state = manager.sequences[1]
    exported = slots.clone(), tables.clone(), lengths.clone()
    manager.append_tokens(1, 4)
    manager.fork_sequence(1, 3)
    manager.append_token(3)
    manager.release_sequence(2)
    manager.truncate_sequence(1, 1)
    assert all(now.equal(then) for now, then in zip((slots, tables, lengths), exported, strict=True))
    assert (state.sequence_length, len(state.block_table)) == (5, 2)
