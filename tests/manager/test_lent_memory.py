"""Memory that callers lend: what can be read or written, what is refused, and for how long it is held."""

import threading
from array import array

import numpy as np
import pytest
import torch

from kvpager.errors import ArgumentError, KVPagerError, OutOfBlocksError
from kvpager.manager import BatchBuffers, DecodeBatch, KVBlockManager

PACKAGES = {"numpy": np.asarray, "torch": lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype))}
DTYPES = ["int32", "int64"]


class Array(np.ndarray):
    """A class of its own."""


class Tensor(torch.Tensor):
    """A class of its own."""


@pytest.fixture
def manager(make):
    """Sequences 0 and 1 of 3 and 4 tokens."""
    manager = make(16, 4)
    for sequence_id, length in enumerate([3, 4]):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
    return manager


def misaligned(dtype, size):
    return np.zeros(8 * size + 1, np.uint8)[1:][: np.dtype(dtype).itemsize * size].view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("size", [0, 1, 3, 15, 16, 17, 63, 64, 65, 66, 67, 1000, 8192, 9000])
def test_every_token_id_arrives(make, package, dtype, size):
    """Around the cache lines in which they are read, and in calls so long that other threads may run."""
    token_ids = [(position * 7919) % 2**31 for position in range(size)]
    manager = make(-(-9000 // 16) + 1, 16, enable_prefix_caching=True)
    out = package([7] * size, dtype="int64")
    assert manager.admit(1, package(token_ids, dtype=dtype), out=out).slots is out
    assert out.tolist() == list(range(size))
    manager.commit(1, size)
    assert manager.match_prefix([*token_ids, 0]) == size // 16 * 16
    for at in {0, size // 2, size - size % 16 - 1} & set(range(size - size % 16)):
        other = [*token_ids, 0]
        other[at] ^= 1
        assert manager.match_prefix(package(other, dtype="int64")) == at // 16 * 16


BAD_TOKEN_IDS = [
    ("int32", -1),
    ("int64", -1),
    ("int64", 2**31),
    ("int64", 2**32),
    ("int64", 2**32 + 5),
    ("int64", -(2**63)),
]


@pytest.mark.parametrize(("dtype", "bad"), BAD_TOKEN_IDS)
@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("at", [0, 1, 70, 99])
def test_a_token_id_out_of_range_is_named(make_caching, observe, package, dtype, bad, at):
    manager = make_caching(16, 8)
    before, token_ids = observe(manager), [5] * 100
    token_ids[at] = bad
    with pytest.raises(ArgumentError, match=rf"^`token_ids`: wanted a token id in 0\.\.2\^31-1, got {bad}$"):
        manager.admit(1, package(token_ids, dtype=dtype), out=np.zeros(100, np.int64))
    assert observe(manager) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_negative_id_or_count_is_named(manager, observe, package, dtype):
    before = observe(manager)
    two = package([0, 1], dtype=dtype)
    with pytest.raises(ArgumentError, match=r"^`ids`: .*, got -3$"):
        manager.slot_mapping_for_append(package([1, -3], dtype=dtype), out=np.zeros(2, np.int64))
    with pytest.raises(ArgumentError, match=r"^`counts`: .*, got -9$"):
        manager.slot_mapping_for_append(two, package([-9, 1], dtype=dtype), out=np.zeros(2, np.int64))
    with pytest.raises(ArgumentError, match=r"^`ns`: .*, got -1$"):
        manager.commit_batch(two, package([3, -1], dtype=dtype))
    assert observe(manager) == before


UNREADABLE = {
    "unsigned": np.array([0, 1], np.uint64),
    "short": np.array([0, 1], np.int16),
    "float": np.array([0.0, 1.0]),
    "bool": np.array([False, True]),
    "objects": np.array([0, 1], object),
    "swapped bytes": np.array([0, 1], np.dtype("int64").newbyteorder("S")),
    "times": np.array([0, 1], "timedelta64[s]"),
    "misaligned": misaligned("int64", 2),
    "two dimensions": np.array([[0, 1]]),
    "no dimension": np.array(0),
    "float tensor": torch.zeros(2),
    "short tensor": torch.zeros(2, dtype=torch.int16),
    "bool tensor": torch.zeros(2, dtype=torch.bool),
    "tensor of two dimensions": torch.zeros(1, 2, dtype=torch.int64),
    "tensor of no dimension": torch.tensor(0),
    "tensor that requires grad": torch.zeros(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.zeros(2)),
    "tensor elsewhere": torch.zeros(2, dtype=torch.int64, device="meta"),
    "sparse tensor": torch.tensor([0, 1]).to_sparse(),
    "tensor to be negated": torch.tensor([0.0, 1.0 + 1j]).conj().imag,
}


@pytest.mark.parametrize("values", UNREADABLE.values(), ids=UNREADABLE)
def test_what_can_not_be_read_is_refused_by_name(make_caching, observe, values):
    manager = make_caching(16, 4)
    for sequence_id in (0, 1):
        manager.create_sequence(sequence_id)
    before, out = observe(manager), np.zeros(2, np.int64)
    calls = {
        "ids": lambda: manager.slot_mapping_for_append(values, out=out),
        "counts": lambda: manager.slot_mapping_for_append([0, 1], values, out=out),
        "ns": lambda: manager.commit_batch([0, 1], values),
        "token_ids": lambda: manager.admit(2, values, out=out),
    }
    for argument, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
    assert not out.any()
    assert observe(manager) == before


READABLE = {
    "array of a subclass": np.array([1, 0]).view(Array),
    "reversed array": np.array([0, 1])[::-1],
    "array without strides": np.broadcast_to(np.int64(1), (2,)),
    "read-only array": np.frombuffer(bytes(8), np.int32),
    "tensor of a subclass": torch.tensor([1, 0]).as_subclass(Tensor),
    "strided tensor": torch.tensor([1, 9, 0, 9])[::2],
    "tensor without strides": torch.tensor([1]).expand(2),
    "part of a tensor": torch.tensor([9, 1, 0, 9])[1:3],
    "tensor of inference": torch.inference_mode()(lambda: torch.tensor([1, 0]))(),
    "lazy clone": torch.tensor([1, 0], dtype=torch.int32)._lazy_clone(),
}


@pytest.mark.parametrize("ids", READABLE.values(), ids=READABLE)
def test_ids_that_are_no_plain_array(manager, ids):
    expected = [[3, 4][sequence_id] for sequence_id in ids.tolist()]
    assert manager.get_seq_lens_tensor(ids, out=torch.zeros(2, dtype=torch.int32)).tolist() == expected


UNWRITABLE = {
    "misaligned": lambda n: misaligned("int64", n),
    "reversed": lambda n: np.zeros(n, np.int64)[::-1],
    "one element over and over": lambda n: torch.zeros(1, dtype=torch.int64).expand(n),
    "times": lambda n: np.zeros(n, "timedelta64[s]"),
    "other int": lambda n: np.zeros(2 * n, np.int32),
    "other int in a tensor": lambda n: torch.zeros(2 * n, dtype=torch.int32),
    "sparse tensor": lambda n: torch.zeros(n, dtype=torch.int64).to_sparse(),
    "tensor elsewhere": lambda n: torch.zeros(n, dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("make_out", UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_can_not_be_written_is_refused(manager, observe, make_out):
    before, out = observe(manager), make_out(2)
    with pytest.raises(ArgumentError) as caught:
        manager.slot_mapping_for_append([0, 1], out=out)
    assert caught.value.argument == "out"
    with pytest.raises(ArgumentError) as caught:
        manager.admit(5, [1, 2], out=make_out(2))
    assert caught.value.argument == "out"
    assert observe(manager) == before


def test_a_tensor_of_a_transformation(manager, observe):
    before = observe(manager)
    lengths = np.zeros(2, np.int32)

    def has_none(ids):
        with pytest.raises((KVPagerError, RuntimeError)):
            manager.get_seq_lens_tensor(ids, out=lengths)
        return ids

    torch.vmap(has_none)(torch.zeros(3, 2, dtype=torch.int64))
    with torch._subclasses.FakeTensorMode():
        has_none(torch.tensor([0, 1]))
    assert not lengths.any()
    assert observe(manager) == before


OUTS = {
    "array of a subclass": np.zeros(2, np.int64).view(Array),
    "tensor of a subclass": torch.zeros(2, dtype=torch.int64).as_subclass(Tensor),
    "part of a tensor": torch.zeros(4, dtype=torch.int64)[1:3],
    "column": torch.zeros(2, 1, dtype=torch.int64),
    "row of one": np.zeros((2, 3), np.int64)[:, 1:2][:1].repeat(2, axis=0),
}


@pytest.mark.parametrize("out", OUTS.values(), ids=OUTS)
def test_outs_that_are_no_plain_array(manager, out):
    assert manager.slot_mapping_for_append([0, 1], out=out) is out
    assert out.flatten().tolist() == [3, 8]


def test_a_lazy_clone_is_written_alone(manager):
    source = torch.tensor([7, 7])
    manager.slot_mapping_for_append([0, 1], out=source._lazy_clone())
    assert source.tolist() == [7, 7]


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_ids_and_out_may_be_the_same_memory(make_caching, package):
    manager = make_caching(16, 4)
    for sequence_id in (0, 1):
        manager.create_sequence(sequence_id)
    both = package([1, 0], dtype="int64")
    assert manager.slot_mapping_for_append(both, out=both) is both
    assert both.tolist() == [0, 4]
    prompt = package([3, 1, 2], dtype="int64")
    assert manager.admit(2, prompt, out=prompt).num_computed_tokens == 0
    assert prompt.tolist() == [8, 9, 10]
    lengths = package([0, 1], dtype="int32")
    assert manager.get_seq_lens_tensor(lengths, out=lengths).tolist() == [1, 1]


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_the_memory_is_looked_for_at_each_call(manager, package):
    """The same object, elsewhere."""
    ids, out = package([0, 1], dtype="int64"), package([7, 7], dtype="int64")
    manager.slot_mapping_for_append(ids, out=out)
    assert out.tolist() == [3, 8]
    if package is np.asarray:
        ids, out = ids.copy(), out.copy()
        ids.resize(3, refcheck=False)
        out.resize(3, refcheck=False)
    else:
        ids.set_(torch.tensor([0, 1, 0]))
        out.set_(torch.tensor([7, 7, 7]))
    manager.slot_mapping_for_append(ids, out=out)
    assert out.tolist() == [12, 9, 13]


OUT_CALLS = {
    "slots": lambda manager, out: manager.slot_mapping_for_append([0, 1], out=out),
    "tables": lambda manager, out: manager.get_block_table_tensor([0, 1], out=out),
    "lengths": lambda manager, out: manager.get_seq_lens_tensor([0, 1], out=out),
    "prompt": lambda manager, out: manager.admit(7, [1, 2], out=out),
}


@pytest.mark.parametrize("call", OUT_CALLS.values(), ids=OUT_CALLS)
@pytest.mark.parametrize("format_", ["q", "i"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_memory_is_let_go_of_whether_it_was_written_or_refused(manager, call, format_, size):
    """An `array` can't grow while somebody holds it."""
    out = array(format_, [7] * size)
    try:
        call(manager, out)
    except ArgumentError:
        assert out.tolist() == [7] * size
    out.append(1)
    assert len(out) == size + 1


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_format_that_names_a_byte_order_is_refused(manager, observe, order):
    """Whichever it is: the formats of numpy's and torch's own arrays name none."""
    out = np.zeros(2, np.dtype("int64").newbyteorder(order))
    before = observe(manager)
    with pytest.raises(ArgumentError, match=r"^`out`: wanted a writable, contiguous int64 buffer of 2 elements"):
        manager.slot_mapping_for_append([0, 1], out=out)
    assert observe(manager) == before


def test_read_only_memory_is_read_but_never_written(manager, observe):
    ids, out = np.array([0, 1]), np.zeros(2, np.int64)
    ids.flags.writeable = out.flags.writeable = False
    before = observe(manager)
    for refused in (out, memoryview(bytes(16)).cast("q")):
        with pytest.raises(ArgumentError) as caught:
            manager.slot_mapping_for_append(ids, out=refused)
        assert caught.value.argument == "out"
    assert observe(manager) == before
    assert manager.slot_mapping_for_append(ids).tolist() == [3, 8]


def test_the_buffers_of_a_batch_can_not_be_resized():
    manager = KVBlockManager(8, 4)
    growing, tensor = array("i", [0] * 2), torch.zeros(2, dtype=torch.int32)

    def buffers(seq_lens):
        table, changed = np.zeros((2, 3), np.int32), np.zeros((5, 3), np.int32)
        return BatchBuffers(table, seq_lens, np.zeros(3, np.int32), np.zeros(4, np.int64), changed)

    batch = DecodeBatch(manager, buffers(growing), buffers(tensor))
    with pytest.raises(BufferError):
        growing.append(1)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(9000)
    manager.create_sequence(1)
    batch.add(1)
    batch.step()
    batch.step()
    # torch has changed its own sizes before it refused.
    assert (growing.tolist(), tensor[:2].tolist()) == ([1, 0], [2, 0])
    del batch
    growing.append(1)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_tables_are_written_whole_or_not_at_all(make, package):
    """More entries than are written with the interpreter held, and fewer."""
    for num_columns in (9, 70_000):
        manager = make(16, 1)
        for sequence_id, length in enumerate([3, 9]):
            manager.create_sequence(sequence_id)
            manager.append_tokens(sequence_id, length)
        ids, out = package([1, 0], dtype="int64"), package([[7] * num_columns] * 2, dtype="int32")
        manager.append_token(1) if num_columns == 9 else None
        if num_columns == 9:
            with pytest.raises(ArgumentError, match="room for 10 blocks in a row, the longest table"):
                manager.get_block_table_tensor(ids, out=out)
            assert out.flatten().tolist() == [7] * 18
        else:
            manager.get_block_table_tensor(ids, out=out)
            assert out[:, :10].tolist() == [[*range(3, 12), -1], [0, 1, 2, *[-1] * 7]]
            assert bool((out[:, 10:] == -1).all())


def test_a_batch_reads_arrays_and_tensors(batch_kit):
    manager = batch_kit.manager(16, 4, enable_prefix_caching=True)
    sets = [
        batch_kit.buffers(*(np.zeros(shape, np.int32) for shape in ((2, 4), 2, 3)), np.zeros(4, np.int64), changed)
        for changed in np.zeros((2, 9, 3), np.int32)
    ]
    batch = batch_kit.batch(manager, *sets)
    for sequence_id in (7, 8):
        manager.create_sequence(sequence_id)
        batch.add(sequence_id)
    batch.step(torch.tensor([1, 3]), torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    batch.commit(np.array([1, 3], np.int32))
    batch.step(np.array([0, 1], np.int32))
    batch.commit(torch.tensor([1, 4]), np.array([5]))
    assert manager.match_prefix(np.array([2, 3, 4, 5, 6])) == 4
    for counts, token_ids, argument in (
        (torch.tensor([1, -1]), None, "counts"),
        (torch.ones(2), None, "counts"),
        (None, torch.tensor([1, 2**31]), "token_ids"),
        (None, torch.tensor([1, 2], device="meta"), "token_ids"),
    ):
        with pytest.raises(ArgumentError) as caught:
            batch.step(counts, token_ids)
        assert caught.value.argument == argument
    assert [manager.sequence_length(sequence_id) for sequence_id in (7, 8)] == [1, 4]


def test_b126_threads_that_wait_for_each_other_write_into_their_own_memory(observe):
    """The lock is taken more often than not, by calls that hold the interpreter and by long ones that don't."""
    manager = KVBlockManager(4096, 4, enable_prefix_caching=True)
    failures = []

    def work(thread):
        ids = np.arange(thread * 10, thread * 10 + 4)
        outs = {"array": np.zeros(4, np.int64), "tensor": torch.zeros(4, dtype=torch.int64)}
        long_ids, long_out = torch.from_numpy(ids.repeat(2500)), torch.zeros(4 * 2500, 40, dtype=torch.int32)
        rng = np.random.default_rng(thread)
        try:
            for turn in range(60):
                for sequence_id in ids.tolist():
                    prompt = torch.from_numpy(rng.integers(0, 2, 9))
                    room = torch.full((9,), -7)
                    computed, _ = manager.admit(sequence_id, prompt, out=room)
                    assert room[: 9 - computed].tolist() == manager.slots(sequence_id, computed, 9)
                    assert room[9 - computed :].tolist() == [-7] * computed
                for out in outs.values():
                    manager.slot_mapping_for_append(ids, out=out)
                    length = manager.sequence_length(int(ids[0]))
                    assert out.tolist() == [manager.slots(i, length - 1, length)[0] for i in ids.tolist()]
                if turn % 20 == thread:
                    manager.get_block_table_tensor(long_ids, out=long_out)
                    assert long_out[::2500, :3].tolist() == [manager.block_table(i) for i in ids.tolist()]
                for sequence_id in ids.tolist():
                    manager.release_sequence(sequence_id)
        except OutOfBlocksError:
            failures.append("the pool is large enough")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert observe(manager)["stats"]["live"] == 0
