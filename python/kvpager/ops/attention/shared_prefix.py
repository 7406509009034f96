"""Attention of a batch whose sequences begin with the same cached blocks: the prefix is read once, not once a sequence.

Cascade attention: all queries of the batch attend to the shared prefix as rows of one product, each sequence's queries
to its own suffix, and the two results are merged by log-sum-exp. The idea is that of Hydragen (arXiv:2402.05099).
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.kinds import is_whole
from kvpager.ops.attention.merge import merge_attention
from kvpager.ops.attention.options import AttentionKeywords, AttentionOptions
from kvpager.ops.attention.paged import paged_attention_lse, paged_prefill_lse
from kvpager.ops.attention.results import with_lse
from kvpager.ops.tensors import Layout, as_hnd, check_caches, refuse, require_tensors, scales_as_hnd

SUPPORTED = frozenset({"scale", "softcap", "sinks", "key_scale", "value_scale"})  # a window has no shared prefix


def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    prefix_len: int,
    *,
    query_start_loc: Tensor | None = None,
    layout: Layout = "HND",
    lse: Tensor | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
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
        layout: axes of the caches (and of scales with three dimensions).
        lse: lse [T, H] to write into.
        keywords: options of attention, those of `SUPPORTED`; see `AttentionOptions`.

    Returns:
        out [T, H, D]. `shared_prefix_attention_lse` returns (out, lse).

    Raises:
        ArgumentError: a prefix that is no whole number of shared blocks, another option, or anything the ops refuse.
        SlotError: a table entry that is read names no block.

    O(T · prefix_len · H · D + what the ops cost on the suffixes) arithmetic; the prefix's K and V are read once for
    some 200 rows of T · H / K. It pays when the prefix is long against the suffixes and several sequences share it.
    """
    require_tensors(
        query=query, key_cache=key_cache, value_cache=value_cache, block_tables=block_tables, seq_lens=seq_lens
    )
    for argument, tensor, shape in (
        ("query", query, ("T", "H", "D")), ("block_tables", block_tables, ("B", "M")), ("seq_lens", seq_lens, ("B",)),
    ):  # fmt: skip
        if tensor.dim() != len(shape):
            refuse(argument, f"[{', '.join(shape)}]", tensor)
    caches = as_hnd(key_cache, value_cache, layout)
    check_caches(*caches)
    if (unsupported := AttentionOptions.of(keywords).unsupported(SUPPORTED)) is not None:
        raise ArgumentError(unsupported, "none beside a shared prefix", keywords.get(unsupported))
    options: dict[str, Any] = dict(keywords)
    options["key_scale"], options["value_scale"] = scales_as_hnd(
        options.get("key_scale"), options.get("value_scale"), layout
    )
    if block_tables.shape[0] == 0:
        prefix_len = 0
    shared = _check_prefix(block_tables, prefix_len, caches[0].shape[2])
    out, lse = _attend(
        query, caches, block_tables[:, shared:], query_start_loc, seq_lens - prefix_len, {**options, "lse": lse}
    )
    if prefix_len > 0:
        rows = len(query) if query_start_loc is None else int(query_start_loc[-1])  # rows past them see nothing
        options["sinks"] = None  # they belong into one of the parts
        prefix = _attend_prefix(query[:rows], caches, block_tables[:1, :shared], prefix_len, options)
        merge_attention(*prefix, out[:rows], lse[:rows], out=out[:rows], lse=lse[:rows])
    return out


shared_prefix_attention_lse = with_lse(shared_prefix_attention)


def _check_prefix(block_tables: Tensor, prefix_len: int, block_size: int) -> int:
    """How many columns of the tables the prefix takes."""
    M = block_tables.shape[1]
    if not is_whole(prefix_len) or prefix_len < 0 or prefix_len % block_size or prefix_len > M * block_size:
        wanted = f"a multiple of the block size {block_size}, at most {M * block_size} ({M} columns of `block_tables`)"
        raise ArgumentError("prefix_len", wanted, repr(prefix_len))
    shared = prefix_len // block_size
    if block_tables.device.type == "cpu":
        differs = (block_tables[:, :shared] != block_tables[:1, :shared]).nonzero()
        if len(differs):
            row, column = differs[0].tolist()
            wanted = f"the same first {shared} entries in every row (`prefix_len` {prefix_len})"
            raise ArgumentError("block_tables", wanted, f"another one at row {row}, column {column}")
    return shared


def _attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    query_start_loc: Tensor | None,
    seq_lens: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if query_start_loc is None:
        return paged_attention_lse(query, *caches, block_tables, seq_lens, **options)
    return paged_prefill_lse(query, *caches, block_tables, query_start_loc, seq_lens, **options)


def _attend_prefix(
    query: Tensor, caches: tuple[Tensor, Tensor], table: Tensor, prefix_len: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """All queries [T, H, D] over all of one sequence: as one token with T times as many query heads on each kv head."""
    T, H, D = query.shape
    K = caches[0].shape[1]
    heads = query.view(T, K, H // K, D).transpose(0, 1).reshape(1, T * H, D)  # by kv head, then token, then member
    bounds = torch.tensor([0, 1, prefix_len], dtype=torch.int32, device=query.device)
    out, lse = _attend(heads, caches, table, bounds[:2], bounds[2:], options)
    by_token = (K, T, H // K)
    return (
        out.view(*by_token, D).transpose(0, 1).reshape(T, H, D),
        lse.view(by_token).transpose(0, 1).reshape(T, H),
    )
