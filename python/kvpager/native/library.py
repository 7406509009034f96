"""Finds and loads the native library (`_C.abi3.so`, built from csrc/), and says what became of it.

The library lies in the package, or in the cache of `kvpager build-cuda`, and only registers kernels for the ops of
`kvpager.ops`. It is loaded once, when `kvpager.ops` is first imported. Without it everything works on the
reference kernels, slowly; that is logged once, as a warning of the logger `kvpager`. `KVPAGER_NATIVE=0` asks for the
reference kernels on purpose, `KVPAGER_NATIVE=1` for the packaged library whatever the cache holds, and
`KVPAGER_NATIVE=<path>` for a library that lies elsewhere.

The hot CPU kernels exist once for each instruction set; the best one of this CPU runs. `KVPAGER_CPU_ISA` forces another
one ("baseline", "avx2", "avx512" or "avx512_bf16"); if that can't run here it is logged and the best one stays.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvpager.errors import ConfigError
from kvpager.native.cache import LIBRARY, compiled_library

logger = logging.getLogger("kvpager")

_ASKED = os.environ.get("KVPAGER_NATIVE", "")
LIBRARY_PATH = Path(__file__).parents[1] / LIBRARY if _ASKED in ("", "0", "1") else Path(_ASKED).resolve()


@dataclass(frozen=True)
class NativeStatus:
    """What became of the native library in this process.

    Attributes:
        path: where the library is looked for, or was found.
        loaded: whether its kernels are registered.
        build: what it was built with, as it says itself; empty if not loaded.
        reason: why it is not loaded; empty if it is.
        cuda_kernels: whether it brought kernels for CUDA.
        cuda_reason: why it did not, or why they cannot run here; empty if they can.
        cpu_isas: instruction sets of the CPU kernels that can run here, from the plainest; empty if not loaded.
        cpu_isa_reason: why the one that runs at first was picked; `active_cpu_isa()` says which one runs now.
    """

    path: Path
    loaded: bool
    build: str
    reason: str
    cuda_kernels: bool
    cuda_reason: str
    cpu_isas: tuple[str, ...]
    cpu_isa_reason: str


@cache
def native_status() -> NativeStatus:
    """Load the native library if that has not been tried yet, and say what came of it. Never raises."""
    path, reason = _load()
    build = "" if reason else _text(_library(path).kvpager_build_info)
    cuda_kernels = "cuda" in build
    if reason:
        logger.warning("native kernels are inactive, slow reference kernels run instead: %s", reason)
        cuda_reason = "the native library is not loaded"
    elif not cuda_kernels:
        cuda_reason = "the library was built without nvcc; `kvpager build-cuda` compiles them"
    elif not torch.cuda.is_available():
        cuda_reason = "torch sees no CUDA device"
    else:
        cuda_reason = ""
    cpu_isas, cpu_isa_reason = ((), "the native library is not loaded") if reason else _settle_cpu_isa(_library(path))
    return NativeStatus(path, not reason, build, reason, cuda_kernels, cuda_reason, cpu_isas, cpu_isa_reason)


def active_cpu_isa() -> str:
    """The instruction set whose CPU kernels run now; empty if the native library is not loaded."""
    status = native_status()
    return _text(_library(status.path).kvpager_cpu_isa) if status.loaded else ""


def select_cpu_isa(name: str) -> None:
    """Let the CPU kernels of another instruction set run, in all threads, from the next call on: for comparisons.

    Args:
        name: one of `native_status().cpu_isas`.

    Raises:
        ConfigError: the set is unknown, or this CPU or the library lacks it.
    """
    status = native_status()
    available = status.cpu_isas
    if name not in available or not _library(status.path).kvpager_select_cpu_isa(name.encode()):
        raise ConfigError(f"`cpu_isa`: wanted one of {', '.join(available) or 'none, without the library'}, got {name}")


def _settle_cpu_isa(library: ctypes.CDLL) -> tuple[tuple[str, ...], str]:
    """Follow `KVPAGER_CPU_ISA`; returns the sets that can run and why the one that runs was picked."""
    available: list[str] = []
    lacking: dict[str, str] = {}
    while name := _text(library.kvpager_cpu_isa_name, len(available) + len(lacking)):
        if missing := _text(library.kvpager_cpu_isa_lacks, len(available) + len(lacking)):
            lacking[name] = missing
        else:
            available.append(name)
    asked = os.environ.get("KVPAGER_CPU_ISA", "")
    if asked in available:
        library.kvpager_select_cpu_isa(asked.encode())
        return tuple(available), f"`KVPAGER_CPU_ISA={asked}` is set"
    best = "; ".join(f"no {name}: this CPU lacks {feature}" for name, feature in lacking.items())
    reason = f"the best of this CPU{best and f' ({best})'}"
    if asked:
        why = f"this CPU lacks {lacking[asked]}" if asked in lacking else f"not one of {', '.join(available)}"
        logger.warning("`KVPAGER_CPU_ISA=%s` is not followed: %s", asked, why)
        reason += f"; `KVPAGER_CPU_ISA={asked}` is not followed: {why}"
    return tuple(available), reason


def _load() -> tuple[Path, str]:
    """Load the library; returns from where, or why that did not work."""
    if _ASKED == "0":
        return LIBRARY_PATH, "`KVPAGER_NATIVE=0` is set"
    if _ASKED == "" and (compiled := compiled_library(torch.__version__, gpu_arch())):
        if not (reason := _load_from(compiled)):
            return compiled, ""
        logger.warning("the packaged library is tried instead: %s", reason)
    return LIBRARY_PATH, _load_from(LIBRARY_PATH)


def _load_from(path: Path) -> str:
    """Returns why that did not work, or nothing."""
    if not path.exists():
        return f"no library at `{path}`; `make build` makes it, with a C++ compiler"
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:  # wrong platform, or symbols that this torch lacks
        return f"`{path}` does not load: {error}"
    return ""


def gpu_arch() -> str | None:
    """The architecture of the first GPU, as in `sm_90`; None if torch sees none."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}"


def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))  # loaded already: this finds it again


def _text(function: Any, *arguments: int) -> str:
    """What a C function of the library says: a string, or nothing for a null pointer."""
    function.restype = ctypes.c_char_p
    return (function(*arguments) or b"").decode()
