"""Finds and loads the native library (`_C.abi3.so`, built from csrc/), and says what became of it.

The library lies beside this file and only registers kernels for the ops of `kvpager.ops.schemas`. It is loaded once,
when `kvpager.ops` is first imported. Without it everything works on the reference kernels, slowly; that is logged once,
as a warning of the logger `kvpager`. `KVPAGER_NATIVE=0` asks for the reference kernels on purpose.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("kvpager")

LIBRARY_PATH = Path(__file__).with_name("_C.abi3.so")


@dataclass(frozen=True)
class NativeStatus:
    """What became of the native library in this process.

    Attributes:
        path: where the library is looked for.
        loaded: whether its kernels are registered.
        build: what it was built with, as it says itself; empty if not loaded.
        reason: why it is not loaded; empty if it is.
        cuda_kernels: whether it brought kernels for CUDA.
        cuda_reason: why it did not, or why they cannot run here; empty if they can.
    """

    path: Path
    loaded: bool
    build: str
    reason: str
    cuda_kernels: bool
    cuda_reason: str


@cache
def native_status() -> NativeStatus:
    """Load the native library if that has not been tried yet, and say what came of it. Never raises."""
    reason = _load()
    build = "" if reason else _build_info()
    cuda_kernels = "cuda" in build
    if reason:
        logger.warning("native kernels are inactive, slow reference kernels run instead: %s", reason)
        cuda_reason = "the native library is not loaded"
    elif not cuda_kernels:
        cuda_reason = "the library was built without nvcc"
    elif not torch.cuda.is_available():
        cuda_reason = "torch sees no CUDA device"
    else:
        cuda_reason = ""
    return NativeStatus(LIBRARY_PATH, not reason, build, reason, cuda_kernels, cuda_reason)


def _load() -> str:
    """Load the library; returns why that did not work, or nothing."""
    if os.environ.get("KVPAGER_NATIVE") == "0":
        return "`KVPAGER_NATIVE=0` is set"
    if not LIBRARY_PATH.exists():
        return f"no library at `{LIBRARY_PATH}`; `make build` makes it, with a C++ compiler"
    try:
        torch.ops.load_library(LIBRARY_PATH)  # type: ignore[no-untyped-call]
    except OSError as error:  # wrong platform, or symbols that this torch lacks
        return f"`{LIBRARY_PATH}` does not load: {error}"
    return ""


def _build_info() -> str:
    symbol = ctypes.CDLL(str(LIBRARY_PATH)).kvpager_build_info
    symbol.restype = ctypes.c_char_p
    return bytes(symbol()).decode()
