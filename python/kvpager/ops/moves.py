"""The wrappers that move rows: writing tokens into their slots, copying blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpager.ops import checks, device_errors
from kvpager.ops.device_errors import REFUSALS, raise_typed
from kvpager.ops.layout import Layout, as_hnd
from kvpager.ops.schemas import registered_op

_write_kv = registered_op("write_kv")
_copy_blocks = registered_op("copy_blocks")


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "HND",
) -> None:
    """Write the K and V rows of tokens into their slots.

    Args:
        key: key [≥T, K, D] float; rows past T are not read.
        value: value [≥T, K, D], like `key`.
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; written.
        value_cache: value_cache, like `key_cache`; written.
        slot_mapping: slot_mapping [T] int64: block_id · S + offset for each row; −1 skips the row. Slots are distinct.
        layout: axes of the caches.

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.
        SlotError: a slot below −1 or past the pool; nothing is written.

    O(T · K · D).
    """
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    try:
        _write_kv(key, value, key_cache, value_cache, slot_mapping)
    except REFUSALS as error:
        raise_typed(error, checks.check_write, key, value, key_cache, value_cache, slot_mapping)
    if device_errors.CHECKED:
        device_errors.check_errors(key_cache.device)


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks within each cache: what copy-on-write asks for, before the next write.

    Args:
        caches: tensors [N, …] of 2 to 8 dimensions and any dtype and strides, on one device: a layer's key or value
            cache in either layout, or a view of a whole pool with the block first. Written.
        pairs: pairs [P, 2] int64 on the same device, or a list: (source, destination) block ids. No destination is a
            source or named twice. In a tensor on CUDA this last condition is not checked.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or a destination is a source or named twice.
        SlotError: a block id outside the pool; nothing is copied.

    O(P · bytes per block).
    """
    caches = list(caches)
    if not isinstance(pairs, Tensor):
        rows = [list(pair) for pair in pairs]
        if caches and caches[0].dim():
            checks.check_pair_values(rows, caches[0].shape[0])
        pairs = torch.tensor(rows, dtype=torch.int64, device=caches[0].device if caches else None).reshape(-1, 2)
    try:
        _copy_blocks(caches, pairs)
    except REFUSALS as error:
        raise_typed(error, checks.check_copy, caches, pairs)
    if device_errors.CHECKED:
        device_errors.check_errors(pairs.device)
