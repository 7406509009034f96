"""Errors are part of the contract: class, text and values, the same from both implementations."""

import pytest

from kvpager import KVBlockManager, reference
from kvpager.errors import (
    ArgumentError,
    ConfigError,
    DuplicateSequenceError,
    OutOfBlocksError,
    SlotError,
    StateError,
    UnknownSequenceError,
)


@pytest.fixture
def manager(make):
    """Sequence 1 of length 6 over blocks 0 and 1, its fork 2 of length 7 over 0 and 2 (the copy owed), block 3 free."""
    manager = make(4, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 6)
    manager.fork_sequence(1, 2)
    manager.append_token(2)
    return manager


ARGUMENT_ERRORS = {
    "`sequence_id`: wanted an id in 0..2^63-1, got -1": lambda m: m.create_sequence(-1),
    "`sequence_id`: wanted an id in 0..2^63-1, got 9223372036854775808": lambda m: m.append_token(2**63),
    "`parent`: wanted an id in 0..2^63-1, got -1": lambda m: m.fork_sequence(-1, 3),
    "`child`: wanted an id in 0..2^63-1, got -1": lambda m: m.fork_sequence(1, -1),
    "`ids`: wanted an id in 0..2^63-1, got -1": lambda m: m.get_seq_lens_tensor([1, -1]),
    "`n`: wanted a count in 0..2^63-1, got -1": lambda m: m.append_tokens(1, -1),
    "`n`: wanted 0 to 6 tokens, got 7": lambda m: m.truncate_sequence(1, 7),
    "`n`: wanted the 6 tokens of the sequence, got 5": lambda m: m.commit(1, 5),
    "`num_tokens`: wanted 0 to 6 tokens, got 8": lambda m: m.fork_sequence(1, 3, 8),
    "`counts`: wanted a count in 0..2^63-1, got -1": lambda m: m.slot_mapping_for_append([1, 2], [1, -1]),
    "`counts`: wanted one count for each of 2 ids, got 1 counts": lambda m: m.slot_mapping_for_append([1, 2], [1]),
    "`token_ids`: wanted 18446744073709551615 ids, one for each new token, got 1 ids": (
        lambda m: m.slot_mapping_for_append([1, 2, 1], [2**63 - 1] * 3, [5])
    ),
    "`block_id`: wanted a block in 0..3, got 4": lambda m: m.free_block(4),
    "`max_blocks`: wanted 2 (the longest table) to 2147483647, got 1": lambda m: m.get_block_table_tensor([1], 1),
    "`max_blocks`: wanted 2 (the longest table) to 2147483647, got 2147483648": (
        lambda m: m.get_block_table_tensor([1], 2**31)
    ),
    "`max_blocks`: wanted 2 (the longest table) to 1073741823, got 1073741824": (
        lambda m: m.get_block_table_tensor([1, 1], 2**30)
    ),
    "`max_blocks`: wanted 2 (the longest table) to 1073741823, got 18446744073709551616": (
        lambda m: m.get_block_table_tensor([1, 1], 2**64, out=b"")
    ),
    "`device`: wanted None together with `out`, got cpu": lambda m: m.get_seq_lens_tensor([], device="cpu", out=b""),
}


_NO_ARRAY = "a 1-D buffer of int32 or int64 on the CPU, or a sequence of ints"
KIND_ERRORS = {
    "`sequence_id`: wanted an int, got bool": lambda m: m.create_sequence(True),
    "`token_id`: wanted an int, got bool": lambda m: m.append_token(1, True),
    "`n`: wanted an int, got bool": lambda m: m.append_tokens(1, True),
    "`position`: wanted an int, got bool": lambda m: m.locate(1, False),
    "`block_id`: wanted an int, got bool": lambda m: m.free_block(True),
    "`ids`: wanted an int, got bool": lambda m: m.slot_mapping_for_append([True]),
    "`counts`: wanted an int, got bool": lambda m: m.slot_mapping_for_append([1], (True,)),
    "`token_ids`: wanted an int, got bool": lambda m: m.append_tokens(1, [5, True]),
    "`items`: wanted an int, got bool": lambda m: m.can_admit(9, [1, 2], items=[(False, 1, "key")]),
    f"`ids`: wanted {_NO_ARRAY}, got set": lambda m: m.slot_mapping_for_append({1, 2}),
    f"`ids`: wanted {_NO_ARRAY}, got frozenset": lambda m: m.get_seq_lens_tensor(frozenset([1])),
    f"`ids`: wanted {_NO_ARRAY}, got dict": lambda m: m.get_block_table_tensor({1: 2}),
    f"`counts`: wanted {_NO_ARRAY}, got set": lambda m: m.slot_mapping_for_append([1], {1}),
    f"`token_ids`: wanted {_NO_ARRAY}, got set": lambda m: m.append_tokens(1, {1}),
    "`resumed`: wanted a bool, got int": lambda m: m.admit(9, [1], resumed=1),
    "`resumed`: wanted a bool, got NoneType": lambda m: m.can_admit(9, [1], resumed=None),
    "`device`: wanted a torch.device, a str or an int, got float": lambda m: m.get_seq_lens_tensor([1], device=0.5),
}


@pytest.mark.parametrize(("text", "call"), KIND_ERRORS.items(), ids=KIND_ERRORS)
def test_what_is_of_another_kind(manager, observe, text, call):
    before = observe(manager)
    with pytest.raises(TypeError) as caught:
        call(manager)
    assert str(caught.value) == text
    assert observe(manager) == before


@pytest.mark.parametrize("device", ["foo", "cpu:x", "cuda:99"])
@pytest.mark.parametrize(
    "call",
    [
        lambda m, device: m.slot_mapping_for_append([1, 2], device=device),
        lambda m, device: m.get_block_table_tensor([1], device=device),
        lambda m, device: m.get_seq_lens_tensor([1], device=device),
    ],
    ids=["slots", "tables", "lengths"],
)
def test_a_device_that_is_not_there(manager, observe, device, call):
    before = observe(manager)
    with pytest.raises(ArgumentError) as caught:
        call(manager, device)
    assert str(caught.value) == f"`device`: wanted a device that torch has here, got {device}"
    assert caught.value.__cause__ is not None  # torch's words
    assert observe(manager) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fences": 1}, "`fences`: wanted a bool, got int"),
        ({"enable_prefix_caching": None}, "`enable_prefix_caching`: wanted a bool, got NoneType"),
        ({"watermark_blocks": True}, "`watermark_blocks`: wanted an int, got bool"),
        ({"watermark_blocks": "1"}, "`watermark_blocks`: wanted an int, got str"),
        ({"hash_seed": 0.5}, "`hash_seed`: wanted an int, got float"),
        ({"max_pinned_blocks": False}, "`max_pinned_blocks`: wanted an int, got bool"),
        ({"max_sequence_length": True}, "`max_sequence_length`: wanted an int, got bool"),
        ({"block_size": True}, "`block_size`: wanted an int, got bool"),
    ],
)
def test_settings_of_another_kind(make, arguments, text):
    with pytest.raises(TypeError) as caught:
        make(**{"num_physical_blocks": 4, "block_size": 4, **arguments})
    assert str(caught.value) == text


def test_an_unknown_policy(make):
    *others, last = (f"`{name}`" for name in KVBlockManager.eviction_policies)
    with pytest.raises(ConfigError) as caught:
        make(4, 4, eviction_policy=5)
    assert str(caught.value) == f"`eviction_policy`: wanted {', '.join(others)} or {last}, got 5"


def test_both_implementations_have_the_same_policies():
    assert tuple(reference.eviction.POLICIES) == KVBlockManager.eviction_policies


def test_f230_none_is_the_default(make, observe):
    settings = ("hash_seed", "watermark_blocks", "eviction_policy", "max_pinned_blocks", "max_sequence_length")
    plain = make(4, 4, enable_prefix_caching=True)
    told = make(4, 4, enable_prefix_caching=True, **dict.fromkeys(settings))
    for manager in (plain, told):
        manager.admit(1, [1, 2, 3, 4, 5])
    assert observe(told) == observe(plain)


@pytest.mark.parametrize(("text", "call"), ARGUMENT_ERRORS.items(), ids=ARGUMENT_ERRORS)
def test_argument_error(manager, text, call):
    with pytest.raises(ArgumentError) as caught:
        call(manager)
    assert str(caught.value) == text
    error = caught.value
    assert text == f"`{error.argument}`: wanted {error.wanted}, got {error.got}"
    assert isinstance(error, ValueError)


OUT_OF_BLOCKS = {
    "append_tokens": (
        lambda m: m.append_tokens(1, 7),
        (2, 1, 0, 4, None),
        "need 2 blocks, 1 free of 4",
    ),
    "batch": (
        lambda m: m.slot_mapping_for_append([1, 2, 1, 2], [2, 1, 1, 5]),
        (3, 1, 0, 4, 3),
        "need 3 blocks, 1 free of 4; row 3 is the first that lacks one",
    ),
    "batch, row 0": (
        lambda m: m.slot_mapping_for_append([2, 1], [9, 0]),
        (2, 1, 0, 4, 0),
        "need 2 blocks, 1 free of 4; row 0 is the first that lacks one",
    ),
}


@pytest.mark.parametrize(("call", "values", "text"), OUT_OF_BLOCKS.values(), ids=OUT_OF_BLOCKS)
def test_out_of_blocks_error(manager, call, values, text):
    with pytest.raises(OutOfBlocksError) as caught:
        call(manager)
    error = caught.value
    assert (error.needed, error.free, error.fenced, error.total, error.row) == values
    assert str(error) == text


def test_out_of_blocks_counts_fenced_blocks(manager):
    manager.release_sequence(1)  # block 1 is nobody's, but the copy into block 2 has yet to read it
    assert manager.stats.fenced == 1
    manager.allocate_block()
    with pytest.raises(OutOfBlocksError) as caught:
        manager.allocate_block()
    assert str(caught.value) == "need 1 blocks, 0 free of 4 (1 fenced)"
    assert caught.value.row is None


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (UnknownSequenceError, "no sequence with id 9", lambda m: m.append_token(9)),
        (UnknownSequenceError, "no sequence with id 9", lambda m: m.slot_mapping_for_append([1, 9])),
        (UnknownSequenceError, "no sequence with id 9", lambda m: m.sequences[9]),
        (DuplicateSequenceError, "sequence 1 exists already", lambda m: m.create_sequence(1)),
        (DuplicateSequenceError, "sequence 2 exists already", lambda m: m.fork_sequence(1, 2)),
    ],
)
def test_sequence_errors(manager, error, text, call):
    with pytest.raises(error) as caught:
        call(manager)
    assert str(caught.value) == text
    assert caught.value.sequence_id == int(text.split()[-1 if error is UnknownSequenceError else 1])


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (StateError, "block 3 is not held by a caller", lambda m: m.free_block(3)),
        (
            StateError,
            "sequence 2 can't be forked here: block 2 still waits for its copy of block 1 (run `take_copies` first)",
            lambda m: m.fork_sequence(2, 3),
        ),
        (SlotError, "position 6 is past the 6 tokens of sequence 1", lambda m: m.locate(1, 6)),
        (SlotError, "positions 4 to 7 are not a range of the 6 tokens of sequence 1", lambda m: m.slots(1, 4, 7)),
    ],
)
def test_state_and_slot_errors(manager, error, text, call):
    with pytest.raises(error) as caught:
        call(manager)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 4), "`num_physical_blocks`: wanted 1 to 2147483647 blocks, got 0"),
        ((2**31, 4), "`num_physical_blocks`: wanted 1 to 2147483647 blocks, got 2147483648"),
        ((-1, 4), "`num_physical_blocks`: wanted 1 to 2^63-1, got -1"),
        ((4, 2**63), "`block_size`: wanted 1 to 2^63-1, got 9223372036854775808"),
        ((4, 0), "`block_size`: wanted at least 1 token, got 0"),
        ((4, 2**61), "4 blocks of 2305843009213693952 tokens: the slots don't fit a 64-bit integer"),
    ],
)
def test_config_error(make, arguments, text):
    with pytest.raises(ConfigError) as caught:
        make(*arguments)
    assert str(caught.value) == text


def test_a_shorter_prefix_may_be_forked_while_a_copy_is_owed(manager):
    manager.fork_sequence(2, 3, 4)
    assert manager.sequences[3].block_table == (0,)
    manager.take_copies()
    manager.fork_sequence(2, 4)
    assert manager.sequences[4].block_table == (0, 2)


def test_the_first_lacking_row_counts_what_earlier_rows_share(make):
    """Of three holders of a tail two need a copy; the last one writes in place."""
    manager = make(4, 4)
    manager.create_sequence(1)
    manager.append_tokens(1, 2)
    manager.fork_sequence(1, 2)
    manager.fork_sequence(1, 3)
    assert manager.slot_mapping_for_append([1, 2, 3]).tolist() == [6, 10, 2]
    assert manager.take_copies() == [(0, 1), (0, 2)]
