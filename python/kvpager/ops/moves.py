"""The wrappers that move rows: tokens into their slots and out again, whole blocks, changed entries of a table."""

from collections.abc import Sequence
from functools import partial
from operator import index

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops import checks, device_errors, value_checks
from kvpager.ops.device_errors import REFUSALS, raise_typed
from kvpager.ops.layout import Layout, as_hnd, scales_as_hnd
from kvpager.ops.schemas import registered_op

_write_kv = registered_op("write_kv")
_copy_blocks = registered_op("copy_blocks")
_swap_blocks = registered_op("swap_blocks")
_update_tables = registered_op("update_tables")
_gather_kv = registered_op("gather_kv")


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
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; written. Of the dtype of `key`; or int8 or
            float8_e4m3fn codes, when `key` is float32, float16 or bfloat16.
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
    try:
        _write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)
    except REFUSALS as error:
        check = partial(checks.check_write, key_scale=key_scale, value_scale=value_scale)
        raise_typed(error, check, key, value, key_cache, value_cache, slot_mapping)
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
    caches = _cache_list("caches", caches)
    if not isinstance(pairs, Tensor):
        rows = _pair_rows(pairs)
        if caches and caches[0].dim():
            value_checks.check_pair_values(rows, caches[0].shape[0])
        pairs = torch.tensor(rows, dtype=torch.int64, device=caches[0].device if caches else None).reshape(-1, 2)
    try:
        _copy_blocks(caches, pairs)
    except REFUSALS as error:
        raise_typed(error, checks.check_copy, caches, pairs)
    if device_errors.CHECKED:
        device_errors.check_errors(pairs.device)


def _cache_list(argument: str, caches: Sequence[Tensor]) -> list[Tensor]:
    """The caches as a list. One tensor is none: going through it would take its blocks for caches."""
    if isinstance(caches, Tensor) or not isinstance(caches, Sequence):
        raise ArgumentError(argument, "a list of caches", type(caches).__name__)
    return list(caches)


def _pair_rows(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The pairs of a list as ints that a tensor can hold. O(P)."""
    try:
        rows = [[index(block) for block in pair] for pair in pairs]
    except TypeError as error:
        raise ArgumentError("pairs", "a tensor [P, 2] int64 or a list of (source, destination)", error) from None
    for row, pair in enumerate(rows):
        if len(pair) != 2 or not all(abs(block) < 2**63 for block in pair):
            raise ArgumentError("pairs", "two block ids in each", f"{tuple(pair)} at row {row}")
    return rows


def swap_blocks(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks from some caches to others, to another tier and back; scales are caches too.

    Between a GPU and pinned memory the copies are queued on the current stream and nothing waits: make a side stream
    current, so that they overlap with what computes, and order it with events. Pairs on the CPU go to the copy engines
    as one batch of merged runs (run by run on the default stream and under capture, where a graph keeps them for good);
    pairs on the GPU are read there by a kernel, which a captured graph replays with new pairs.

    Args:
        src: tensors [N, …] of 2 to 8 dimensions and any dtype and strides: where blocks come from.
        dst: as many tensors [N', …], each with blocks of the shape and dtype of its source and no memory in common with
            any source; written.
        pairs: pairs [P, 2] int64, or a list: (block of `src`, block of `dst`). No block of `dst` is named twice. In a
            tensor on CUDA the values are checked there, and this last condition is not.

    Raises:
        ArgumentError: shapes or dtypes do not fit, a destination is named twice, or memory beside a GPU is not pinned.
        SlotError: a block id outside its pool; nothing is copied.

    O(P · bytes per block).
    """
    src, dst = _cache_list("src", src), _cache_list("dst", dst)
    if not isinstance(pairs, Tensor):
        pairs = torch.tensor(_pair_rows(pairs), dtype=torch.int64).reshape(-1, 2)
    try:
        _swap_blocks(src, dst, pairs)
    except REFUSALS as error:
        raise_typed(error, checks.check_swap, src, dst, pairs)
    if device_errors.CHECKED:
        device_errors.check_errors(pairs.device)


def update_tables(block_tables: Tensor, changed: Tensor) -> None:
    """Write the changed entries of a block table: what a step of `DecodeBatch` lists, where the device keeps the table.

    Args:
        block_tables: block_tables [B, M] int32, any strides; written.
        changed: changed [C, 3] int32 on the same device: (row, column, block), no place twice. Entries whose row is −1
            are padding, so that a captured graph can take a list of fixed size.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or a row or column lies outside the table; nothing is
            written then.

    O(C), whatever the size of the table.
    """
    try:
        _update_tables(block_tables, changed)
    except REFUSALS as error:
        raise_typed(error, checks.check_update, block_tables, changed)
    if device_errors.CHECKED:
        device_errors.check_errors(block_tables.device)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: Layout = "HND",
    key: Tensor | None = None,
    value: Tensor | None = None,
    seq_start_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy the K and V of sequences out of the cache into contiguous rows, those of a quantised cache as numbers.

    Args:
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D].
        value_cache: value_cache, like `key_cache`.
        block_tables: block_tables [B, M] int32; entries past a row's length are not read.
        seq_lens: seq_lens [B] int32.
        key_scale: as in `paged_attention`.
        value_scale: as in `paged_attention`.
        dtype: of the rows, if the cache is quantised: float32 (default), float16 or bfloat16.
        layout: axes of the caches (and of scales with three dimensions).
        key: key [T, K, D] to write into, T at least the sum of the lengths; made if None.
        value: value, like `key`.
        seq_start_loc: seq_start_loc [B + 1] int32: row b of the batch goes to rows [b] … [b] + length − 1, and the last
            entry is at most T. Sequences lie against each other if None.

    Returns:
        (key, value). Rows of no sequence keep what they hold.

    Raises:
        ArgumentError: shapes, dtypes, devices, lengths or starts do not fit.
        SlotError: a table entry that is read names no block.

    O(sum of lengths · K · D).
    """
    checks.require_tensors(key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens)
    checks.check_caches(key_cache, value_cache)
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    if seq_start_loc is None:
        ends = seq_lens.cumsum(0, dtype=torch.int32)
        seq_start_loc = torch.cat([ends.new_zeros(1), ends])
    if key is None or value is None:
        shape = (max(int(seq_start_loc[-1]), 0), key_cache.shape[1], key_cache.shape[3])
        if dtype is None:
            dtype = torch.float32 if key_cache.dtype in checks.QUANTISED_DTYPES else key_cache.dtype
        key = key_cache.new_empty(shape, dtype=dtype) if key is None else key
        value = value_cache.new_empty(shape, dtype=dtype) if value is None else value
    tensors = (key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc)
    try:
        _gather_kv(*tensors, key_scale=key_scale, value_scale=value_scale)
    except REFUSALS as error:
        raise_typed(error, partial(checks.check_gather, key_scale=key_scale, value_scale=value_scale), *tensors)
    if device_errors.CHECKED:
        device_errors.check_errors(key_cache.device)
    return key, value
