"""Stand-ins for FlashInfer and flash-attn: their documented calls, computed plainly, with their habits.

They keep what they were given in `calls`, give the lse in their base and shape, and leave NaN in rows that see nothing.
"""

import math
from types import ModuleType, SimpleNamespace

import torch


def attend(query, keys, values, *, scale, window_left, softcap):
    """Causal attention of the last tokens: query [n, H, D] over keys [L, K, D]: out [n, H, D], lse [n, H] to base e."""
    n, H, _ = query.shape
    length, K, _ = keys.shape
    if length == 0:
        return torch.full(query.shape, math.nan, dtype=query.dtype), torch.full((n, H), math.nan)
    keys, values = (rows.float().repeat_interleave(H // K, 1) for rows in (keys, values))
    scores = torch.einsum("nhd,lhd->nhl", query.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, at = torch.arange(length - n, length)[:, None], torch.arange(length)
    hidden = at > position
    if window_left >= 0:
        hidden |= at < position - window_left
    scores.masked_fill_(hidden[:, None], -math.inf)
    out = torch.einsum("nhl,lhd->nhd", scores.softmax(-1), values)
    return out.to(query.dtype), scores.logsumexp(-1)


class Wrapper:
    """Of FlashInfer; `plan` of decode has no query starts."""

    def __init__(self, calls, workspace, layout, use_tensor_cores=None):
        assert layout == "HND"
        assert workspace.dtype == torch.uint8
        self.calls, self.is_decode = calls, use_tensor_cores is not None

    def plan(self, *given, **options):
        self.calls.append(("plan", given, options))
        starts = torch.arange(len(given[0])) if self.is_decode else given[0]
        self.batch, self.options = (starts, *given[0 if self.is_decode else 1 :]), options
        assert self.is_decode or options["causal"]

    def run(self, query, caches, out, return_lse=False):
        self.calls.append(("run", query.shape))
        query_starts, starts, pages, last_fill, _, _, _, S = self.batch
        lse = torch.full(query.shape[:2], math.nan)
        out.fill_(math.nan)
        for b in range(len(starts) - 1):
            rows = slice(int(query_starts[b]), int(query_starts[b + 1]))
            own = pages[int(starts[b]) : int(starts[b + 1])].long()
            length = max(len(own) - 1, 0) * S + int(last_fill[b])
            keys, values = (cache[own].transpose(1, 2).flatten(0, 1)[:length] for cache in caches)
            out[rows], found = attend(
                query[rows], keys, values, scale=self.options["sm_scale"], window_left=self.options["window_left"],
                softcap=self.options["logits_soft_cap"],
            )  # fmt: skip
            lse[rows] = found / math.log(2)
        return (out, lse) if return_lse else out


def flashinfer():
    calls = []
    module = ModuleType("flashinfer")
    module.calls = calls
    module.BatchDecodeWithPagedKVCacheWrapper = lambda *given, **options: Wrapper(calls, *given, **options)
    module.BatchPrefillWithPagedKVCacheWrapper = lambda *given, **options: Wrapper(calls, *given, **options)
    return module


def batched(query, key_cache, value_cache, tables, lengths, starts, options):
    """query [T, H, D], caches [N, S, K, D]: out [T, H, D], lse [T, H]."""
    left, right = options["window_size"]
    assert options["causal"]
    assert right == (-1 if left == -1 else 0)
    assert (tables >= 0).all()
    out, lse = torch.full(query.shape, math.nan, dtype=query.dtype), torch.full(query.shape[:2], math.nan)
    S = key_cache.shape[1]
    for b, length in enumerate(lengths.tolist()):
        rows, own = slice(int(starts[b]), int(starts[b + 1])), tables[b, : -(-length // S)].long()
        keys, values = (cache[own].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
        out[rows], lse[rows] = attend(
            query[rows], keys, values, scale=options["softmax_scale"], window_left=left, softcap=options["softcap"]
        )
    return out, lse


def flash_attn(version):
    module = ModuleType("flash_attn" if version == 2 else "flash_attn_interface")
    module.calls = calls = []
    named = "block_table" if version == 2 else "page_table"

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, return_softmax_lse, **options):
        calls.append(("kvcache", SimpleNamespace(**options)))
        assert return_softmax_lse
        tables = options[named]
        if q.dim() == 4:
            out, lse = batched(q[:, 0], k_cache, v_cache, tables, cache_seqlens, torch.arange(len(q) + 1), options)
            return out[:, None], lse[:, :, None]
        assert version == 3
        out, lse = batched(q, k_cache, v_cache, tables, cache_seqlens, options["cu_seqlens_q"], options)
        return out, lse.T

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *, return_attn_probs, **options):
        calls.append(("varlen", SimpleNamespace(max_q=max_q, max_k=max_k, **options)))
        assert return_attn_probs
        assert cu_seqlens_k.dtype == torch.int32
        out, lse = batched(q, k, v, options["block_table"], cu_seqlens_k.diff(), cu_seqlens_q, options)
        return out, lse.T, None

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    if version == 2:
        module.flash_attn_varlen_func = flash_attn_varlen_func
    return module
