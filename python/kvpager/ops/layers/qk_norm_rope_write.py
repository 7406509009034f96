"""`qk_norm_rope_write`: QK-norm, RoPE and the write into slots, of a fused QKV row in one pass."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops import device_errors
from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.layers.rms_norm import normed
from kvpager.ops.moves.write_kv import write_rows
from kvpager.ops.op import Op, check_errors
from kvpager.ops.tensors import (
    Layout,
    accumulate_dtype,
    as_hnd,
    check_caches,
    check_ints,
    check_rows,
    check_scale_values,
    check_scales,
    check_slot_values,
    check_vectors,
    check_written,
    check_written_caches,
    refuse,
    scales_as_hnd,
)


def _check(
    query_out: Tensor | None,
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
    """Metadata of `qk_norm_rope_write`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    check_written_caches(key_cache, value_cache, key_scale, value_scale)
    device = key_cache.device
    if D % 2:
        raise ArgumentError("key_cache", "an even head dim, which turns in pairs", D)
    check_ints("slot_mapping", slot_mapping, torch.int64, 1, "[T]", device)
    check_ints("positions", positions, torch.int64, 1, "[T]", device)
    if query_out is None:  # no shape could be told for it
        refuse("qkv", f"[T, (H + {2 * K}) · {D}] with H of at least 1", qkv)
    if query_out.dim() != 3:
        refuse("query_out", "[T, H, D]", query_out)
    H = query_out.shape[1]
    if H == 0 or H % K:
        raise ArgumentError("query_out", f"a number of heads that is a multiple of the {K} kv heads", f"{H} heads")
    check_rows("query_out", query_out, "[T, H, D]", key_cache, H, D)
    check_written("query_out", query_out)
    width = (H + 2 * K) * D
    check_vectors("qkv", qkv, 2, width, query_out.dtype, device)
    check_vectors("cos_sin", cos_sin, 2, D, accumulate_dtype(query_out.dtype), device)
    for argument, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_vectors(argument, weight, 1, D, query_out.dtype, device)
    rows = slot_mapping.shape[0]
    for argument, tensor in (("query_out", query_out), ("qkv", qkv), ("positions", positions)):
        if tensor.shape[0] < rows:
            raise ArgumentError(argument, f"at least {rows} rows, one for each slot", f"{tensor.shape[0]} rows")
    if not eps >= 0:
        raise ArgumentError("eps", "0 or a positive number", eps)


def _check_position_values(positions: Tensor, num_positions: int) -> None:
    """Every position is a row of the table of angles. O(T), reads the values."""
    bad = (positions < 0) | (positions >= num_positions)
    if bad.any():
        token = int(bad.nonzero()[0])
        wanted = f"0 to {num_positions - 1} (rows of `cos_sin`)"
        raise ArgumentError("positions", wanted, f"{int(positions[token])} at token {token}")


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn pair j of x [T, heads, D], values j and j + D/2, by angle j of cos_sin [T, 1, D]: cosines, then sines."""
    low, high = x.chunk(2, dim=-1)
    cosines, sines = cos_sin.chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)


def _reference(
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
    T, H = slot_mapping.shape[0], query_out.shape[1]
    N, K, S, D = key_cache.shape
    positions = positions[:T]
    _check_position_values(positions, cos_sin.shape[0])
    check_slot_values(slot_mapping, N * S)
    check_scale_values(key_scale, value_scale)
    query, key, value = torch.split(qkv[:T].view(T, H + 2 * K, D), [H, K, K], dim=1)
    angles = cos_sin[positions].unsqueeze(1)  # [T, 1, D]
    wide = accumulate_dtype(qkv.dtype)
    query = query.to(wide) if q_weight is None else normed(query, q_weight, eps)
    key = key.to(wide) if k_weight is None else normed(key, k_weight, eps)
    query_out[:T] = rotate(query, angles).to(query_out.dtype)
    key = rotate(key, angles)
    dtype = qkv.dtype if key_scale is None else key.dtype  # codes are made of the wide numbers, so nothing rounds twice
    write_rows(
        key.to(dtype), value.to(dtype), key_cache, value_cache, slot_mapping,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip


_QK_NORM_ROPE_WRITE = Op(
    "qk_norm_rope_write",
    "(Tensor(a!) query_out, Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, Tensor positions, "
    "Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slot_mapping, *, float eps, "
    "Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None) -> ()",
    _check,
    _reference,
    made="query_out",
)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 1e-6,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: Layout = "HND",
    query_out: Tensor | None = None,
) -> Tensor:
    """Norm the query and key heads of each token, turn them to its position, write key and value into its slot.

    ``x / √(mean(x²) + eps) · weight`` per head (RMSNorm, arXiv:1910.07467), then pair j, values j and j + D/2, turns by
    the token's angle j (RoPE, arXiv:2104.09864). Computed in float32 (float64 for float64) and rounded once.

    Args:
        qkv: qkv [≥T, (H + 2·K)·D] float: query heads, then key heads, then value heads; rows past T are not read.
        q_weight: q_weight [D], like `qkv`; None = the query heads are not normed.
        k_weight: k_weight [D], like `qkv`; None = the key heads are not normed.
        cos_sin: cos_sin [P, D] float32 (float64 with float64): of each position D/2 cosines, then D/2 sines.
        positions: positions [≥T] int64: each token's row of `cos_sin`.
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; written. D is even. Of the dtype of `qkv`; or
            of codes (`kvpager.cache_dtypes`), when `qkv` is float32, float16 or bfloat16.
        value_cache: value_cache, like `key_cache`; written.
        slot_mapping: slot_mapping [T] int64, as in `write_kv`: −1 writes nothing; the query is computed all the same.
        eps: added to the mean of squares.
        key_scale: of a quantised cache, as in `write_kv`.
        value_scale: of a quantised cache, as in `write_kv`.
        layout: axes of the caches (and of scales with three dimensions).
        query_out: query_out [≥T, H, D] to write into, any strides with a contiguous last dimension; beside qkv.

    Returns:
        query_out [T, H, D], ready for attention.

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit, or a position has no row in `cos_sin`.
        SlotError: a slot below −1 or past the pool. Nothing is written then.

    O(T · (H + 2·K) · D).
    """
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    options = {"eps": eps, "key_scale": key_scale, "value_scale": value_scale}
    others = (qkv, q_weight, k_weight, cos_sin, positions, key_cache, value_cache, slot_mapping)
    try:
        if query_out is None:
            K, D = key_cache.shape[1], key_cache.shape[3]
            query_out = qkv.new_empty((slot_mapping.shape[0], qkv.shape[1] // D - 2 * K, D))
        _QK_NORM_ROPE_WRITE.call(query_out, *others, **options)
    except REFUSALS as error:
        _QK_NORM_ROPE_WRITE.refuse(error, query_out, *others, **options)
    if device_errors.CHECKED:
        check_errors(query_out.device)
    return query_out
