"""The native library: what it says of itself, and life without it (in processes of their own)."""

import json
import os
import subprocess
import sys

import torch

from kvpager import native, ops
from kvpager.ops import device_errors

PROGRAM = """
import json, torch
import kvpager.native.library, pathlib
if {path!r}:
    kvpager.native.library.LIBRARY_PATH = pathlib.Path({path!r})
from kvpager import ops
cache = torch.zeros(2, 1, 4, 8)
ops.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache, torch.tensor([5]))
table = torch.ones(1, 1, dtype=torch.int32)
out = ops.paged_attention(torch.ones(1, 2, 8), cache, cache, table, torch.tensor([2], dtype=torch.int32), window=1)
try:
    ops.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache, torch.tensor([8]))
except IndexError as error:
    text = str(error)
status = kvpager.native.native_status()
print(json.dumps([bool((out == 1).all()), text, status.loaded, status.reason, status.cuda_reason]))
"""


def run(path="", **environment):
    program = PROGRAM.format(path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


def check_reference_ran(result, log, reason):
    right, text, loaded, said, cuda_reason = result
    assert right
    assert text == "`slot_mapping`: wanted -1 or a slot below 8, got 8 at token 0"
    assert not loaded
    assert reason in said
    assert cuda_reason == "the native library is not loaded"
    assert log.count("native kernels are inactive") == 1
    assert said in log


def test_without_the_library_the_reference_runs_and_says_so_once(tmp_path):
    missing = tmp_path / "_C.abi3.so"
    check_reference_ran(*run(missing), f"no library at `{missing}`")


def test_a_library_that_does_not_load_is_explained(tmp_path):
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"not a library")
    check_reference_ran(*run(broken), "does not load")


def test_reference_on_request():
    check_reference_ran(*run(KVPAGER_NATIVE="0"), "`KVPAGER_NATIVE=0` is set")


def test_status_of_this_process():
    status = native.native_status()
    assert status is native.native_status()
    if status.loaded:
        assert status.reason == ""
        assert "torch abi target 0x020b" in status.build
        assert status.path.exists()
        assert torch._C._dispatch_has_kernel_for_dispatch_key("kvpager::write_kv", "CPU")
    assert bool(status.cuda_reason) == (not status.cuda_kernels or not torch.cuda.is_available())
    ops.check_errors("cpu")


def test_texts_of_kernels_become_their_classes():
    error = device_errors.typed_error(RuntimeError("ArgumentError: `seq_lens`: wanted 1, got 2\nC++ frames"))
    assert isinstance(error, device_errors.ArgumentError)
    assert (error.argument, error.wanted, error.got) == ("seq_lens", "1", "2")
    error = device_errors.typed_error(RuntimeError("SlotError: `pairs`: wanted a, got b"))
    assert isinstance(error, device_errors.SlotError)
    assert str(error) == "`pairs`: wanted a, got b"
    other = RuntimeError("CUDA out of memory")
    assert device_errors.typed_error(other) is other
