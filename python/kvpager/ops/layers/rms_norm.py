"""`rms_norm`: RMSNorm of rows, after adding them to a residual stream."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.op import Op
from kvpager.ops.tensors import accumulate_dtype, check_float_rows, check_rows_beside, check_vectors, check_written


def _check(out: Tensor | None, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float) -> None:
    """Metadata of `rms_norm`."""
    T, C = check_float_rows("x", x)
    check_vectors("weight", weight, 1, C, x.dtype, x.device)
    check_rows_beside("residual", residual, x, T, C)
    check_rows_beside("out", out, x, T, C)
    check_written("residual", residual)
    check_written("out", out)
    if not eps >= 0:
        raise ArgumentError("eps", "0 or a positive number", eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / √(mean(x²) + eps) · weight`` over the last dimension, in the accumulation dtype."""
    wide = x.to(accumulate_dtype(x.dtype))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)


def _reference(out: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float) -> None:
    if residual is not None:
        x = residual.add_(x)
    out.copy_(normed(x, weight, eps))


_RMS_NORM = Op(
    "rms_norm",
    "(Tensor(a!) out, Tensor x, Tensor weight, Tensor(b!)? residual=None, *, float eps) -> ()",
    _check,
    _reference,
    has_cuda_kernel=False,
    made="out",
)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x / √(mean(x²) + eps) · weight`` of every row (RMSNorm, arXiv:1910.07467), after adding x to a residual stream.

    Computed in float32 (float64 for float64) and rounded once; the residual is rounded before it is normed.

    Args:
        x: x [T, C] float.
        weight: weight [C], like `x`.
        eps: added to the mean of squares.
        residual: residual [T, C], like `x`: x is added to it, and the sum is normed; None = x itself is normed.
        out: out [T, C] to write into; may be x.

    Returns:
        out [T, C].

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · C).
    """
    try:
        if out is None:
            out = x.new_empty(x.shape)
        _RMS_NORM.call(out, x, weight, residual, eps=eps)
    except REFUSALS as error:
        _RMS_NORM.refuse(error, out, x, weight, residual, eps=eps)
    return out
