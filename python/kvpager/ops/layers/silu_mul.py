"""`silu_mul`: the gated activation of an MLP."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.op import Op
from kvpager.ops.tensors import accumulate_dtype, check_float_rows, check_rows_beside, check_written


def _check(out: Tensor | None, gate: Tensor, up: Tensor) -> None:
    """Metadata of `silu_mul`."""
    T, I = check_float_rows("gate", gate)  # noqa: E741
    check_rows_beside("up", up, gate, T, I)
    check_rows_beside("out", out, gate, T, I)
    check_written("out", out)


def _reference(out: Tensor, gate: Tensor, up: Tensor) -> None:
    wide = gate.to(accumulate_dtype(gate.dtype))
    out.copy_(F.silu(wide) * up)


_SILU_MUL = Op(
    "silu_mul",
    "(Tensor(a!) out, Tensor gate, Tensor up) -> ()",
    _check,
    _reference,
    has_cuda_kernel=False,
    made="out",
)


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
    try:
        if out is None:
            out = gate.new_empty(gate.shape)
        _SILU_MUL.call(out, gate, up)
    except REFUSALS as error:
        _SILU_MUL.refuse(error, out, gate, up)
    return out
