"""`merge_attention`: two attention results over disjoint sets of positions become that over their union."""

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.attention import reference
from kvpager.ops.attention.checks import check_lse, check_results
from kvpager.ops.attention.results import store, with_lse
from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.op import Op
from kvpager.ops.tensors import FLOAT_DTYPES, FLOAT_NAMES, check_rows, refuse


def _check(out: Tensor | None, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Metadata of `merge_attention`."""
    if out_a.dim() != 3 or out_a.dtype not in FLOAT_DTYPES:
        refuse("out_a", f"[T, H, D] {FLOAT_NAMES}", out_a)
    T, H, D = out_a.shape
    check_rows("out_a", out_a, "[T, H, D]", out_a, H, D)
    check_rows("out_b", out_b, "[T, H, D]", out_a, H, D)
    if out_b.shape[0] != T:
        raise ArgumentError("out_b", f"{T} rows", f"{out_b.shape[0]} rows")
    check_lse("lse_a", lse_a, out_a)
    check_lse("lse_b", lse_b, out_a)
    check_results(out, lse, out_a)


def _reference(out: Tensor, lse: Tensor | None, *parts: Tensor) -> None:
    store(out, lse, reference.merge_attention(*parts))


_MERGE_ATTENTION = Op(
    "merge_attention",
    "(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()",
    _check,
    _reference,
    made="out",
)


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Merge two attention results over disjoint sets of positions into that over their union, by log-sum-exp.

    Sinks belong into one of the two parts at most. A part with lse −inf is empty: its out is not read. The formula
    is out = Σ out_i · exp(lse_i − lse) with lse = log Σ exp(lse_i).

    Args:
        out_a: out_a [T, H, D] float.
        lse_a: lse_a [T, H] float32 (float64 with float64).
        out_b: out_b [T, H, D], like `out_a`.
        lse_b: lse_b [T, H], like `lse_a`.
        out: out [T, H, D] to write into; may be `out_a` or `out_b` itself.
        lse: lse [T, H] to write into; may be `lse_a` or `lse_b` itself.

    Returns:
        out.

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · H · D).
    """
    try:
        if out is None:
            out = out_a.new_empty(out_a.shape)
        _MERGE_ATTENTION.call(out, lse, out_a, lse_a, out_b, lse_b)
    except REFUSALS as error:
        _MERGE_ATTENTION.refuse(error, out, lse, out_a, lse_a, out_b, lse_b)
    return out


merge_attention_lse = with_lse(merge_attention)
