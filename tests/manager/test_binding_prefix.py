"""Faults known from other projects, by id (tests/cases.md): bindings and concurrency, for the calls of the index."""

import random
import threading
from array import array

import numpy as np
import pytest
import torch

from kvpager.errors import (
    ArgumentError,
    ConfigError,
    DuplicateSequenceError,
    KVPagerError,
    OutOfBlocksError,
    SequenceTooLongError,
    SlotError,
    StateError,
    UnknownSequenceError,
)
from kvpager.manager import KVBlockManager


def act(manager, rng, own, alive, pins):
    """One random step of a thread on its own sequences; prompts are shared by all threads."""
    sequence_id, choice = rng.choice(own), rng.random()
    if sequence_id not in alive:
        prompt = array("i", [rng.choice((0, 0, 0, 1))] * rng.randint(1, 20))
        slots = array("q", [-1] * len(prompt))
        computed = manager.admit(sequence_id, prompt, out=slots).num_computed_tokens
        alive.append(sequence_id)
        assert slots.tolist()[: len(prompt) - computed] == manager.slots(sequence_id, computed, len(prompt))
    elif choice < 0.25:
        manager.release_sequence(sequence_id)
        alive.remove(sequence_id)
    elif choice < 0.35:
        manager.truncate_sequence(sequence_id, rng.randint(0, manager.sequence_length(sequence_id)))
    elif choice < 0.55:
        manager.commit(sequence_id, manager.sequence_length(sequence_id))
    elif choice < 0.6:
        child = next((i for i in own if i not in alive), None)
        if child is not None:
            manager.fork_sequence(sequence_id, child)
            alive.append(child)
    elif choice < 0.65:
        pins.append(manager.pin_prefix([0] * 8))
    elif choice < 0.7 and pins:
        manager.unpin(pins.pop())
    elif choice < 0.75:
        manager.retire(manager.advance_epoch())
    elif choice < 0.78:
        manager.match_prefix(np.zeros(17, np.int64))
        manager.can_admit(10**6, torch.zeros(9, dtype=torch.int32))
        assert manager.invariants_ok()
    else:
        manager.append_tokens(sequence_id, [rng.randrange(2) for _ in range(rng.randint(1, 5))])


@pytest.mark.parametrize("fences", [False, True])
def test_b126_eight_threads_share_prefixes(observe, fences):
    """The reference is for one thread at a time."""
    manager = KVBlockManager(60, 4, enable_prefix_caching=True, fences=fences, eviction_policy="slru")
    failures = []

    def work(thread):
        rng, alive, pins = random.Random(thread), [], []
        try:
            for _ in range(800):
                try:
                    act(manager, rng, range(thread * 10, thread * 10 + 3), alive, pins)
                except OutOfBlocksError:
                    for sequence_id in alive:
                        manager.release_sequence(sequence_id)
                    alive.clear()
                except StateError:  # a fork over or a commit of what waits for a copy, a fork of uncommitted tokens
                    manager.take_copies()
            for sequence_id in alive:
                manager.release_sequence(sequence_id)
            for pin in pins:
                manager.unpin(pin)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    manager.take_copies()
    manager.retire(manager.advance_epoch())
    stats = observe(manager)["stats"]
    assert (stats["live"], stats["fenced"], stats["pinned"]) == (0, 0, 0)
    assert stats["cached"] + stats["free"] == 60
    assert stats["num_hit_tokens"] > 0


class ReentrantToken:
    """A token id that calls back into the manager while the manager reads it."""

    def __init__(self, manager):
        self.manager = manager

    def __index__(self):
        if 77 not in self.manager.sequences:
            self.manager.create_sequence(77)
        return 5


def test_b126_re_entrant_use_neither_hangs_nor_crashes(make_caching, observe):
    manager = make_caching(8, 4)
    manager.admit(1, [ReentrantToken(manager)] * 4)
    manager.release_sequence(77)
    manager.append_token(1, ReentrantToken(manager))
    manager.release_sequence(77)
    manager.append_tokens(1, [ReentrantToken(manager)])
    assert manager.sequence_length(1) == 6
    manager.release_sequence(77)
    manager.commit(1, 6)
    assert manager.match_prefix([ReentrantToken(manager)] * 5) == 4
    observe(manager)


@pytest.fixture
def used(make_caching):
    """In the middle of its life: a cached prefix, a fork over an owed copy, a pin, a held block, an empty sequence."""
    manager = make_caching(8, 4, max_sequence_length=20)
    for sequence_id in (1, 2, 3):
        manager.create_sequence(sequence_id)
    manager.append_tokens(1, [1, 2, 3, 4, 5, 6])
    manager.commit(1, 6)
    manager.release_sequence(3)
    manager.fork_sequence(1, 4)
    manager.append_token(4, 9)
    manager.allocate_block()
    manager.pin_prefix([1, 2, 3, 4])
    return manager


def slots(n=9):
    return array("q", [0] * n)


BAD_CALLS = {
    "admit a known id": (DuplicateSequenceError, lambda m: m.admit(1, [1], out=slots())),
    "ask for a known id": (DuplicateSequenceError, lambda m: m.can_admit(1, [1])),
    "admit -1": (ArgumentError, lambda m: m.admit(-1, [1], out=slots())),
    "admit 2^63": (ArgumentError, lambda m: m.admit(2**63, [1], out=slots())),
    "admit a word": (TypeError, lambda m: m.admit("1", [1], out=slots())),
    "no tokens at all": (TypeError, lambda m: m.admit(9, None, out=slots())),
    "words as tokens": (TypeError, lambda m: m.admit(9, "ab", out=slots())),
    "token -1": (ArgumentError, lambda m: m.admit(9, [1, -1], out=slots())),
    "token 2^31": (ArgumentError, lambda m: m.can_admit(9, np.array([1, 2**31]))),
    "token 2^63": (ArgumentError, lambda m: m.match_prefix([2**63])),
    "float tokens": (ArgumentError, lambda m: m.admit(9, np.array([1.0]), out=slots())),
    "int16 tokens": (ArgumentError, lambda m: m.pin_prefix(np.array([1], dtype=np.int16))),
    "2-D tokens": (ArgumentError, lambda m: m.match_prefix(torch.zeros((2, 2), dtype=torch.int64))),
    "-1 new tokens": (ArgumentError, lambda m: m.admit(9, [1], num_new_tokens=-1, out=slots())),
    "2^63 new tokens": (ArgumentError, lambda m: m.admit(9, [1], num_new_tokens=2**63, out=slots())),
    "a number as salt": (TypeError, lambda m: m.admit(9, [1], salt=1, out=slots())),
    "bytes as adapter": (TypeError, lambda m: m.match_prefix([1], adapter=b"x")),
    "an empty item": (ArgumentError, lambda m: m.match_prefix([1], items=[(0, 0, "x")])),
    "an item before the prompt": (ArgumentError, lambda m: m.match_prefix([1], items=[(-1, 1, "x")])),
    "an item past the prompt": (ArgumentError, lambda m: m.pin_prefix([1, 2], items=[(0, 3, "x")])),
    "a huge item": (ArgumentError, lambda m: m.can_admit(9, [1], items=[(0, 2**70, "x")])),
    "resumed by a number": (TypeError, lambda m: m.admit(9, [1], resumed=1, out=slots())),
    "items that overlap": (ArgumentError, lambda m: m.match_prefix([1, 2, 3], items=[(0, 2, "x"), (1, 3, "x")])),
    "items out of order": (ArgumentError, lambda m: m.match_prefix([1, 2, 3], items=[(2, 3, "x"), (0, 1, "x")])),
    "an item without a key": (TypeError, lambda m: m.match_prefix([1], items=[(0, 1, 2)])),
    "an item of two": (TypeError, lambda m: m.match_prefix([1], items=[(0, 1)])),
    "an item that is a word": (TypeError, lambda m: m.match_prefix([1], items=["abc"])),
    "a number as items": (TypeError, lambda m: m.match_prefix([1], items=5)),
    "out too small": (ArgumentError, lambda m: m.admit(9, [1, 2, 3], out=slots(2))),
    "out of int32": (ArgumentError, lambda m: m.admit(9, [1, 2, 3], out=array("i", [0] * 9))),
    "out of bytes": (ArgumentError, lambda m: m.admit(9, [1, 2, 3], out=bytes(99))),
    "a prompt that is too long": (SequenceTooLongError, lambda m: m.admit(9, [1] * 21, out=slots(21))),
    "a prompt for another pool": (SequenceTooLongError, lambda m: m.can_admit(9, [1] * 33)),
    "a prompt that does not fit now": (OutOfBlocksError, lambda m: m.admit(9, [7] * 20, out=slots(20))),
    "append token -1": (ArgumentError, lambda m: m.append_token(1, -1)),
    "append token 2^31": (ArgumentError, lambda m: m.append_tokens(1, [2**31])),
    "append a word": (TypeError, lambda m: m.append_tokens(1, "23")),
    "append None": (TypeError, lambda m: m.append_tokens(1, None)),
    "append 1.5": (TypeError, lambda m: m.append_tokens(1, 1.5)),
    "append past the end": (SequenceTooLongError, lambda m: m.append_tokens(2, 21)),
    "fewer ids than tokens": (ArgumentError, lambda m: m.slot_mapping_for_append([1, 2], None, [1], out=slots(2))),
    "commit -1": (ArgumentError, lambda m: m.commit(1, -1)),
    "commit 7 of 6": (ArgumentError, lambda m: m.commit(1, 7)),
    "commit back": (ArgumentError, lambda m: m.commit(1, 5)),
    "commit with too many ids": (ArgumentError, lambda m: m.commit(1, 6, [1])),
    "commit nobody": (UnknownSequenceError, lambda m: m.commit(77, 0)),
    "commit over an owed copy": (StateError, lambda m: m.commit(4, 7)),
    "commit a batch of two lengths": (ArgumentError, lambda m: m.commit_batch([1, 2], [6])),
    "commit a batch with nobody": (UnknownSequenceError, lambda m: m.commit_batch([1, 77], [6, 0])),
    "commit a batch half way": (ArgumentError, lambda m: m.commit_batch([2, 1], [0, 7])),
    "commit a batch of None": (TypeError, lambda m: m.commit_batch(None, [6])),
    "unpin what is not pinned": (ArgumentError, lambda m: m.unpin(5)),
    "unpin -1": (ArgumentError, lambda m: m.unpin(-1)),
    "unpin 2^70": (ArgumentError, lambda m: m.unpin(2**70)),
    "unpin a word": (TypeError, lambda m: m.unpin("a")),
    "retire what is open": (ArgumentError, lambda m: m.retire(0)),
    "retire -1": (ArgumentError, lambda m: m.retire(-1)),
    "retire 2^70": (ArgumentError, lambda m: m.retire(2**70)),
    "look at block -1": (ArgumentError, lambda m: m.block_info(-1)),
    "look at block N": (ArgumentError, lambda m: m.block_info(8)),
    "computed tokens of nobody": (UnknownSequenceError, lambda m: m.num_computed_tokens(77)),
    "free a pinned block": (StateError, lambda m: m.free_block(0)),
    "fork over an owed copy": (StateError, lambda m: m.fork_sequence(4, 9)),
    "slots past the end": (SlotError, lambda m: m.slots(4, 0, 8)),
}


@pytest.mark.parametrize(("error", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_b127_errors_not_panics(used, observe, error, call):
    """Each refusal is typed and changes nothing, and the manager works on."""
    before = observe(used)
    with pytest.raises(error) as caught:
        call(used)
    assert isinstance(caught.value, KVPagerError | TypeError)
    assert observe(used) == before
    assert used.admit(1000, [1, 2, 3, 4, 5], out=slots()).num_computed_tokens == 4
    used.release_sequence(1000)
    assert used.check_invariants() == []


@pytest.mark.parametrize(
    "options",
    [
        {"watermark_blocks": -1},
        {"watermark_blocks": 9},
        {"eviction_policy": "fifo"},
        {"hash_seed": -1},
        {"hash_seed": 2**64},
        {"max_pinned_blocks": 9},
        {"max_sequence_length": 0},
        {"max_sequence_length": 2**63},
    ],
    ids=str,
)
def test_b127_impossible_options(make_caching, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_caching(8, 4, **options)


def test_b127_length_zero_is_no_error(used, observe):
    assert used.admit(9, [], out=slots(0)).num_computed_tokens == 0
    assert used.admit(10, [], out=None).slots.tolist() == []
    used.release_sequence(9)
    used.release_sequence(10)
    before = observe(used)
    assert used.match_prefix([]) == 0
    assert used.append_tokens(1, []) == []
    used.commit(1, 6, [])
    used.commit_batch([], [])
    used.unpin(used.pin_prefix([]))
    assert observe(used) == before


# What may be passed


KINDS = {
    "list": list,
    "tuple": tuple,
    "range": lambda ids: range(ids[0], ids[-1] + 1),
    "iterator": iter,
    "array": lambda ids: array("i", ids),
    "numpy": lambda ids: np.array(ids, dtype=np.int64),
    "strided": lambda ids: np.repeat(np.array(ids, dtype=np.int32), 2)[::2],
    "tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_token_ids_of_each_kind(make_caching, kind):
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    manager = make_caching(12, 4)
    assert manager.can_admit(1, kind(ids))
    assert manager.admit(1, kind(ids)).slots.tolist() == list(range(9))
    assert manager.append_tokens(1, kind([10, 11, 12])) == [9, 10, 11]
    assert manager.slot_mapping_for_append([1], [2], kind([13, 14])).tolist() == [12, 13]
    manager.append_tokens(1, 2)
    manager.commit(1, 15, kind([15]))
    manager.commit_batch([1], [16], kind([16]))
    assert manager.match_prefix(kind([*ids, 10])) == 8
    assert manager.match_prefix(range(1, 18)) == 16
    manager.unpin(manager.pin_prefix(kind(ids)))


@pytest.mark.parametrize("kind", ["array", "numpy", "tensor"])
def test_one_token_id_in_a_buffer_is_an_id_and_no_count(make_caching, kind):
    manager = make_caching(4, 4)
    manager.create_sequence(1)
    assert manager.append_tokens(1, KINDS[kind]([3])) == [0]
    assert manager.append_tokens(1, 3) == [1, 2, 3]


@pytest.mark.parametrize("count", [2, np.int64(2), torch.tensor(2)], ids=repr)
def test_what_has_no_dimension_is_a_count(make_caching, count):
    manager = make_caching(4, 4)
    manager.create_sequence(1)
    assert manager.append_tokens(1, count) == [0, 1]


def test_admit_gives_a_tensor_or_fills_what_it_is_given(make_caching):
    manager = make_caching(12, 4)
    admission = manager.admit(1, [1, 2, 3, 4, 5])
    assert (admission.slots.dtype, admission.slots.tolist()) == (torch.int64, [0, 1, 2, 3, 4])
    computed, new = admission
    assert (computed, len(new)) == (0, 5)
    manager.commit(1, 5)
    out = torch.full((7,), -7)
    admission = manager.admit(2, [1, 2, 3, 4, 5, 6], out=out)
    assert admission.slots is out
    assert (admission.num_computed_tokens, out.tolist()) == (4, [8, 9, -7, -7, -7, -7, -7])
    assert manager.admit(3, [1, 2, 3, 4, 5, 6], num_new_tokens=1).slots.tolist() == [12]
    assert manager.admit(4, [1, 2, 3, 4, 5, 6], num_new_tokens=99).slots.tolist() == [16, 17]
