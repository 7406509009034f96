"""What callers pass in, read once and checked: integers, rows of integers, buffers.

A number out of range is an ArgumentError that names the parameter; what is no number at all, a bool among it, is a
TypeError that names it.
"""

import operator
import sys
from collections.abc import Iterable
from typing import Any, cast

from kvpager.errors import ArgumentError, SlotError

MAX_INT64 = 2**63 - 1  # slots are int64 in slot mappings, so are sequence ids
MAX_TOKEN_ID = 2**31 - 1
ID = "an id in 0..2^63-1"
COUNT = "a count in 0..2^63-1"
TOKEN_ID = "a token id in 0..2^31-1"

# Formats of the buffer protocol (those of the `struct` module) on machines where a C long has 64 bits.
INT64_FORMATS = ("q", "l")
INT32_FORMATS = ("i",)
_READABLE = "a 1-D buffer of int32 or int64 on the CPU, or a sequence of ints"


def read_natural(argument: str, value: object, wanted: str, high: int = MAX_INT64) -> int:
    """`value` as an int in 0..`high`."""
    integer = read_int(argument, value)
    if not 0 <= integer <= high:
        raise ArgumentError(argument, wanted, integer)
    return integer


def read_position(argument: str, value: object) -> int:
    """`value` as a position that some sequence could have."""
    position = read_int(argument, value)
    if not 0 <= position <= MAX_INT64:
        raise SlotError(f"`{argument}`: no sequence has a position {position}")
    return position


def read_int(argument: str, value: object) -> int:
    """`value` as an int of any size."""
    if isinstance(value, bool):
        raise TypeError(f"`{argument}`: wanted an int, got bool")
    try:
        return operator.index(cast("int", value))
    except TypeError:
        raise TypeError(f"`{argument}`: wanted an int, got {type(value).__name__}") from None


def check_length(argument: str, length: int, high: int) -> None:
    """Refuse a `length` above `high`."""
    if length > high:
        raise ArgumentError(argument, f"0 to {high} tokens", length)


def read_naturals(argument: str, values: Any, wanted: str, high: int = MAX_INT64) -> list[int]:
    """The integers of a tensor, a buffer or a sequence, each in 0..`high`."""
    view = as_buffer(argument, values)
    if view is not None:
        if view.ndim != 1 or view.format not in INT64_FORMATS + INT32_FORMATS:
            raise ArgumentError(argument, _READABLE, describe(view))
        values = view.tolist()
    elif not hasattr(values, "__iter__") or isinstance(values, set | frozenset | dict):  # those are no sequences
        raise TypeError(f"`{argument}`: wanted {_READABLE}, got {type(values).__name__}")
    return [read_natural(argument, value, wanted, high) for value in values]


def read_token_ids(values: Any) -> list[int]:
    """The token ids of a tensor, a buffer or a sequence."""
    return read_naturals("token_ids", values, TOKEN_ID, MAX_TOKEN_ID)


def read_count_or_ids(n: Any) -> int | list[int]:
    """The `n` of `append_tokens`: an int is a count, whatever has a dimension lists token ids."""
    view = as_buffer("token_ids", n)
    if view is not None and view.ndim > 0:
        return read_token_ids(n)
    if hasattr(n, "__index__"):
        return read_natural("n", n, COUNT)
    if not hasattr(n, "__iter__"):
        raise TypeError(f"`n`: wanted an int or token ids, got {type(n).__name__}")
    return read_token_ids(n)


def read_text(argument: str, value: object) -> str | None:
    """A salt or an adapter: a str or None, which is not the empty str."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{argument}`: wanted a str or None, got {type(value).__name__}")
    return value


def read_flag(argument: str, value: object) -> bool:
    """`value`, if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"`{argument}`: wanted a bool, got {type(value).__name__}")
    return value


def read_items(items: Iterable[tuple[int, int, str]], num_tokens: int) -> tuple[tuple[int, int, str], ...]:
    """The media items of a prompt of `num_tokens` tokens, each (start, stop, key)."""
    read = []
    free_from = 0  # where the item before ends
    for item in items:
        triple = tuple(item) if isinstance(item, Iterable) and not isinstance(item, str) else ()
        if len(triple) != 3:
            raise TypeError(f"`items`: wanted (start, stop, key), got {type(item).__name__}")
        start, stop, key = triple
        start, stop = read_int("items", start), read_int("items", stop)
        if not isinstance(key, str):
            raise TypeError(f"`items`: wanted a str as key, got {type(key).__name__}")
        if not free_from <= start < stop <= num_tokens:
            wanted = f"sorted, disjoint (start, stop, key) within the {num_tokens} tokens"
            raise ArgumentError("items", wanted, f"{start} to {stop}")
        read.append((start, stop, key))
        free_from = stop
    return tuple(read)


def num_elements(out: Any) -> int:
    """Elements of a tensor or buffer; 0 for what is none."""
    view = as_buffer("out", out)
    return 0 if view is None else view.nbytes // view.itemsize


def as_buffer(argument: str, value: Any) -> memoryview | None:
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
    except ValueError as error:  # an array whose elements have no format
        raise ArgumentError(argument, "a buffer of integers", f"{type(value).__name__} ({error})") from None


def describe(value: Any) -> str:
    """What came, in words."""
    try:
        view = memoryview(value)
    except TypeError:
        return type(value).__name__
    access = "a read-only" if view.readonly else "a"
    strided = "" if view.c_contiguous else " strided"
    return f"{access}{strided} buffer of shape {list(view.shape or ())} and format `{view.format}`"
