"""Attention in plain torch: the specification, and the readable lesson of what the kernels do.

`paged_attention` and `paged_prefill` gather a sequence's keys and values through its block table and then run ordinary
attention in float32 (float64 for float64 inputs). `paged_attention_blockwise` and `paged_prefill_blockwise` give the
same numbers the way the kernels get them: block after block, with a running maximum and a running sum.
Letters: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, M blocks per table row.
Caches are HND here: [N, K, S, D], any strides. `AttentionOptions` says what each option means. The
ops check the values they are given and raise before they write.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.attention.options import AttentionKeywords, AttentionOptions
from kvpager.ops.moves.gather_kv import gather
from kvpager.ops.tensors import accumulate_dtype, check_scale_values, check_sequence_values


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_position: int,
    query_position: int,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Ordinary attention of consecutive queries of one sequence over its keys.

    Args:
        query: query [t, H, D]; its first row stands at position `query_position`.
        keys: keys [n, K, D] of positions `first_position` …
        values: values [n, K, D].
        first_position: position of keys[0].
        query_position: position of query[0]; each query sees keys up to its own position.
        options: all but the scales of a cache are used; keys and values are numbers here.

    Returns:
        (out [t, H, D], lse [t, H]) in float32, or float64 for float64 queries.
    """
    dtype = accumulate_dtype(query.dtype)
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    keys = keys.repeat_interleave(group, dim=1)  # [n, H, D]: query head h reads kv head h // group
    values = values.repeat_interleave(group, dim=1)
    at = torch.arange(len(query), device=query.device).unsqueeze(1) + query_position  # [t, 1]
    seen = torch.arange(len(keys), device=query.device) + first_position  # [n]
    scores = scores_of(torch.einsum("thd,nhd->htn", query, keys), query.shape[2], seen - at, options)
    hidden = seen > at
    if options.window:
        hidden |= seen <= at - options.window
    logits = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        logits = torch.cat([logits, options.sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)], 2)
    lse = torch.logsumexp(logits, dim=2)  # [H, t]
    weights = torch.softmax(logits, dim=2)[:, :, : len(keys)]  # a sink takes weight and gives no value
    return torch.einsum("htn,nhd->thd", weights, values), lse.T


def scores_of(products: Tensor, head_dim: int, distances: Tensor, options: AttentionOptions) -> Tensor:
    """Scores of products [H, ...] of queries and keys; `distances` [...]: position of the key less the query's."""
    scores = products * (head_dim**-0.5 if options.scale is None else options.scale)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes.to(scores.dtype).view(-1, *[1] * distances.dim()) * distances
    return scores


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    **options: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence; see `kvpager.ops.paged_prefill`.

    Returns (out [T, H, D], lse [T, H]) in the accumulation dtype. O(T · length · H · D).
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    _check_query_values(starts, lengths, len(query), max_query_len)
    rows = [slice(start, stop) for start, stop in pairwise(starts)]
    return _attend_all(
        query, (key_cache, value_cache), block_tables, rows, lengths, max_seq_len, AttentionOptions(**options)
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    **options: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:
    """Attention of one token, the last, of each sequence; see `kvpager.ops.paged_attention`.

    Returns (out [B, H, D], lse [B, H]) in the accumulation dtype. O(sum of lengths · H · D).
    """
    rows = [slice(row, row + 1) for row in range(len(query))]
    lengths = seq_lens.tolist()
    return _attend_all(
        query, (key_cache, value_cache), block_tables, rows, lengths, max_seq_len, AttentionOptions(**options)
    )


def _attend_all(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    rows: Sequence[slice],
    lengths: list[int],
    max_seq_len: int,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence; `rows` are the rows of each one's queries."""
    N, _, S, _ = caches[0].shape
    query_lens = [own.stop - own.start for own in rows]
    check_sequence_values(
        block_tables, lengths, query_lens, num_blocks=N, block_size=S, max_seq_len=max_seq_len, window=options.window
    )
    scales = (options.key_scale, options.value_scale)
    check_scale_values(*scales)
    out, lse = _empty_result(query)
    for table, own, query_len, length in zip(block_tables, rows, query_lens, lengths, strict=True):
        if length == 0 or query_len == 0:
            continue
        position = length - query_len  # of the first query: the queries are the sequence's last tokens
        first = max(0, position + 1 - options.window) if options.window else 0
        keys, values = (gather(cache, table, first, length, scale) for cache, scale in zip(caches, scales, strict=True))
        out[own], lse[own] = attention(query[own], keys, values, first, position, options)
    return out, lse


def _empty_result(query: Tensor) -> tuple[Tensor, Tensor]:
    """What a query over nothing gives: zeros, and a log-sum-exp of −inf."""
    dtype = accumulate_dtype(query.dtype)
    return query.new_zeros(query.shape, dtype=dtype), query.new_full(query.shape[:2], -torch.inf, dtype=dtype)


def _check_query_values(query_start_loc: list[int], seq_lens: list[int], num_tokens: int, max_query_len: int) -> None:
    """`query_start_loc` starts at 0, never falls, stays within the query, and no query is longer than its sequence."""
    if query_start_loc[0] != 0:
        raise ArgumentError("query_start_loc", "0 as first entry", query_start_loc[0])
    for row, length in enumerate(seq_lens):
        query_len = query_start_loc[row + 1] - query_start_loc[row]
        if not 0 <= query_len <= max_query_len:
            wanted = f"steps of 0 to {max_query_len} (`max_query_len`)"
            raise ArgumentError("query_start_loc", wanted, f"{query_len} at row {row}")
        if query_len > length >= 0:  # a negative length is for `check_sequence_values` to refuse
            wanted = "no more query tokens than the sequence is long"
            raise ArgumentError("query_start_loc", wanted, f"{query_len} queries for length {length} at row {row}")
    if query_start_loc[-1] > num_tokens:
        raise ArgumentError(
            "query_start_loc", f"a last entry of at most {num_tokens} (query rows)", query_start_loc[-1]
        )


def paged_prefill_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    **options: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:
    """The lesson: `paged_prefill`, token by token with `attend_blockwise`. Same result up to rounding."""
    out, lse = _empty_result(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            visible = length - (starts[row + 1] - token) + 1  # positions up to the token's own
            out[token], lse[token] = attend_blockwise(
                query[token], key_cache, value_cache, block_tables[row], visible, AttentionOptions(**options)
            )
    return out, lse


def paged_attention_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    **options: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:
    """The lesson: `paged_attention`, as a prefill with one token of each sequence. Same result up to rounding."""
    starts = torch.arange(len(query) + 1)
    return paged_prefill_blockwise(query, key_cache, value_cache, block_tables, starts, seq_lens, **options)


def attend_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    length: int,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """One query [H, D] over the first `length` positions of one table [M], block after block (online softmax).

    Three running values stand for all blocks read so far: `top` [H], the largest logit; `total` [H], the sum of
    exp(logit − top); `acc` [H, D], the values weighted by exp(logit − top). A new block with a larger logit rescales
    the old sums by exp(old top − new top): per-block results must never simply be added or concatenated.
    Formula: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    dtype = accumulate_dtype(query.dtype)
    H, D = query.shape
    window, sinks = options.window, options.sinks
    S = key_cache.shape[2]
    group = H // key_cache.shape[1]
    top = query.new_full((H,), -torch.inf, dtype=dtype) if sinks is None else sinks.to(dtype)
    total = torch.exp(top - top).nan_to_num(0.0)  # a sink counts as one logit without a value; without sinks 0
    acc = query.new_zeros((H, D), dtype=dtype)
    if length == 0:
        return acc, torch.full_like(top, -torch.inf)
    first = max(0, length - window) if window else 0
    for logical in range(first // S, -(-length // S)):
        block = int(block_table[logical])
        start, stop = max(first - logical * S, 0), min(length - logical * S, S)  # the part that is written and seen
        keys = key_cache[block, :, start:stop].to(dtype).repeat_interleave(group, dim=0)  # [H, n, D]
        values = value_cache[block, :, start:stop].to(dtype).repeat_interleave(group, dim=0)
        distances = torch.arange(start, stop, device=query.device) + (logical * S - (length - 1))
        scores = scores_of(torch.einsum("hd,hnd->hn", query.to(dtype), keys), D, distances, options)
        new_top = torch.maximum(top, scores.amax(dim=1))
        shrink = torch.exp(top - new_top)  # exp(−inf) = 0 in the first block
        weights = torch.exp(scores - new_top.unsqueeze(1))
        total = total * shrink + weights.sum(dim=1)
        acc = acc * shrink.unsqueeze(1) + torch.einsum("hn,hnd->hd", weights, values)
        top = new_top
    return acc / total.unsqueeze(1), top + torch.log(total)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of positions; see `kvpager.ops.merge_attention`.

    out = Σ out_i · exp(lse_i − lse), lse = log Σ exp(lse_i). A part with lse −inf is empty and its `out` is not read;
    so is one with +inf, which is what FlashAttention-2 reports for an empty part.
    """
    dtype = accumulate_dtype(out_a.dtype)
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    merged = out_a.new_zeros(out_a.shape, dtype=dtype)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        present = (part != -torch.inf).unsqueeze(2)  # NaN is no empty part: it must show
        weight = torch.exp(part - lse).unsqueeze(2)
        merged += torch.where(present, out.to(dtype) * weight, 0.0)
    return merged, lse
