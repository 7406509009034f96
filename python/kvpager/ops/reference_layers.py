"""The layers around attention in plain torch: products by its matrix library, the rest step by step."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvpager.ops import checks


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """See `kvpager.ops.linear`."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float) -> None:
    """See `kvpager.ops.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.to(checks.accumulate_dtype(x.dtype))
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight)


def silu_mul(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """See `kvpager.ops.silu_mul`."""
    wide = gate.to(checks.accumulate_dtype(gate.dtype))
    out.copy_(F.silu(wide) * up)
