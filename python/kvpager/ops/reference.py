"""The ops in plain torch: the specification, and the readable lesson of what the kernels do.

`paged_attention` and `paged_prefill` gather a sequence's keys and values through its block table and then run ordinary
attention in float32 (float64 for float64 inputs). `paged_attention_blockwise` and `paged_prefill_blockwise` give the
same numbers the way the kernels get them: block after block, with a running maximum and a running sum.
Letters: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, M blocks per table row.
Caches are HND here: [N, K, S, D], any strides. The ops check the values they are given and raise before they write.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kvpager.ops import checks, value_checks
from kvpager.ops.quantise import dequantise, quantise


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write token rows into their slots; see `kvpager.ops.write_kv`."""
    N, _, S, _ = key_cache.shape
    value_checks.check_slot_values(slot_mapping, N * S)
    value_checks.check_scale_values(key_scale, value_scale)
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


def gather_kv(
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
    """Copy sequences out of the cache, one after another; see `kvpager.ops.gather_kv`."""
    N, _, S, _ = key_cache.shape
    lengths, starts = seq_lens.tolist(), seq_start_loc.tolist()
    longest = block_tables.shape[1] * S
    value_checks.check_sequence_values(
        block_tables, lengths, lengths, num_blocks=N, block_size=S, max_seq_len=longest, window=0
    )
    value_checks.check_start_values(starts, lengths, len(key))
    value_checks.check_scale_values(key_scale, value_scale)
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row] + length)
        key[rows] = gather(key_cache, block_tables[row], 0, length, key_scale)
        value[rows] = gather(value_cache, block_tables[row], 0, length, value_scale)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    first_position: int,
    query_position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ordinary attention of consecutive queries of one sequence over its keys.

    Args:
        query: query [t, H, D]; its first row stands at position `query_position`.
        keys: keys [n, K, D] of positions `first_position` …
        values: values [n, K, D].
        first_position: position of keys[0].
        query_position: position of query[0]; each query sees keys up to its own position.
        scale: factor of the scores.
        window: how many last positions a query sees, itself included; 0 = all.
        softcap: c > 0 bends a score s to c·tanh(s / c), before the mask.
        sinks: sinks [H], logits added to each softmax denominator.

    Returns:
        (out [t, H, D], lse [t, H]) in float32, or float64 for float64 queries.
    """
    dtype = checks.accumulate_dtype(query.dtype)
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    keys = keys.repeat_interleave(group, dim=1)  # [n, H, D]: query head h reads kv head h // group
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,nhd->htn", query, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(query), device=query.device).unsqueeze(1) + query_position  # [t, 1]
    seen = torch.arange(len(keys), device=query.device) + first_position  # [n]
    hidden = seen > at
    if window:
        hidden |= seen <= at - window
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = (
        scores if sinks is None else torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)], 2)
    )
    lse = torch.logsumexp(logits, dim=2)  # [H, t]
    weights = torch.softmax(logits, dim=2)[:, :, : len(keys)]  # a sink takes weight and gives no value
    return torch.einsum("htn,nhd->thd", weights, values), lse.T


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence; see `kvpager.ops.paged_prefill`.

    Returns (out [T, H, D], lse [T, H]) in the accumulation dtype. O(T · length · H · D).
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    value_checks.check_query_values(starts, lengths, len(query), max_query_len)
    return _attend_all(
        query, key_cache, value_cache, block_tables, starts, lengths, max_seq_len, scale, window, softcap, sinks,
        (key_scale, value_scale),
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one token, the last, of each sequence; see `kvpager.ops.paged_attention`.

    Returns (out [B, H, D], lse [B, H]) in the accumulation dtype. O(sum of lengths · H · D).
    """
    starts = list(range(len(query) + 1))
    return _attend_all(
        query, key_cache, value_cache, block_tables, starts, seq_lens.tolist(), max_seq_len, scale, window, softcap,
        sinks, (key_scale, value_scale),
    )  # fmt: skip


def _attend_all(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    starts: list[int],
    lengths: list[int],
    max_seq_len: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    N, _, S, _ = key_cache.shape
    query_lens = [stop - start for start, stop in pairwise(starts)]
    value_checks.check_sequence_values(
        block_tables, lengths, query_lens, num_blocks=N, block_size=S, max_seq_len=max_seq_len, window=window
    )
    value_checks.check_scale_values(*scales)
    out, lse = _empty_result(query)
    for row, (length, query_len) in enumerate(zip(lengths, query_lens, strict=True)):
        if length == 0 or query_len == 0:
            continue
        position = length - query_len  # of the first query: the queries are the sequence's last tokens
        first = max(0, position + 1 - window) if window else 0
        rows = slice(starts[row], starts[row + 1])
        out[rows], lse[rows] = attention(
            query[rows],
            gather(key_cache, block_tables[row], first, length, scales[0]),
            gather(value_cache, block_tables[row], first, length, scales[1]),
            first_position=first,
            query_position=position,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return out, lse


def _empty_result(query: Tensor) -> tuple[Tensor, Tensor]:
    """What a query over nothing gives: zeros, and a log-sum-exp of −inf."""
    dtype = checks.accumulate_dtype(query.dtype)
    return query.new_zeros(query.shape, dtype=dtype), query.new_full(query.shape[:2], -torch.inf, dtype=dtype)


def paged_prefill_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The lesson: `paged_prefill`, token by token with `attend_blockwise`. Same result up to rounding."""
    out, lse = _empty_result(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            visible = length - (starts[row + 1] - token) + 1  # positions up to the token's own
            out[token], lse[token] = attend_blockwise(
                query[token], key_cache, value_cache, block_tables[row], visible, scale, window, softcap, sinks
            )
    return out, lse


def paged_attention_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The lesson: `paged_attention`, row by row with `attend_blockwise`. Same result up to rounding."""
    out, lse = _empty_result(query)
    for row, length in enumerate(seq_lens.tolist()):
        out[row], lse[row] = attend_blockwise(
            query[row], key_cache, value_cache, block_tables[row], length, scale, window, softcap, sinks
        )
    return out, lse


def attend_blockwise(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    length: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One query [H, D] over the first `length` positions of one table [M], block after block (online softmax).

    Three running values stand for all blocks read so far: `top` [H], the largest logit; `total` [H], the sum of
    exp(logit − top); `acc` [H, D], the values weighted by exp(logit − top). A new block with a larger logit rescales
    the old sums by exp(old top − new top): per-block results must never simply be added or concatenated.
    Formula: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    dtype = checks.accumulate_dtype(query.dtype)
    H, D = query.shape
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
        scores = torch.einsum("hd,hnd->hn", query.to(dtype), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
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
    dtype = checks.accumulate_dtype(out_a.dtype)
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    merged = out_a.new_zeros(out_a.shape, dtype=dtype)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        present = (part != -torch.inf).unsqueeze(2)  # NaN is no empty part: it must show
        weight = torch.exp(part - lse).unsqueeze(2)
        merged += torch.where(present, out.to(dtype) * weight, 0.0)
    return merged, lse


def copy_blocks(caches: list[Tensor], pairs: Tensor) -> None:
    """Copy whole blocks within each cache; see `kvpager.ops.copy_blocks`."""
    value_checks.check_pair_values(pairs.tolist(), caches[0].shape[0])
    sources, destinations = pairs.unbind(1)
    for cache in caches:
        cache[destinations] = cache[sources]


def update_tables(block_tables: Tensor, changed: Tensor) -> None:
    """Write the changed entries of a table; see `kvpager.ops.update_tables`."""
    value_checks.check_change_values(changed.tolist(), *block_tables.shape)
    rows, columns, blocks = changed[changed[:, 0] >= 0].unbind(1)
    block_tables[rows, columns] = blocks


def swap_blocks(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Copy whole blocks from some caches to others; see `kvpager.ops.swap_blocks`."""
    value_checks.check_swap_values(pairs.tolist(), src[0].shape[0], dst[0].shape[0])
    sources, targets = pairs.unbind(1)
    for source, target in zip(src, dst, strict=True):
        moved = source[sources.to(source.device)].to(target.device)
        target[targets.to(target.device)] = moved
