"""The numbers of a quantised cache: rows of codes, each with a float32 scale (code · scale = number).

A row is the D elements of one token and head. Its own scale makes its largest magnitude the largest code of the dtype,
so nothing is calibrated on data that came before. These functions are the specification of what `write_kv` stores.
"""

import torch
from torch import Tensor

from kvpager.cache_dtypes import CACHE_DTYPES, one_of
from kvpager.errors import ArgumentError
from kvpager.ops.tensors import refuse, require_tensors

LARGEST_CODE = {getattr(torch, dtype.torch_name): dtype.largest_code for dtype in CACHE_DTYPES if dtype.largest_code}


def quantise(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows.

    Args:
        rows: rows [..., D] float32, float16 or bfloat16.
        dtype: of codes, as in `kvpager.cache_dtypes`.
        scale: scale [1], one for all rows; None gives each row its own.

    Returns:
        codes [..., D] of `dtype` and scales [...] float32. Rounded half to even; what does not fit under a given scale
        becomes the largest code. A row of zeros has codes 0 and a positive scale. A row with a NaN or an inf has codes
        0 and the scale NaN: it reads as NaN, whatever the dtype can hold.

    Raises:
        ArgumentError: codes of another dtype were asked for, or `rows` is no tensor.
    """
    require_tensors(rows=rows)
    if dtype not in LARGEST_CODE:
        raise ArgumentError("dtype", one_of(map(str, LARGEST_CODE)), dtype)
    largest = LARGEST_CODE[dtype]
    rows = rows.float()
    if scale is None:
        poisoned = ~torch.isfinite(rows).all(-1)
        rows = rows.masked_fill(poisoned.unsqueeze(-1), 0.0)
        top = rows.abs().amax(-1).clamp(min=largest * torch.finfo(torch.float32).tiny)
        # `largest / top` would round twice: it is the product with the reciprocal.
        factor, scales = torch.div(largest, top).unsqueeze(-1), (top / largest).masked_fill(poisoned, torch.nan)
    else:
        factor, scales = 1.0 / scale, scale.expand(rows.shape[:-1])
    scaled = (rows * factor).clamp(-largest, largest)
    codes = scaled.nan_to_num(0.0).round() if not dtype.is_floating_point else scaled
    return codes.to(dtype), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., D] float32 of codes [..., D] with scales [...] or [1].

    Raises:
        ArgumentError: one is no tensor, or the scales are not one for each row of codes or one for all.
    """
    require_tensors(codes=codes, scales=scales)
    if codes.dim() == 0:
        refuse("codes", "[..., D]", codes)
    if scales.numel() != 1 and scales.shape != codes.shape[:-1]:
        refuse("scales", f"{list(codes.shape[:-1])} or [1]", scales)
    return codes.float() * (scales if scales.dim() <= 1 and codes.dim() > 2 else scales.unsqueeze(-1))
