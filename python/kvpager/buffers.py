"""Memory that Python lends to Rust: tensors, arrays and other buffers, to read ids from and to write answers into.

A tensor lends its memory through numpy, without a copy. torch is imported inside the call that makes a tensor, never
before.
"""

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from typing_extensions import Buffer

    Memory: TypeAlias = torch.Tensor | np.ndarray[Any, np.dtype[Any]] | Buffer
    Integers: TypeAlias = Memory | Sequence[int]
    Device: TypeAlias = torch.device | str | int


def lend(argument: str, value: Any) -> Any:
    """`value` as something that Rust may read more than once: a numpy view if it is a tensor, a list if an iterator.

    Rust could ask a tensor for its view itself, but only after it failed to find a buffer, which costs a microsecond.
    """
    convert = _conversion_of(value.__class__)
    return value if convert is None else convert(argument, value)


@cache  # by class, for `isinstance` with an abstract class costs as much as the call that follows
def _conversion_of(kind: type) -> Callable[[str, Any], Any] | None:
    torch = sys.modules.get("torch")  # who passes a tensor has imported torch
    tensor_class: Any = getattr(torch, "Tensor", ())
    if issubclass(kind, tensor_class):
        return _view_of_tensor
    return _list_of_iterator if issubclass(kind, Iterator) else None


def _view_of_tensor(argument: str, tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        came = f"a {tensor.dtype} tensor on {tensor.device}" + (" that requires grad" if tensor.requires_grad else "")
        raise ArgumentError(argument, "a tensor on the CPU that numpy can view", came) from None


def _list_of_iterator(_: str, iterator: Any) -> Any:
    return list(iterator)


def fill_new(shape: tuple[int, ...], dtype: str, device: "Device | None", fill: Callable[[Any], None]) -> object:
    """A new tensor on `device`, filled by Rust. It is made first: a device may be missing, or full."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if tensor.device.type == "cpu":
        fill(tensor)
        return tensor
    host = torch.empty(shape, dtype=tensor.dtype)
    fill(host)
    return tensor.copy_(host)


def num_values(values: Any) -> int:
    """Rows of `values`; 0 for what has no length, which Rust then refuses by name."""
    try:
        return len(values)
    except TypeError:
        return 0


def sum_values(counts: Any) -> int:
    """Sum of `counts`; 0 for what can't be summed, which Rust then refuses by name."""
    with suppress(TypeError, NotImplementedError):  # no buffer, or one that Rust refuses
        counts = memoryview(counts).tolist()
    try:
        return max(0, sum(map(operator.index, counts)))
    except TypeError:
        return 0


def refuse_device(device: object) -> None:
    """Refuse a `device` that came together with an `out`."""
    if device is not None:
        raise ArgumentError("device", "None together with `out`", device)


def read_width(max_blocks: int, longest: int) -> int:
    """`max_blocks`, if no table is longer."""
    wanted = f"at least {longest}, the longest table"
    try:
        width = operator.index(max_blocks)
    except TypeError:
        raise ArgumentError("max_blocks", wanted, type(max_blocks).__name__) from None
    if width < longest:
        raise ArgumentError("max_blocks", wanted, width)
    return width


def check_room(out: Any, num_rows: int, width: int) -> None:
    """Refuse an `out` that is a buffer but not of `num_rows` * `width` elements."""
    try:
        view = memoryview(out)
    except TypeError:
        return  # no buffer at all: Rust says so
    if view.nbytes // view.itemsize != num_rows * width:
        wanted = f"a writable, contiguous int32 buffer of {num_rows * width} elements on the CPU"
        raise ArgumentError("out", wanted, f"a buffer of shape {list(view.shape or ())} and format `{view.format}`")
