"""The wrappers of the layers around attention: linear, RMSNorm with its residual, the gated activation.

The native CPU kernels compute each row alone, always in the same order: a row's result is the same, bit for bit,
whatever rows stand beside it and however many threads run. torch's own products promise that on no device.
"""

from functools import partial

from torch import Tensor

from kvpager.ops import layer_checks
from kvpager.ops.device_errors import REFUSALS, raise_typed
from kvpager.ops.schemas import registered_op

_linear = registered_op("linear")
_rms_norm = registered_op("rms_norm")
_silu_mul = registered_op("silu_mul")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """A linear layer, ``x · weightᵀ + bias``. Summed in float32 (float64 for float64) and rounded once.

    Args:
        x: x [T, C] float.
        weight: weight [N, C], like `x`; read as it lies, so no second copy of it is kept.
        bias: bias [N], like `x`; None = none.
        out: out [T, N] to write into, rows any distance apart; beside x.

    Returns:
        out [T, N].

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · N · C); for few rows the time is that of reading the weights once. On CUDA torch's product runs.
    """
    given = out
    try:
        if out is None:
            out = x.new_empty((x.shape[0], weight.shape[0]))
        _linear(out, x, weight, bias)
    except REFUSALS as error:
        raise_typed(error, layer_checks.check_linear, given, x, weight, bias)
    return out


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
    given = out
    try:
        if out is None:
            out = x.new_empty(x.shape)
        _rms_norm(out, x, weight, residual, eps=eps)
    except REFUSALS as error:
        raise_typed(error, partial(layer_checks.check_rms_norm, eps=eps), given, x, weight, residual)
    return out


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The gated activation of SwiGLU (arXiv:2002.05202), ``gate / (1 + e^−gate) · up``.

    Computed in float32 (float64 for float64) and rounded once.

    Args:
        gate: gate [T, I] float.
        up: up [T, I], like `gate`.
        out: out [T, I] to write into; may be one of the two.

    Returns:
        out [T, I].

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · I).
    """
    given = out
    try:
        if out is None:
            out = gate.new_empty(gate.shape)
        _silu_mul(out, gate, up)
    except REFUSALS as error:
        raise_typed(error, layer_checks.check_silu_mul, given, gate, up)
    return out
