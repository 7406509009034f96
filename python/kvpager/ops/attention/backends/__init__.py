"""Who computes attention: kvpager's own kernels, its reference, or FlashInfer or flash-attn where they are installed.

`"native"` are the kernels of the native library and `"reference"` the specification in torch. `"auto"`, the default, is
native wherever the library has kernels for the device; on a GPU without them it is the first of FlashInfer and
flash-attn that is installed and takes the call, else the reference.

The two packages are handed HND or NHD caches as they are (views), float16 or bfloat16, on CUDA. They check no slot,
table entry or length: what kvpager's kernels refuse is undefined there.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from kvpager.errors import ArgumentError, ConfigError
from kvpager.native import native_status
from kvpager.ops.attention import reference
from kvpager.ops.attention.backends.call import AttentionCall, Run
from kvpager.ops.attention.checks import check_attention
from kvpager.ops.attention.options import same
from kvpager.ops.attention.results import store

Backend = Literal["auto", "native", "flashinfer", "flash_attn", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)
_HANDED_OFF = ("flashinfer", "flash_attn")


class _Adapter(Protocol):
    """What a module of this package offers for the package it is named after."""

    @staticmethod
    def missing() -> str | None:
        """Why the package can't be used; None if it can."""

    @staticmethod
    def refusal(call: AttentionCall) -> str | None:
        """What of the call the package can't take; None if it takes all."""

    @staticmethod
    def plan(call: AttentionCall) -> Run:
        """Prepare calls of these lengths and tables: once per step, for all layers."""


def check_backend(name: str) -> None:
    """Refuse what is no backend, or is not there.

    Raises:
        ConfigError: an unknown name, a package that is not installed, or a library that is not loaded.
    """
    if name not in BACKENDS:
        raise ConfigError(f"`attention_backend`: wanted one of {', '.join(BACKENDS)}, got {name}")
    if (reason := _missing(name)) is not None:
        raise ConfigError(f"`attention_backend` is {name}, which can't be used: {reason}")


def planned(
    name: str, query: Tensor, key_cache: Tensor, tables: tuple[Tensor, ...], keywords: Mapping[str, Any]
) -> Run | None:
    """How a backend runs calls of these lengths and tables; None: by the registered op, kvpager's own.

    Args:
        name: one of `BACKENDS`.
        query: query [T, H, D].
        key_cache: key_cache [N, K, S, D].
        tables: block_tables and seq_lens, of a prefill with query_start_loc between them.
        keywords: bounds and options of the op.

    Raises:
        ArgumentError: no such backend, it is not installed, or it can't take this call: then it says what.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", name)
    call = AttentionCall.of(query, key_cache, tables, keywords)
    if name == "auto":
        return _automatic(call)
    if (reason := _missing(name)) is not None:
        raise ArgumentError("backend", f"one that can be used ({reason})", name)
    if name == "native":
        return None
    if name == "reference":
        return _reference(call)
    adapter = _adapter(name)
    if (reason := adapter.refusal(call)) is not None:
        raise ArgumentError("backend", f"one that takes {reason}", name)
    return adapter.plan(call)


class Planner:
    """Keeps a backend's plan of a step for all its layers that attend alike.

    Args:
        name: a backend that is planned: neither "auto" nor "native".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._step: object = None
        self._wanted: tuple[object, ...] = ()
        self._run: Run | None = None

    def plan(
        self,
        step: object,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        tables: tuple[Tensor, ...],
        keywords: dict[str, Any],
    ) -> Run:
        """How to run one layer of a step.

        Args:
            step: what names the step: a plan is used again for the same object only, whatever its tensors hold.
            query, tables, keywords: as for `planned`.
            caches: key_cache and value_cache of the layer.

        Raises:
            ArgumentError: shapes, dtypes, devices or options do not fit, and as `planned` does.
        """
        wanted = (query.shape, query.dtype, *tables, *keywords.items())
        is_same = len(wanted) == len(self._wanted) and all(map(same, wanted, self._wanted))
        if self._run is None or step is not self._step or not is_same:
            check_attention(None, None, query, *caches, *tables, **keywords)
            self._run = planned(self._name, query, caches[0], tables, keywords)
            self._step, self._wanted = step, wanted
        assert self._run is not None
        return self._run


def _automatic(call: AttentionCall) -> Run | None:
    if call.device.type != "cuda" or native_status().cuda_kernels:
        return None
    for name in _HANDED_OFF:
        if _missing(name) is None and _adapter(name).refusal(call) is None:
            return _adapter(name).plan(call)
    return None


def _adapter(name: str) -> _Adapter:
    module: _Adapter = import_module(f"kvpager.ops.attention.backends.{name}")  # type: ignore[assignment]
    return module


def _missing(name: str) -> str | None:
    if name in _HANDED_OFF:
        return _adapter(name).missing()
    return native_status().reason or None if name == "native" else None


def _reference(call: AttentionCall) -> Run:
    tables: tuple[Tensor, ...] = (call.block_tables, call.seq_lens)
    keywords: dict[str, Any] = {**call.options._asdict(), "max_seq_len": call.max_seq_len}
    attend: Callable[..., tuple[Tensor, Tensor]] = reference.paged_attention
    if call.query_start_loc is not None:
        tables = (call.block_tables, call.query_start_loc, call.seq_lens)
        keywords["max_query_len"] = call.max_query_len
        attend = reference.paged_prefill

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        store(out, lse, attend(query, key_cache, value_cache, *tables, **keywords))

    return run
