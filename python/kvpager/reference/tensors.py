"""The answers that kernels read: new tensors, or the caller's own buffers filled.

torch is imported where a tensor is made and nowhere else, so that the manager works without it.
"""

import math
from typing import TYPE_CHECKING, Any, cast

from kvpager.errors import ArgumentError
from kvpager.reference.arguments import (
    COUNT,
    ID,
    INT32_FORMATS,
    INT64_FORMATS,
    as_buffer,
    describe,
    num_elements,
    read_natural,
    read_naturals,
)

if TYPE_CHECKING:
    from kvpager.reference.block_manager import KVBlockManager


class TensorFace:
    """The calls of the block manager that give tensors: one row for each id, in the order of `ids`."""

    def slot_mapping_for_append(self, ids: Any, counts: Any = None, *, device: Any = None, out: Any = None) -> Any:
        """Append `counts[row]` tokens (default 1) to each sequence; their slots as int64 [T]. O(T)."""
        manager = cast("KVBlockManager", self)
        rows = read_naturals("ids", ids, ID)
        appended = [1] * len(rows) if counts is None else read_naturals("counts", counts, COUNT)
        if len(appended) != len(rows):
            raise ArgumentError("counts", f"one count for each of {len(rows)} ids", f"{len(appended)} counts")
        for sequence_id in rows:
            manager._find(sequence_id)
        work = list(zip(rows, appended, strict=True))
        manager._pool.require(*manager._demand(work))
        target = open_target(out, device, "int64", (sum(appended),))  # the last thing that can fail
        return target.fill(manager._append_rows(work))

    def get_block_table_tensor(
        self, ids: Any, max_blocks: int | None = None, *, device: Any = None, out: Any = None
    ) -> Any:
        """Block tables as int32 [B, M], rows padded with -1. O(B * M).

        M is `max_blocks`; if that is None, what `out` has room for, or else the longest table.
        """
        manager = cast("KVBlockManager", self)
        tables = [manager.block_table(sequence_id) for sequence_id in read_naturals("ids", ids, ID)]
        longest = max(map(len, tables), default=0)
        width = longest
        if max_blocks is not None:
            wanted = f"at least {longest}, the longest table"
            width = read_natural("max_blocks", max_blocks, wanted)
            if width < longest:
                raise ArgumentError("max_blocks", wanted, width)
        elif out is not None and tables:
            width = num_elements(out) // len(tables)
            if width < longest:
                raise ArgumentError("out", f"room for {longest} blocks in a row, the longest table", describe(out))
        target = open_target(out, device, "int32", (len(tables), width) if tables else (0, 0))
        return target.fill([block for table in tables for block in table + [-1] * (width - len(table))])

    def get_seq_lens_tensor(self, ids: Any, *, device: Any = None, out: Any = None) -> Any:
        """Sequence lengths as int32 [B]. O(B)."""
        manager = cast("KVBlockManager", self)
        lengths = [manager.sequence_length(sequence_id) for sequence_id in read_naturals("ids", ids, ID)]
        return open_target(out, device, "int32", (len(lengths),)).fill(lengths)


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

    def __init__(self, out: Any, kind: str, size: int) -> None:
        formats = INT64_FORMATS if kind == "int64" else INT32_FORMATS
        wanted = f"a writable, contiguous {kind} buffer of {size} elements on the CPU"
        view = as_buffer("out", out)
        if view is None or view.readonly or not view.c_contiguous or view.format not in formats:
            raise ArgumentError("out", wanted, describe(out))
        if num_elements(view) != size:
            raise ArgumentError("out", wanted, describe(out))
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
