"""The memory of a `DecodeBatch`: tensors when asked for, any buffers else, held no longer than the batch."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from kvpager import BatchBuffers, DecodeBatch, KVBlockManager
from kvpager.errors import ArgumentError

WITHOUT_TORCH = """
import sys
from array import array
from kvpager import BatchBuffers, DecodeBatch, KVBlockManager

def matrix(rows, columns):
    return memoryview(bytearray(4 * rows * columns)).cast("i", [rows, columns])

def make_set():
    return BatchBuffers(matrix(2, 3), array("i", [0] * 2), array("i", [0] * 3), array("q", [0] * 4), matrix(5, 3))

manager = KVBlockManager(8, 4)
batch = DecodeBatch(manager, make_set(), make_set())
manager.create_sequence(7)
batch.add(7)
step = batch.step([3])
assert batch.buffers[step.buffer_set].slot_mapping.tolist() == [0, 1, 2, -1]
assert batch.buffers[0].block_tables.tolist() == [[0, -1, -1], [-1, -1, -1]]
loaded = {"torch", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""


def test_neither_torch_nor_numpy_is_loaded():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_new_tensors_have_the_sizes_asked_for():
    batch = DecodeBatch.with_capacity(KVBlockManager(8, 4), 2, 3, max_tokens=5, max_changes=4)
    for buffers in batch.buffers:
        assert buffers.block_tables.tolist() == [[-1] * 3] * 2
        assert buffers.slot_mapping.tolist() == [-1] * 5
        assert buffers.slot_mapping.dtype == torch.int64
        assert buffers.changed.shape == (4, 3)
    assert repr(batch) == "DecodeBatch(0 of 2 rows; room for 3 blocks, 5 tokens, 4 changes)"
    steady = DecodeBatch.with_capacity(KVBlockManager(8, 4), 2, 3)
    assert (steady.max_tokens, steady.max_changes) == (2, 5)


@pytest.mark.parametrize("argument", ["max_rows", "max_blocks", "max_tokens", "max_changes"])
def test_a_negative_size_is_refused_by_name(argument):
    sizes = {"max_rows": 2, "max_blocks": 2, argument: -1}
    with pytest.raises(ArgumentError, match=f"`{argument}`: wanted a size of at least 0, got -1"):
        DecodeBatch.with_capacity(KVBlockManager(8, 4), **sizes)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (2, 0)])
def test_a_batch_without_room_steps_without_rows(sizes):
    batch = DecodeBatch.with_capacity(KVBlockManager(8, 4), *sizes, max_tokens=0, max_changes=0)
    step = batch.step()
    assert (step.num_rows, step.num_tokens, step.num_changes, step.upload_table) == (0, 0, 0, False)
    assert repr(step) == "BatchStep(buffer_set=0, num_rows=0, num_tokens=0, num_changes=0, upload_table=False)"
    assert batch.step() != step


def test_memory_is_held_as_long_as_the_batch_and_no_longer():
    class Watched(np.ndarray):
        pass

    def make_set():
        shapes = ((2, 3), 2, 3, 4, (5, 3))
        dtypes = (np.int32, np.int32, np.int32, np.int64, np.int32)
        return [np.zeros(shape, dtype).view(Watched) for shape, dtype in zip(shapes, dtypes, strict=True)]

    first, second = make_set(), make_set()
    watched = [weakref.ref(buffer) for buffer in first + second]
    manager = KVBlockManager(8, 4)
    batch = DecodeBatch(manager, BatchBuffers(*first), BatchBuffers(*second))
    del first, second
    manager.create_sequence(1)
    batch.add(1)
    assert batch.step().num_rows == 1
    assert all(buffer() is not None for buffer in watched)
    del batch
    gc.collect()
    assert all(buffer() is None for buffer in watched)


def test_a_circle_of_manager_and_batch_is_collected():
    class Engine(KVBlockManager):
        batch: DecodeBatch

    manager = Engine(8, 4)
    manager.batch = DecodeBatch.with_capacity(manager, 2, 3)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
