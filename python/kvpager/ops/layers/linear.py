"""`linear`: products with weights, each row summed alone and always in the same order by the native CPU kernel."""

import torch
from torch import Tensor

from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.op import Op
from kvpager.ops.tensors import check_float_rows, check_rows_beside, check_vectors, check_written, refuse


def _check(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Metadata of `linear`."""
    T, C = check_float_rows("x", x)
    if weight.dim() != 2:
        refuse("weight", f"[any, {C}]", weight)
    N = weight.shape[0]
    check_vectors("weight", weight, 2, C, x.dtype, x.device)
    if bias is not None:
        check_vectors("bias", bias, 1, N, x.dtype, x.device)
    check_rows_beside("out", out, x, T, N)
    check_written("out", out)


def _reference(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


_LINEAR = Op(
    "linear",
    "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None) -> ()",
    _check,
    _reference,
    has_cuda_kernel=False,
    made="out",
)


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
    try:
        if out is None:
            out = x.new_empty((x.shape[0], weight.shape[0]))
        _LINEAR.call(out, x, weight, bias)
    except REFUSALS as error:
        _LINEAR.refuse(error, out, x, weight, bias)
    return out
