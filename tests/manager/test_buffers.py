"""What may be passed as ids, counts and `out`, and what is refused with nothing changed."""

from array import array

import numpy as np
import pytest
import torch

from kvpager import KVBlockManager
from kvpager.errors import ArgumentError, OutOfBlocksError, UnknownSequenceError

KINDS = {
    "tensor": lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype)),
    "numpy": lambda values, dtype: np.array(values, dtype=dtype),
    "array": lambda values, dtype: array({"int64": "q", "int32": "i"}[dtype], values),
    "memoryview": lambda values, dtype: memoryview(array({"int64": "q", "int32": "i"}[dtype], values)),
}


@pytest.fixture
def manager(make):
    """Sequences 0, 1, 2 of lengths 3, 4, 9 over 1, 1 and 3 of 16 blocks."""
    manager = make(16, 4)
    for sequence_id, length in enumerate([3, 4, 9]):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
    return manager


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_out_is_filled_and_returned_itself(manager, kind):
    slots, tables, lengths = kind([7] * 6, "int64"), kind([7] * 9, "int32"), kind([7] * 3, "int32")
    assert manager.slot_mapping_for_append([2, 0, 1], [3, 2, 1], out=slots) is slots
    assert manager.get_block_table_tensor([0, 1, 2], out=tables) is tables
    assert manager.get_seq_lens_tensor([0, 1, 2], out=lengths) is lengths
    assert slots.tolist() == [17, 18, 19, 3, 20, 24]
    assert tables.tolist() == [0, 5, -1, 1, 6, -1, 2, 3, 4]
    assert lengths.tolist() == [5, 5, 12]


def test_out_of_two_dimensions(manager):
    tables = torch.zeros(2, 5, dtype=torch.int32)
    manager.get_block_table_tensor([2, 0], out=tables)
    assert tables.tolist() == [[2, 3, 4, -1, -1], [0, -1, -1, -1, -1]]
    manager.get_block_table_tensor([2, 0], 5, out=tables)
    slots = np.zeros((1, 2), dtype=np.int64)
    manager.slot_mapping_for_append([0, 1], out=slots)
    assert slots.tolist() == [[3, 20]]


def test_out_may_be_a_contiguous_part_of_a_larger_buffer(manager):
    whole = torch.full((5,), 7, dtype=torch.int64)
    manager.slot_mapping_for_append([0, 1], out=whole[1:3])
    assert whole.tolist() == [7, 3, 20, 7, 7]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ids_and_counts_of_each_kind(manager, kind, dtype):
    ids = kind([2, 0], dtype)
    assert manager.get_seq_lens_tensor(ids).tolist() == [9, 3]
    assert manager.get_block_table_tensor(ids).tolist() == [[2, 3, 4], [0, -1, -1]]
    assert manager.slot_mapping_for_append(ids, kind([1, 2], dtype)).tolist() == [17, 3, 20]


@pytest.mark.parametrize("ids", [[2, 0], (2, 0), range(2, -1, -2), [np.int64(2), np.int32(0)]], ids=repr)
def test_ids_of_any_sequence_of_integers(manager, ids):
    assert manager.get_seq_lens_tensor(ids).tolist() == [9, 3]
    assert manager.slot_mapping_for_append(ids).tolist() == [17, 3]


def test_ids_that_can_be_read_only_once(manager):
    assert manager.get_block_table_tensor(iter([2, 0])).tolist() == [[2, 3, 4], [0, -1, -1]]
    assert manager.get_seq_lens_tensor(iter([2, 0])).tolist() == [9, 3]
    assert manager.slot_mapping_for_append(iter([2, 0]), iter([1, 2])).tolist() == [17, 3, 20]


def test_strided_ids(manager):
    ids = [2, 7, 0, 7]
    assert manager.get_seq_lens_tensor(torch.tensor(ids)[::2]).tolist() == [9, 3]
    assert manager.get_seq_lens_tensor(np.array(ids)[::2]).tolist() == [9, 3]
    assert manager.get_seq_lens_tensor(np.array(ids)[2::-2]).tolist() == [3, 9]
    assert manager.get_seq_lens_tensor(memoryview(array("i", ids))[::2]).tolist() == [9, 3]
    assert manager.slot_mapping_for_append(np.array(ids)[::2], np.array([1, 9, 2, 9])[::2]).tolist() == [17, 3, 20]


def test_read_only_ids(manager):
    ids = np.array([2, 0])
    ids.flags.writeable = False
    assert manager.get_seq_lens_tensor(ids).tolist() == [9, 3]


def test_new_tensors(manager):
    slots = manager.slot_mapping_for_append([0, 1])
    tables, lengths = manager.get_block_table_tensor([0, 1], 4), manager.get_seq_lens_tensor([0, 1])
    assert (slots.dtype, tables.dtype, lengths.dtype) == (torch.int64, torch.int32, torch.int32)
    assert (slots.shape, tables.shape, lengths.shape) == ((2,), (2, 4), (2,))
    assert manager.slot_mapping_for_append([0], device="meta").device.type == "meta"
    assert manager.get_seq_lens_tensor([0], device=torch.device("cpu")).tolist() == [5]


def test_new_tensors_lie_on_the_cpu_whatever_the_default_device_is(manager):
    with torch.device("meta"):
        slots, tables = manager.slot_mapping_for_append([0, 1]), manager.get_block_table_tensor([0, 1])
        lengths, admission = manager.get_seq_lens_tensor([0, 1]), manager.admit(7, [1, 2, 3])
    assert (slots.tolist(), tables.tolist(), lengths.tolist()) == ([3, 20], [[0, -1], [1, 5]], [4, 5])
    assert admission.slots.tolist() == [24, 25, 26]


def test_a_table_that_grows_while_its_tensor_is_made(monkeypatch):
    """Another thread may append between measuring and writing. Rust alone, as the reference is for one thread."""
    manager, empty = KVBlockManager(16, 4), torch.empty
    manager.create_sequence(0)
    manager.append_tokens(0, 4)

    def interrupted(*args, **options):
        if manager.sequence_length(0) < 12:
            manager.append_tokens(0, 4)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", interrupted)
    assert manager.get_block_table_tensor([0]).tolist() == [[0, 1, 2]]  # measured three times
    manager.truncate_sequence(0, 8)
    with pytest.raises(ArgumentError, match="`max_blocks`: wanted at least 3, the longest table, got 2"):
        manager.get_block_table_tensor([0], 2)


def test_empty_batches(manager, observe):
    before = observe(manager)
    empty = torch.empty(0, dtype=torch.int64)
    for ids in ([], (), empty, np.array([], dtype=np.int32), array("q")):
        assert manager.slot_mapping_for_append(ids).shape == (0,)
        assert manager.slot_mapping_for_append(ids, ids).shape == (0,)
        assert manager.get_block_table_tensor(ids).shape == (0, 0)
        assert manager.get_block_table_tensor(ids, 3).shape == (0, 0)
        assert manager.get_seq_lens_tensor(ids).shape == (0,)
        assert manager.slot_mapping_for_append(ids, out=empty) is empty
        nothing = array("i")
        assert manager.get_block_table_tensor(ids, out=nothing) is nothing
        assert manager.get_seq_lens_tensor(ids, out=nothing) is nothing
    assert observe(manager) == before


def read_only(buffer):
    buffer.flags.writeable = False
    return buffer


def is_zero(buffer):
    if isinstance(buffer, torch.Tensor):
        return buffer.device.type == "meta" or not buffer.any()
    return not any(buffer) if isinstance(buffer, bytes) else not np.any(buffer)


BAD_OUTS = {
    "too small": lambda dtype, n: np.zeros(n - 1, dtype),
    "too large": lambda dtype, n: np.zeros(n + 1, dtype),
    "the other int": lambda dtype, n: np.zeros(n, {"int64": "int32", "int32": "int64"}[dtype]),
    "unsigned": lambda dtype, n: np.zeros(n, "u" + dtype),
    "float": lambda dtype, n: np.zeros(n, {"int64": "float64", "int32": "float32"}[dtype]),
    "swapped bytes": lambda dtype, n: np.zeros(n, np.dtype(dtype).newbyteorder("S")),
    "strided": lambda dtype, n: np.zeros(2 * n, dtype)[::2],
    "reversed": lambda dtype, n: np.zeros(n, dtype)[::-1],
    "transposed": lambda dtype, n: np.zeros((n // 2, 2), dtype).T,
    "read-only": lambda dtype, n: read_only(np.zeros(n, dtype)),
    "bytes": lambda dtype, n: bytes(n),
    "list": lambda dtype, n: [0] * n,
    "strided tensor": lambda dtype, n: torch.zeros(2 * n, dtype=getattr(torch, dtype))[::2],
    "float tensor": lambda dtype, n: torch.zeros(n),
    "bfloat16 tensor": lambda dtype, n: torch.zeros(n, dtype=torch.bfloat16),
    "tensor with grad": lambda dtype, n: torch.zeros(n, requires_grad=True),
    "tensor elsewhere": lambda dtype, n: torch.zeros(n, dtype=getattr(torch, dtype), device="meta"),
}
CALLS = {
    "slot_mapping_for_append": ("int64", 4, lambda m, out: m.slot_mapping_for_append([0, 2], [1, 3], out=out)),
    "get_block_table_tensor": ("int32", 8, lambda m, out: m.get_block_table_tensor([0, 2], 4, out=out)),
    "get_seq_lens_tensor": ("int32", 4, lambda m, out: m.get_seq_lens_tensor([0, 2, 0, 1], out=out)),
}


@pytest.mark.parametrize(("dtype", "size", "call"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("bad_out", BAD_OUTS.values(), ids=BAD_OUTS)
def test_bad_out_is_refused_and_untouched(manager, observe, bad_out, dtype, size, call):
    before, out = observe(manager), bad_out(dtype, size)
    with pytest.raises(ArgumentError) as caught:
        call(manager, out)
    assert caught.value.argument == "out"
    assert observe(manager) == before
    assert is_zero(out)


@pytest.mark.parametrize("size", [0, 3, 5, 7])
def test_table_out_must_hold_whole_rows_that_are_long_enough(manager, size):
    out = array("i", [7] * size)
    with pytest.raises(ArgumentError) as caught:
        manager.get_block_table_tensor([0, 2], out=out)
    assert caught.value.argument == "out"
    assert out.tolist() == [7] * size


def test_out_is_untouched_on_failure(manager, observe):
    before, out = observe(manager), array("q", [7] * 3)
    with pytest.raises(UnknownSequenceError):
        manager.slot_mapping_for_append([0, 1, 9], out=out)
    long = array("q", [7] * 101)
    with pytest.raises(OutOfBlocksError):
        manager.slot_mapping_for_append([0, 1, 2], [1, 1, 99], out=long)
    rows = array("i", [7] * 3)
    with pytest.raises(UnknownSequenceError):
        manager.get_block_table_tensor([0, 1, 9], out=rows)
    with pytest.raises(UnknownSequenceError):
        manager.get_seq_lens_tensor([0, 1, 9], out=rows)
    assert out.tolist() == [7] * 3
    assert long.tolist() == [7] * 101
    assert rows.tolist() == [7] * 3
    assert observe(manager) == before
