"""From integers to tensors and back: what callers pass in is read here, and what kernels read is written here.

torch is imported where a tensor is made and nowhere else, so that the manager works without it.
"""

import math
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    from kvpager.reference.block_manager import KVBlockManager

# Formats of the buffer protocol (those of the `struct` module) on machines where a C long has 64 bits.
_INT64_FORMATS = ("q", "l")
_INT32_FORMATS = ("i",)
_MAX_INT64 = 2**63 - 1
_ID = "an id in 0..2^63-1"


class TensorFace:
    """The calls of the block manager that give tensors: one row for each id, in the order of `ids`."""

    def slot_mapping_for_append(self, ids: Any, counts: Any = None, *, device: Any = None, out: Any = None) -> Any:
        """Append `counts[row]` tokens (default 1) to each sequence; their slots as int64 [T]. O(T)."""
        manager = cast("KVBlockManager", self)
        rows = read_integers("ids", ids, _ID)
        appended = [1] * len(rows) if counts is None else read_integers("counts", counts, "a count in 0..2^63-1")
        if len(appended) != len(rows):
            raise ArgumentError("counts", f"one count for each of {len(rows)} ids", len(appended))
        for sequence_id in rows:
            manager._find(sequence_id)
        work = list(zip(rows, appended, strict=True))
        manager._require(*manager._demand(work))
        target = open_target(out, device, "int64", (sum(appended),))  # the last thing that can fail
        return target.fill(manager._append_rows(work))

    def get_block_table_tensor(
        self, ids: Any, max_blocks: int | None = None, *, device: Any = None, out: Any = None
    ) -> Any:
        """Block tables as int32 [B, M], rows padded with -1. O(B * M).

        M is `max_blocks`; if that is None, what `out` has room for, or else the longest table.
        """
        manager = cast("KVBlockManager", self)
        tables = [manager.block_table(sequence_id) for sequence_id in read_integers("ids", ids, _ID)]
        longest = max(map(len, tables), default=0)
        width = longest
        if max_blocks is not None:
            wanted = f"at least the longest table ({longest} blocks)"
            width = read_integer("max_blocks", max_blocks, longest, _MAX_INT64, wanted)
        elif out is not None and tables:
            width = max(longest, _num_elements(out) // len(tables))
        target = open_target(out, device, "int32", (len(tables), width) if tables else (0, 0))
        return target.fill([block for table in tables for block in table + [-1] * (width - len(table))])

    def get_seq_lens_tensor(self, ids: Any, *, device: Any = None, out: Any = None) -> Any:
        """Sequence lengths as int32 [B]. O(B)."""
        manager = cast("KVBlockManager", self)
        lengths = [manager.sequence_length(sequence_id) for sequence_id in read_integers("ids", ids, _ID)]
        return open_target(out, device, "int32", (len(lengths),)).fill(lengths)


def read_integer(argument: str, value: object, low: int, high: int, wanted: str) -> int:
    """`value` as an int in `low`..`high`, or an ArgumentError that names `argument`."""
    try:
        integer = operator.index(cast("int", value))
    except TypeError:
        raise ArgumentError(argument, wanted, type(value).__name__) from None
    if not low <= integer <= high:
        raise ArgumentError(argument, wanted, integer)
    return integer


def read_integers(argument: str, values: Any, wanted: str) -> list[int]:
    """The integers of a tensor, a buffer or a sequence, each in 0..2^63-1."""
    view = _as_buffer(argument, values)
    if view is not None:
        if view.ndim != 1 or view.format not in _INT64_FORMATS + _INT32_FORMATS:
            raise ArgumentError(argument, "a 1-D int64 or int32 buffer, or a sequence of integers", _describe(view))
        values = view.tolist()
    elif not isinstance(values, Sequence) or isinstance(values, str):
        raise ArgumentError(argument, "a 1-D int64 or int32 buffer, or a sequence of integers", type(values).__name__)
    return [read_integer(argument, value, 0, _MAX_INT64, wanted) for value in values]


class _NewTensor:
    """Where an answer goes when the caller gave no `out`. Made first: a device may be missing or full."""

    def __init__(self, device: Any, kind: str, shape: tuple[int, ...]) -> None:
        import torch

        self._tensor = torch.empty(shape, dtype=getattr(torch, kind), device=device)

    def fill(self, values: list[int]) -> Any:
        import torch

        return self._tensor.copy_(torch.tensor(values, dtype=self._tensor.dtype).reshape(self._tensor.shape))


class _CallersBuffer:
    """Where an answer goes when the caller gave an `out`: checked before anything changes, filled at the end."""

    def __init__(self, out: Any, kind: str, num_elements: int) -> None:
        formats = _INT64_FORMATS if kind == "int64" else _INT32_FORMATS
        wanted = f"a writable, C-contiguous {kind} buffer of {num_elements} elements"
        view = _as_buffer("out", out)
        if view is None:
            raise ArgumentError("out", wanted, type(out).__name__)
        fits = _num_elements(view) == num_elements and view.format in formats
        if not fits or view.readonly or not view.c_contiguous:
            raise ArgumentError("out", wanted, _describe(view))
        self._out, self._view = out, view

    def fill(self, values: list[int]) -> Any:
        if values:  # a view of nothing can't be cast
            flat = self._view.cast("B").cast(cast("Any", self._view.format))
            for position, value in enumerate(values):
                flat[position] = value
        return self._out


def open_target(out: Any, device: Any, kind: str, shape: tuple[int, ...]) -> _NewTensor | _CallersBuffer:
    """The place for an answer of this kind and shape, or an ArgumentError if `out` can't hold it."""
    if out is None:
        return _NewTensor(device, kind, shape)
    if device is not None:
        raise ArgumentError("device", "None together with `out`", device)
    return _CallersBuffer(out, kind, math.prod(shape))


def _num_elements(out: Any) -> int:
    view = _as_buffer("out", out)
    return 0 if view is None else view.nbytes // view.itemsize


def _as_buffer(argument: str, value: Any) -> memoryview | None:
    """`value` as a view of its memory; None if it is no buffer. A tensor lends its memory through numpy."""
    torch = sys.modules.get("torch")  # who passes a tensor has imported torch
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.numpy()
        except (TypeError, RuntimeError):
            came = f"a {value.dtype} tensor on {value.device}" + (" that requires grad" if value.requires_grad else "")
            raise ArgumentError(argument, "a tensor on the CPU that numpy can view", came) from None
    try:
        return memoryview(value)
    except TypeError:
        return None


def _describe(view: memoryview) -> str:
    words = ["read-only"] * view.readonly + ["strided"] * (not view.c_contiguous)
    return ", ".join([*words, f"format `{view.format}` and shape {view.shape}"])
