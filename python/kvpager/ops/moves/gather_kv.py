"""`gather_kv`: the K and V of sequences are copied out of a cache, as contiguous rows."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.moves.quantise import dequantise
from kvpager.ops.op import Op
from kvpager.ops.tensors import (
    QUANTISED_DTYPES,
    Layout,
    as_hnd,
    check_caches,
    check_rows,
    check_scale_values,
    check_scales,
    check_sequence_values,
    check_starts,
    check_tables,
    check_written,
    refuse,
    require_tensors,
    scales_as_hnd,
)


def gather(cache: Tensor, block_table: Tensor, start: int, stop: int, scale: Tensor | None = None) -> Tensor:
    """Rows start … stop−1 of one sequence, [stop − start, K, D], from a cache [N, K, S, D] through its table [M].

    Those of a quantised cache, with its `scale`, come as float32.
    """
    S = cache.shape[2]
    positions = torch.arange(start, stop, device=cache.device)
    blocks = block_table[positions // S].long()
    if scale is None:
        return cache.transpose(1, 2)[blocks, positions % S]
    codes = cache.view(torch.int8).transpose(1, 2)[blocks, positions % S].view(cache.dtype)
    return dequantise(codes, scale if scale.dim() <= 1 else scale.transpose(1, 2)[blocks, positions % S])


def _check(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    seq_start_loc: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Metadata of `gather_kv`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    check_rows("key", key, "[T, K, D]", key_cache, K, D)
    check_rows("value", value, "[T, K, D]", key_cache, K, D)
    if value.dtype is not key.dtype or value.shape != key.shape:
        refuse("value", "the shape and dtype of `key`", value)
    check_written("key", key)
    check_written("value", value)
    check_tables(block_tables, seq_lens, key_cache.device)
    check_starts("seq_start_loc", seq_start_loc, seq_lens)


def _check_start_values(seq_start_loc: list[int], seq_lens: list[int], num_rows: int) -> None:
    """Rows of `gather_kv`: they lie one sequence after another and fit into `key`."""
    written = 0
    for row, length in enumerate(seq_lens):
        start, stop = seq_start_loc[row], seq_start_loc[row + 1]
        if start < written or stop < start + length:
            wanted = "rising starts, each at least the sequence's length apart"
            raise ArgumentError("seq_start_loc", wanted, f"{start} to {stop} for length {length} at row {row}")
        written = start + length
    if seq_start_loc[-1] > num_rows:
        raise ArgumentError("seq_start_loc", f"a last entry of at most {num_rows} (rows of `key`)", seq_start_loc[-1])


def _reference(*tensors: Tensor, key_scale: Tensor | None = None, value_scale: Tensor | None = None) -> None:
    key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc = tensors
    N, _, S, _ = key_cache.shape
    lengths, starts = seq_lens.tolist(), seq_start_loc.tolist()
    longest = block_tables.shape[1] * S
    check_sequence_values(block_tables, lengths, lengths, num_blocks=N, block_size=S, max_seq_len=longest, window=0)
    _check_start_values(starts, lengths, len(key))
    check_scale_values(key_scale, value_scale)
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row] + length)
        key[rows] = gather(key_cache, block_tables[row], 0, length, key_scale)
        value[rows] = gather(value_cache, block_tables[row], 0, length, value_scale)


_GATHER_KV = Op(
    "gather_kv",
    "(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, Tensor seq_start_loc, *, Tensor? key_scale=None, Tensor? value_scale=None) -> ()",
    _check,
    _reference,
)


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
    require_tensors(key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens)
    check_caches(key_cache, value_cache)
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    if seq_start_loc is None:
        ends = seq_lens.cumsum(0, dtype=torch.int32)
        seq_start_loc = torch.cat([ends.new_zeros(1), ends])
    if key is None or value is None:
        shape = (max(int(seq_start_loc[-1]), 0), key_cache.shape[1], key_cache.shape[3])
        if dtype is None:
            dtype = torch.float32 if key_cache.dtype in QUANTISED_DTYPES else key_cache.dtype
        key = key_cache.new_empty(shape, dtype=dtype) if key is None else key
        value = value_cache.new_empty(shape, dtype=dtype) if value is None else value
    _GATHER_KV(
        key, value, key_cache, value_cache, block_tables, seq_lens, seq_start_loc,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    return key, value
