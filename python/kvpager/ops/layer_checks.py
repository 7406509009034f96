"""What the layers around attention accept: shapes, dtypes and devices; see `checks`."""

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.checks import FLOAT_DTYPES, FLOAT_NAMES, check_vectors, refuse
from kvpager.ops.overlap import check_written


def check_linear(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Metadata of `linear`."""
    T, C = _check_first("x", x)
    if weight.dim() != 2:
        refuse("weight", f"[any, {C}]", weight)
    N = weight.shape[0]
    check_vectors("weight", weight, 2, C, x.dtype, x.device)
    if bias is not None:
        check_vectors("bias", bias, 1, N, x.dtype, x.device)
    _check_beside("out", out, x, T, N)
    check_written("out", out)


def check_rms_norm(
    out: Tensor | None, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float
) -> None:
    """Metadata of `rms_norm`."""
    T, C = _check_first("x", x)
    check_vectors("weight", weight, 1, C, x.dtype, x.device)
    _check_beside("residual", residual, x, T, C)
    _check_beside("out", out, x, T, C)
    check_written("residual", residual)
    check_written("out", out)
    if not eps >= 0:
        raise ArgumentError("eps", "0 or a positive number", eps)


def check_silu_mul(out: Tensor | None, gate: Tensor, up: Tensor) -> None:
    """Metadata of `silu_mul`."""
    T, I = _check_first("gate", gate)  # noqa: E741
    _check_beside("up", up, gate, T, I)
    _check_beside("out", out, gate, T, I)
    check_written("out", out)


def _check_first(argument: str, tensor: Tensor) -> tuple[int, int]:
    """Rows of floats; how many, and how wide."""
    if tensor.dim() != 2 or tensor.dtype not in FLOAT_DTYPES:
        refuse(argument, f"[rows, width] {FLOAT_NAMES}", tensor)
    check_vectors(argument, tensor, 2, tensor.shape[1], tensor.dtype, tensor.device)
    return tensor.shape[0], tensor.shape[1]


def _check_beside(argument: str, tensor: Tensor | None, like: Tensor, rows: int, width: int) -> None:
    if tensor is None:
        return
    check_vectors(argument, tensor, 2, width, like.dtype, like.device)
    if tensor.shape[0] != rows:
        raise ArgumentError(argument, f"{rows} rows", f"{tensor.shape[0]} rows")
