"""Where an answer goes that kernels read: a new tensor, or the caller's own buffer.

Both are opened before anything changes, for a device may be missing and a buffer may be too small. torch is imported
where a tensor is made and nowhere else, so that the manager works without it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from kvpager.errors import ArgumentError
from kvpager.reference.arguments import INT32_FORMATS, INT64_FORMATS, as_buffer, describe, num_elements


class _NewTensor:
    """Where an answer goes when the caller gave no `out`. Made first: a device may be missing or full."""

    def __init__(self, device: Any, kind: str, shape: tuple[int, ...]) -> None:
        import torch

        # Never torch's default device, which need not be the CPU.
        place = partial(torch.empty, dtype=getattr(torch, kind), device="cpu" if device is None else device)
        try:
            self._tensor = place(shape)
        except Exception:
            _check_device(place, device)
            raise

    def fill(self, values: list[int]) -> Any:
        import torch

        host = torch.tensor(values, dtype=self._tensor.dtype, device="cpu")
        return self._tensor.copy_(host.reshape(self._tensor.shape))


def _check_device(place: Callable[[tuple[()]], object], device: Any) -> None:
    """Name `device` if not even one element can be placed there."""
    try:
        place(())
    except TypeError as error:
        raise TypeError(f"`device`: wanted a torch.device, a str or an int, got {type(device).__name__}") from error
    except Exception as error:
        raise ArgumentError("device", "a device that torch has here", device) from error


class _CallersBuffer:
    """Where an answer goes when the caller gave an `out`: checked before anything changes, filled at the end."""

    def __init__(self, out: Any, kind: str, size: int, *, at_least: bool = False) -> None:
        formats = INT64_FORMATS if kind == "int64" else INT32_FORMATS
        amount = f"at least {size}" if at_least else f"{size}"
        wanted = f"a writable, contiguous {kind} buffer of {amount} elements on the CPU"
        view = as_buffer("out", out)
        if view is None or view.readonly or not view.c_contiguous or view.format not in formats:
            raise ArgumentError("out", wanted, describe(out))
        room = num_elements(view)
        if room < size or (room > size and not at_least):
            raise ArgumentError("out", wanted, describe(out))
        self._out, self._view = out, view

    def fill(self, values: list[int]) -> Any:
        fill_front(self._view, values)
        return self._out


def fill_front(view: memoryview, values: list[int]) -> None:
    """Write `values` to the front of a buffer of any shape."""
    if values:  # a view of nothing can't be cast
        flat = view.cast("B").cast(cast("Any", view.format))
        for position, value in enumerate(values):
            flat[position] = value


def open_target(out: Any, device: Any, kind: str, shape: tuple[int, ...]) -> _NewTensor | _CallersBuffer:
    """The place for an answer of this kind and shape, or an ArgumentError if `out` can't hold it."""
    if out is None:
        return _NewTensor(device, kind, shape)
    if device is not None:
        raise ArgumentError("device", "None together with `out`", device)
    return _CallersBuffer(out, kind, math.prod(shape))


def open_room(out: Any, size: int) -> _NewTensor | _CallersBuffer:
    """The place for `size` slots: a new tensor, or the front of an `out` that has room for them."""
    return _NewTensor(None, "int64", (size,)) if out is None else _CallersBuffer(out, "int64", size, at_least=True)
