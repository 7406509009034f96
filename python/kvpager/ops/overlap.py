"""Whether a tensor can be written: no two of its elements may lie at one address, as those of an expanded one do."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError


def check_written(argument: str, tensor: Tensor | None) -> None:
    """Each dimension longer than 1 steps over all that the dimensions with smaller strides reach.

    As in csrc/checks.h. Symbolic sizes are left to the kernel: a guard on them would compile a step anew. O(dims).
    """
    if tensor is None:
        return
    shape, strides = tuple(tensor.shape), tensor.stride()
    if any(isinstance(number, torch.SymInt) for number in (*shape, *strides)) or 0 in shape:
        return
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            got = f"{list(shape)} with strides {list(strides)}"
            raise ArgumentError(argument, "elements that share no memory, since they are written", got)
        reach += (size - 1) * stride


def check_written_caches(
    key_cache: Tensor, value_cache: Tensor, key_scale: Tensor | None, value_scale: Tensor | None
) -> None:
    """Caches that are written, and their scales; one scale for all of a cache is only read, and passes."""
    for argument, tensor in (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("key_scale", key_scale),
        ("value_scale", value_scale),
    ):
        check_written(argument, tensor)
