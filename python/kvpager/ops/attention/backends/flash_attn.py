"""Hand-off to flash-attn: FlashAttention-3 (module `flash_attn_interface`) if it is there, else 2 (`flash_attn`).

Both take caches as [N, S, K, D], which are strided views of ours, and give the lse to base e. Version 2 wants blocks of
a multiple of 256 positions; 3 takes any.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvpager.ops.attention.backends.call import AttentionCall, Run

OPTIONS = frozenset({"scale", "window", "softcap"})
MAX_HEAD_DIM = 256
BLOCK_MULTIPLE_2 = 256  # version 2


def missing() -> str | None:
    """Why it can't be used; None if it can."""
    if _version() is None:
        return "neither flash_attn_interface (FlashAttention-3) nor flash_attn is installed; `pip install flash-attn`"
    return None


def refusal(call: AttentionCall) -> str | None:
    """What of the call it can't take; None if it takes all."""
    if (common := call.refusal(OPTIONS)) is not None:
        return common
    if call.head_dim > MAX_HEAD_DIM or call.head_dim % 8:
        return f"a head dim of {call.head_dim} (it has multiples of 8 up to {MAX_HEAD_DIM})"
    if _version() == 2 and call.block_size % BLOCK_MULTIPLE_2:
        return f"blocks of {call.block_size} (version 2 has multiples of {BLOCK_MULTIPLE_2})"
    return None


def plan(call: AttentionCall) -> Run:
    """Prepare a step; nothing is read on the host."""
    attend = _attend_3 if _version() == 3 else _attend_2
    # Entries past a sequence's end may be anything; they are not used, but must not be fetched from nowhere.
    tables = call.block_tables.clamp(min=0)
    options: dict[str, Any] = {
        "softmax_scale": call.options.scale, "causal": True, "softcap": call.options.softcap,
        "window_size": (call.window_left, 0 if call.options.window else -1),
    }  # fmt: skip

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        views = (key_cache.transpose(1, 2), value_cache.transpose(1, 2))  # [N, S, K, D]
        attended, found = attend(call, query, *views, tables, options)
        out.copy_(attended)
        if lse is not None:
            lse.copy_(found)
        call.clear_empty(out, lse)

    return run


def _attend_3(
    call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H]."""
    options = {"cache_seqlens": call.seq_lens, "page_table": tables, "return_softmax_lse": True, **options}
    attend = _package("flash_attn_interface").flash_attn_with_kvcache
    if call.query_start_loc is None:
        out, lse, *_ = attend(query[:, None], key_cache, value_cache, **options)
        return out[:, 0], lse[:, :, 0]
    ragged = {"cu_seqlens_q": call.query_start_loc, "max_seqlen_q": call.max_query_len}
    out, lse, *_ = attend(query, key_cache, value_cache, **ragged, **options)
    return out, lse.transpose(0, 1)


def _attend_2(
    call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H]."""
    package = _package("flash_attn")
    if call.query_start_loc is None:
        out, lse, *_ = package.flash_attn_with_kvcache(
            query[:, None], key_cache, value_cache, cache_seqlens=call.seq_lens, block_table=tables,
            return_softmax_lse=True, **options,
        )  # fmt: skip
        return out[:, 0], lse[:, :, 0]
    ends = torch.zeros_like(call.query_start_loc)
    ends[1:] = call.seq_lens.cumsum(0)
    out, lse, *_ = package.flash_attn_varlen_func(
        query, key_cache, value_cache, call.query_start_loc, ends, call.max_query_len, call.max_seq_len,
        block_table=tables, return_attn_probs=True, **options,
    )  # fmt: skip
    return out, lse.transpose(0, 1)


@cache
def _version() -> int | None:
    for version, name in ((3, "flash_attn_interface"), (2, "flash_attn")):
        if importlib.util.find_spec(name) is not None:
            return version
    return None


@cache
def _package(name: str) -> ModuleType:
    return importlib.import_module(name)
