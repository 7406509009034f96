"""Whether a value that a caller brings is a number or a list, or can be a seed. A leaf: imports nothing of kvpager."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

MAX_SEED = 2**64 - 1  # whatever is called a seed is in 0 … this


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int, or numpy's of any width; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether it is an int or a float, or numpy's of any width; a bool is none, NaN is one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Whether it is a list or another sequence of things; a text is one thing."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a text that UTF-8 can hold: no lone surrogate in it."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
