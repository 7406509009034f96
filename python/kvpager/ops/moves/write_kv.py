"""`write_kv`: the K and V rows of tokens go into their slots of a cache."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.moves.quantise import quantise
from kvpager.ops.op import Op
from kvpager.ops.tensors import (
    Layout,
    as_hnd,
    check_caches,
    check_ints,
    check_rows,
    check_scale_values,
    check_scales,
    check_slot_values,
    check_written_caches,
    refuse,
    scales_as_hnd,
)


def _check(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Metadata of `write_kv`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    check_written_caches(key_cache, value_cache, key_scale, value_scale)
    check_rows("key", key, "[T, K, D]", key_cache, K, D)
    check_rows("value", value, "[T, K, D]", key_cache, K, D)
    if value.dtype is not key.dtype:
        refuse("value", "the dtype of `key`", value)
    check_ints("slot_mapping", slot_mapping, torch.int64, 1, "[T]", key_cache.device)
    rows = slot_mapping.shape[0]
    if key.shape[0] < rows:
        raise ArgumentError("key", f"at least {rows} rows, one for each slot", f"{key.shape[0]} rows")
    if value.shape[0] < rows:
        raise ArgumentError("value", f"at least {rows} rows, one for each slot", f"{value.shape[0]} rows")


def write_rows(*tensors: Tensor, key_scale: Tensor | None = None, value_scale: Tensor | None = None) -> None:
    """`write_kv` in plain torch, with the arguments of the op; the caches are HND."""
    key, value, key_cache, value_cache, slot_mapping = tensors
    N, _, S, _ = key_cache.shape
    check_slot_values(slot_mapping, N * S)
    check_scale_values(key_scale, value_scale)
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens]
    # index_put on [N, S, K, D]: slot -> (block, offset). A negative slot never gets here, it would wrap around.
    for cache, scale, rows in ((key_cache, key_scale, key), (value_cache, value_scale, value)):
        if scale is None:
            cache.transpose(1, 2)[slots // S, slots % S] = rows[tokens]
            continue
        fixed = scale.dim() <= 1
        codes, scales = quantise(rows[tokens], cache.dtype, scale if fixed else None)
        # Codes are moved as bytes: torch indexes no float8.
        cache.view(torch.int8).transpose(1, 2)[slots // S, slots % S] = codes.view(torch.int8)
        if not fixed:
            scale.transpose(1, 2)[slots // S, slots % S] = scales


# The scales are written, unless there is one for the whole cache.
_WRITE_KV = Op(
    "write_kv",
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
    "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()",
    _check,
    write_rows,
)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: Layout = "HND",
) -> None:
    """Write the K and V rows of tokens into their slots; into a quantised cache as codes, each row with its scale.

    Args:
        key: key [≥T, K, D] float; rows past T are not read.
        value: value [≥T, K, D], like `key`.
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; written. Of the dtype of `key`; or
            of codes (`kvpager.cache_dtypes`), when `key` is float32, float16 or bfloat16.
        value_cache: value_cache, like `key_cache`; written.
        slot_mapping: slot_mapping [T] int64: block_id · S + offset for each row; −1 skips the row. Slots are distinct.
        key_scale: of a quantised cache, key_scale [N, K, S] or, NHD, [N, S, K] float32, written: largest magnitude of
            the row over the largest code (`kvpager.ops.quantise`). Or [1], one scale for all, only read.
        value_scale: value_scale, like `key_scale`.
        layout: axes of the caches (and of scales with three dimensions).

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.
        SlotError: a slot below −1 or past the pool; nothing is written.

    O(T · K · D).
    """
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    _WRITE_KV(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)
