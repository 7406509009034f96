"""The wrapper of the fused front end of a step: QK-norm, RoPE and slot write of a fused QKV row in one pass."""

from functools import partial

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops import checks, device_errors
from kvpager.ops.device_errors import REFUSALS, raise_typed
from kvpager.ops.layout import Layout, as_hnd, scales_as_hnd
from kvpager.ops.schemas import registered_op

_qk_norm_rope_write = registered_op("qk_norm_rope_write")


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
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; written. D is even. Of the dtype of `qkv`; or int8 or
            float8_e4m3fn codes, when `qkv` is float32, float16 or bfloat16.
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
    try:
        if query_out is None:
            K, D = key_cache.shape[1], key_cache.shape[3]
            query_out = qkv.new_empty((slot_mapping.shape[0], qkv.shape[1] // D - 2 * K, D))
        arguments = (query_out, qkv, q_weight, k_weight, cos_sin, positions, key_cache, value_cache, slot_mapping)
        _qk_norm_rope_write(*arguments, eps=eps, key_scale=key_scale, value_scale=value_scale)
    except REFUSALS as error:
        if query_out is None:
            raise_typed(error, _check_widths, qkv, key_cache, value_cache, slot_mapping)
        raise_typed(
            error, partial(checks.check_fused, eps=eps, key_scale=key_scale, value_scale=value_scale),
            query_out, qkv, q_weight, k_weight, cos_sin, positions, key_cache, value_cache, slot_mapping,
        )  # fmt: skip
    if device_errors.CHECKED:
        device_errors.check_errors(query_out.device)
    return query_out


def _check_widths(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Says why no shape of `query_out` could be told."""
    _, K, _, D = checks.check_caches(key_cache, value_cache)
    if slot_mapping.dim() != 1:
        raise ArgumentError("slot_mapping", "[T]", f"{slot_mapping.dim()} dimensions")
    shape = ", ".join(str(size) for size in qkv.shape)
    raise ArgumentError("qkv", f"[T, (H + {2 * K}) · {D}] with H of at least 1", f"[{shape}]")
