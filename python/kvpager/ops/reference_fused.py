"""The fused front end of a step in plain torch: norm, turn, write, one after the other."""

import torch
from torch import Tensor

from kvpager.ops import checks, value_checks
from kvpager.ops.reference import write_kv


def qk_norm_rope_write(
    query_out: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """See `kvpager.ops.qk_norm_rope_write`; caches are HND."""
    T, H = slot_mapping.shape[0], query_out.shape[1]
    N, K, S, D = key_cache.shape
    positions = positions[:T]
    value_checks.check_position_values(positions, cos_sin.shape[0])
    value_checks.check_slot_values(slot_mapping, N * S)
    value_checks.check_scale_values(key_scale, value_scale)
    query, key, value = torch.split(qkv[:T].view(T, H + 2 * K, D), [H, K, K], dim=1)
    angles = cos_sin[positions].unsqueeze(1)  # [T, 1, D]
    query_out[:T] = rotate(rms_norm(query, q_weight, eps), angles).to(query_out.dtype)
    key = rotate(rms_norm(key, k_weight, eps), angles)
    dtype = qkv.dtype if key_scale is None else key.dtype  # codes are made of the wide numbers, so nothing rounds twice
    write_kv(
        key.to(dtype), value.to(dtype), key_cache, value_cache, slot_mapping,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / √(mean(x²) + eps) · weight`` over the last dimension, in the accumulation dtype; x if weight is None."""
    wide = x.to(checks.accumulate_dtype(x.dtype))
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turns pair j of x [T, heads, D], values j and j + D/2, by angle j of cos_sin [T, 1, D]: cosines, then sines."""
    low, high = x.chunk(2, dim=-1)
    cosines, sines = cos_sin.chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
