"""Attention of a batch whose sequences begin with the same cached blocks: the prefix is read once, not once a sequence.

Cascade attention: all queries of the batch attend to the shared prefix as rows of one product, each sequence's queries
to its own suffix, and the two results are merged by log-sum-exp. The idea is that of Hydragen (arXiv:2402.05099).
"""

from typing import Literal, overload

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.attention import merge_attention, paged_attention, paged_prefill
from kvpager.ops.layout import Layout


@overload
def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    prefix_len: int,
    *,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    prefix_len: int,
    *,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    prefix_len: int,
    *,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `paged_attention` (or, with `query_start_loc`, `paged_prefill`) gives for sequences with a common prefix.

    Args:
        query: query [T, H, D] float; T = B without `query_start_loc`.
        key_cache: as in `paged_attention`.
        value_cache: as in `paged_attention`.
        block_tables: block_tables [B, M] int32, whole tables; their first prefix_len / S columns are the same in every
            row, which is checked on the CPU.
        seq_lens: seq_lens [B] int32, the prefix included. Every sequence's queries lie behind the prefix.
        prefix_len: tokens that all sequences share, a multiple of S; 0 = none.
        query_start_loc: query_start_loc [B + 1] int32, as in `paged_prefill`; None = one query a sequence.
        scale: factor of the scores; 1 / √D if None.
        softcap: as in `paged_attention`.
        sinks: as in `paged_attention`.
        layout: axes of the caches.
        return_lse: return lse too.

    Returns:
        out [T, H, D], or (out, lse [T, H]).

    Raises:
        ArgumentError: a prefix that is no whole number of shared blocks, or anything the two ops refuse.
        SlotError: a table entry that is read names no block.

    O(T · prefix_len · H · D + what the ops cost on the suffixes) arithmetic; the prefix's K and V are read once for
    some 200 rows of T · H / K. It pays when the prefix is long against the suffixes and several sequences share it.
    """
    if prefix_len == 0 or block_tables.shape[0] == 0:
        return _attend(
            query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale, softcap, sinks, layout,
            return_lse,
        )  # fmt: skip
    S = key_cache.shape[2 if layout == "HND" else 1]
    shared = _check_prefix(block_tables, prefix_len, S)
    suffix = _attend(
        query, key_cache, value_cache, block_tables[:, shared:], seq_lens - prefix_len, query_start_loc, scale,
        softcap, sinks, layout, True,
    )  # fmt: skip
    rows = len(query) if query_start_loc is None else int(query_start_loc[-1])
    prefix = _attend_prefix(
        query[:rows], key_cache, value_cache, block_tables[:1, :shared], prefix_len, scale, softcap, layout
    )
    out, lse = suffix  # rows past the last sequence see nothing, neither there nor here
    merge_attention(*prefix, out[:rows], lse[:rows], out=out[:rows], lse=lse[:rows])
    return (out, lse) if return_lse else out


def _check_prefix(block_tables: Tensor, prefix_len: int, block_size: int) -> int:
    """How many columns of the tables the prefix takes."""
    M = block_tables.shape[1]
    if prefix_len < 0 or prefix_len % block_size or prefix_len > M * block_size:
        wanted = f"a multiple of the block size {block_size}, at most {M * block_size} ({M} columns of `block_tables`)"
        raise ArgumentError("prefix_len", wanted, prefix_len)
    shared = prefix_len // block_size
    if block_tables.device.type == "cpu":
        differs = (block_tables[:, :shared] != block_tables[0, :shared]).nonzero()
        if len(differs):
            row, column = differs[0].tolist()
            wanted = f"the same first {shared} entries in every row (`prefix_len` {prefix_len})"
            raise ArgumentError("block_tables", wanted, f"another one at row {row}, column {column}")
    return shared


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    layout: Layout,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    if query_start_loc is None:
        return paged_attention(  # type: ignore[call-overload,no-any-return]  # one of the two overloads fits
            query, key_cache, value_cache, block_tables, seq_lens,
            scale=scale, softcap=softcap, sinks=sinks, layout=layout, return_lse=return_lse,
        )  # fmt: skip
    return paged_prefill(  # type: ignore[call-overload,no-any-return]
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
        scale=scale, softcap=softcap, sinks=sinks, layout=layout, return_lse=return_lse,
    )  # fmt: skip


def _attend_prefix(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    prefix_len: int,
    scale: float | None,
    softcap: float,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """All queries [T, H, D] over all of one sequence: as one token with T times as many query heads on each kv head."""
    T, H, D = query.shape
    K = key_cache.shape[1 if layout == "HND" else 2]
    heads = query.view(T, K, H // K, D).transpose(0, 1).reshape(1, K * T * (H // K), D)  # by kv head, token, member
    bounds = torch.tensor([0, 1, prefix_len], dtype=torch.int32, device=query.device)
    out, lse = paged_prefill(
        heads, key_cache, value_cache, table, bounds[:2], bounds[2:],
        scale=scale, softcap=softcap, layout=layout, return_lse=True,
    )  # fmt: skip
    by_token = (K, T, H // K)
    return (
        out.view(*by_token, D).transpose(0, 1).reshape(T, H, D),
        lse.view(by_token).transpose(0, 1).reshape(T, H),
    )
