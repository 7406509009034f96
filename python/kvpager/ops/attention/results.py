"""The results of attention: out, and the lse for callers who want it, the log of each softmax denominator."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

from torch import Tensor

from kvpager.ops.tensors import accumulate_dtype

P = ParamSpec("P")


def store(out: Tensor, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> None:
    """Write what a reference computed where the caller wants it."""
    out.copy_(result[0])
    if lse is not None:
        lse.copy_(result[1])


def with_lse(attend: Callable[P, Tensor]) -> Callable[P, tuple[Tensor, Tensor]]:
    """The form of an attention op that returns (out, lse); it makes `lse` like the first argument if none is given."""
    first = next(iter(signature(attend).parameters))

    @wraps(attend)
    def attend_lse(*arguments: P.args, **keywords: P.kwargs) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = keywords
        query = arguments[0] if arguments else given.get(first)
        if given.get("lse") is None and isinstance(query, Tensor):
            given["lse"] = query.new_empty(query.shape[:2], dtype=accumulate_dtype(query.dtype))
        out = attend(*arguments, **keywords)
        return out, given["lse"]

    attend_lse.__doc__ = f"`{attend.__name__}`, but returns (out, lse); the arguments are the same."
    attend_lse.__name__ = attend_lse.__qualname__ = f"{attend.__name__}_lse"
    return attend_lse
