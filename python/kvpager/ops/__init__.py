"""Paged attention ops over any paged K/V cache: allocating, checked wrappers around `torch.ops.kvpager`.

Letters: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, M blocks per table row.
`layout` names the axes of the caches: `"HND"` = [N, K, S, D] (default), `"NHD"` = [N, S, K, D]. Both may be strided
views (of one allocation for all layers, of interleaved K and V); the last dimension of every float tensor must be
contiguous. dtypes: float32, float16, bfloat16, float64, one for all float tensors of a call. Arithmetic is in float32
(float64 for float64).

Shapes, dtypes and devices that do not fit raise `ArgumentError`, before anything is written. Bad values (slots, table
entries, lengths) raise `SlotError` or `ArgumentError` on the CPU, with nothing written. On CUDA the row is skipped and
an error is kept on the device until `check_errors()` raises it; `KVPAGER_CHECKED=1` does that after every call, at the
price of a device sync. In a compiled graph a bad value surfaces as the kernel's RuntimeError, with the same text.

Importing this module loads the native library, or registers the reference kernels and logs that once.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from kvpager.errors import ArgumentError, KVPagerError
from kvpager.ops import checks, dispatch
from kvpager.ops.device_errors import check_errors, typed_error
from kvpager.ops.schemas import registered_op

__all__ = ["Layout", "check_errors", "copy_blocks", "merge_attention", "paged_attention", "paged_prefill", "write_kv"]

Layout = Literal["HND", "NHD"]

dispatch.register_kernels()

# What an op raises when it does not like its arguments: a kernel's text, or the shapes that a wrapper itself reads.
_REFUSALS = (RuntimeError, IndexError, ArithmeticError)
_CHECKED = os.environ.get("KVPAGER_CHECKED") == "1"
_write_kv = registered_op("write_kv")
_paged_attention = registered_op("paged_attention")
_paged_prefill = registered_op("paged_prefill")
_merge_attention = registered_op("merge_attention")
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
    key_cache, value_cache = _as_hnd(key_cache, value_cache, layout)
    try:
        _write_kv(key, value, key_cache, value_cache, slot_mapping)
    except _REFUSALS as error:
        _raise_typed(error, checks.check_write, key, value, key_cache, value_cache, slot_mapping)
    if _CHECKED:
        check_errors(key_cache.device)


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention: one query token a sequence, the last one, over all K/V of that sequence.

    Args:
        query: query [B, H, D] float; may be a strided view of a fused projection. H is a multiple of K; query head h
            reads kv head h // (H // K).
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D].
        value_cache: value_cache, like `key_cache`.
        block_tables: block_tables [B, M] int32; entries past a row's length are not read.
        seq_lens: seq_lens [B] int32; length 0 gives zeros and lse −inf. Positions at or past it are never read.
        scale: factor of the scores; 1 / √D if None.
        max_seq_len: upper bound of `seq_lens`; M · S if None.
        window: positions a query sees, itself included; 0 = all. Blocks wholly before the window are not read.
        softcap: c > 0 bends a score s to c · tanh(s / c), before the mask; 0 = none.
        sinks: sinks [H] float32 (float64 with float64): logits added to each head's softmax denominator.
        layout: axes of the caches.
        out: out [B, H, D] to write into, of the query's dtype.
        lse: lse [B, H] float32 (float64 with float64) to write into: log of the softmax denominator.
        return_lse: return lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options or lengths do not fit.
        SlotError: a table entry that is read names no block.

    O(sum of lengths · H · D).
    """
    key_cache, value_cache = _as_hnd(key_cache, value_cache, layout)
    given = (out, lse)
    try:
        out, lse = _outputs(query, out, lse, return_lse)
        _paged_attention(
            out, lse, query, key_cache, value_cache, block_tables, seq_lens,
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            max_seq_len=block_tables.shape[1] * key_cache.shape[2] if max_seq_len is None else max_seq_len,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    except _REFUSALS as error:
        _raise_typed(
            error, checks.check_attention,
            *given, query, key_cache, value_cache, block_tables, None, seq_lens, sinks, window, softcap,
        )  # fmt: skip
    if _CHECKED:
        check_errors(out.device)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence: prompts, chunks, prefix hits, drafts and decodes, mixed.

    The queries of sequence b are rows query_start_loc[b] … query_start_loc[b + 1] − 1 and are its last tokens: the last
    of them stands at position seq_lens[b] − 1 (the causal mask is aligned at the end). Their own K/V are in the cache.

    Args:
        query: query [T, H, D] float, as in `paged_attention`; rows past the last sequence get zeros and lse −inf.
        key_cache: as in `paged_attention`.
        value_cache: as in `paged_attention`.
        block_tables: as in `paged_attention`.
        query_start_loc: query_start_loc [B + 1] int32: starts at 0, never falls.
        seq_lens: seq_lens [B] int32, cached and new tokens together; at least as long as the sequence's query.
        scale: as in `paged_attention`.
        max_query_len: upper bound of the query lengths; T if None.
        max_seq_len: as in `paged_attention`.
        window: as in `paged_attention`, per query token.
        softcap: as in `paged_attention`.
        sinks: as in `paged_attention`.
        layout: as in `paged_attention`.
        out: out [T, H, D] to write into.
        lse: lse [T, H] to write into.
        return_lse: return lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options, lengths or query starts do not fit.
        SlotError: a table entry that is read names no block.

    O(sum over query tokens of their position · H · D).
    """
    key_cache, value_cache = _as_hnd(key_cache, value_cache, layout)
    given = (out, lse)
    try:
        out, lse = _outputs(query, out, lse, return_lse)
        _paged_prefill(
            out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            max_query_len=query.shape[0] if max_query_len is None else max_query_len,
            max_seq_len=block_tables.shape[1] * key_cache.shape[2] if max_seq_len is None else max_seq_len,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    except _REFUSALS as error:
        _raise_typed(
            error, checks.check_attention,
            *given, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, window, softcap,
        )  # fmt: skip
    if _CHECKED:
        check_errors(out.device)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


@overload
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint sets of positions into that over their union, by log-sum-exp.

    Sinks belong into one of the two parts at most. A part with lse −inf is empty: its out is not read. The formula
    is out = Σ out_i · exp(lse_i − lse) with lse = log Σ exp(lse_i).

    Args:
        out_a: out_a [T, H, D] float.
        lse_a: lse_a [T, H] float32 (float64 with float64).
        out_b: out_b [T, H, D], like `out_a`.
        lse_b: lse_b [T, H], like `lse_a`.
        out: out [T, H, D] to write into; may be `out_a` or `out_b` itself.
        lse: lse [T, H] to write into; may be `lse_a` or `lse_b` itself.
        return_lse: return the merged lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · H · D).
    """
    given = (out, lse)
    try:
        out, lse = _outputs(out_a, out, lse, return_lse)
        _merge_attention(out, lse, out_a, lse_a, out_b, lse_b)
    except _REFUSALS as error:
        _raise_typed(error, checks.check_merge, *given, out_a, lse_a, out_b, lse_b)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


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
    except _REFUSALS as error:
        _raise_typed(error, checks.check_copy, caches, pairs)
    if _CHECKED:
        check_errors(pairs.device)


def _as_hnd(key_cache: Tensor, value_cache: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The caches as HND views; the kernels take strides."""
    if layout == "HND":
        return key_cache, value_cache
    if layout != "NHD":
        raise ArgumentError("layout", '"HND" or "NHD"', layout)
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4:
            raise ArgumentError(argument, "[N, S, K, D]", f"{cache.dim()} dimensions")
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


def _outputs(query: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = query.new_empty(query.shape)  # empty_like would keep the strides of a fused projection
    if lse is None and return_lse:
        lse = query.new_empty(query.shape[:2], dtype=checks.accumulate_dtype(query.dtype))
    return out, lse


def _raise_typed(error: Exception, check: Callable[..., object], *arguments: object) -> NoReturn:
    """Say what was wrong: the kernels refuse whatever does not fit, the checks here word it as the caller sees it."""
    if isinstance(error, KVPagerError):
        raise error
    try:
        check(*arguments)
    except ArgumentError as refusal:
        raise refusal from None
    raise typed_error(error) from None
