"""Who computes attention: kvpager's own kernels, its reference, or FlashInfer or flash-attn where they are installed.

`"native"` are the kernels of the native library and `"reference"` the specification in torch. `"auto"`, the default, is
native wherever the library has kernels for the device; on a GPU without them it is the first of FlashInfer and
flash-attn that is installed and takes the call, else the reference.

The two packages are handed HND or NHD caches as they are (views), float16 or bfloat16, on CUDA. They check no slot,
table entry or length: what kvpager's kernels refuse is undefined there.
"""

from importlib import import_module
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from kvpager.errors import ArgumentError, ConfigError
from kvpager.native import native_status
from kvpager.ops import reference
from kvpager.ops.backends.call import AttentionCall, Run

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


def chosen(name: str, query: Tensor, key_cache: Tensor, **given: Any) -> Run | None:
    """`planned` for query [T, H, D], key_cache [N, K, S, D] and an op's other arguments, whose bounds may be None."""
    if name == "auto" and native_status().cuda_kernels:
        return None
    if given["max_query_len"] is None:
        given["max_query_len"] = query.shape[0]
    if given["max_seq_len"] is None:
        given["max_seq_len"] = given["block_tables"].shape[1] * key_cache.shape[2]
    return planned(name, AttentionCall.of(query, key_cache, **given))


def planned(name: str, call: AttentionCall) -> Run | None:
    """How a backend runs calls of these lengths and tables; None: by the registered op, kvpager's own.

    Args:
        name: one of `BACKENDS`.
        call: tables, lengths, options and sizes.

    Raises:
        ArgumentError: no such backend, it is not installed, or it can't take this call: then it says what.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", name)
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

    def plan(self, step: object, query: Tensor, key_cache: Tensor, **given: Any) -> Run:
        """How to run one layer of a step.

        Args:
            step: what names the step: a plan is used again for the same object only, whatever its tensors hold.
            query, key_cache, given: as for `chosen`.

        Raises:
            ArgumentError: as `planned` does.
        """
        wanted = (query.shape, query.dtype, *given.values())
        is_new = step is not self._step or not all(map(_same, wanted, self._wanted))
        if self._run is None or is_new:
            self._run = chosen(self._name, query, key_cache, **given)
            self._step, self._wanted = step, wanted
        assert self._run is not None
        return self._run


def _same(one: object, two: object) -> bool:
    return one is two or (not isinstance(one, Tensor) and one == two)


def _automatic(call: AttentionCall) -> Run | None:
    if call.device.type != "cuda" or native_status().cuda_kernels:
        return None
    for name in _HANDED_OFF:
        if _missing(name) is None and _adapter(name).refusal(call) is None:
            return _adapter(name).plan(call)
    return None


def _adapter(name: str) -> _Adapter:
    module: _Adapter = import_module(f"kvpager.ops.backends.{name}")  # type: ignore[assignment]  # its functions
    return module


def _missing(name: str) -> str | None:
    if name in _HANDED_OFF:
        return _adapter(name).missing()
    return native_status().reason or None if name == "native" else None


def _reference(call: AttentionCall) -> Run:
    options: dict[str, Any] = {
        "scale": call.scale, "max_seq_len": call.max_seq_len, "window": call.window, "softcap": call.softcap,
        "sinks": call.sinks, "key_scale": call.key_scale, "value_scale": call.value_scale,
    }  # fmt: skip
    starts, lengths = call.query_start_loc, call.seq_lens

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        inputs = (query, key_cache, value_cache, call.block_tables)
        if starts is None:
            found = reference.paged_attention(*inputs, lengths, **options)
        else:
            found = reference.paged_prefill(*inputs, starts, lengths, max_query_len=call.max_query_len, **options)
        out.copy_(found[0])
        if lse is not None:
            lse.copy_(found[1])

    return run
