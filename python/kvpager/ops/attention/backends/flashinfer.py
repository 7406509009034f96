"""Hand-off to FlashInfer (`pip install flashinfer-python`): its paged decode and prefill wrappers.

Planning reads tables and lengths on the host, so it synchronises with the device and is not for captured graphs; a
plan serves all layers of a step. FlashInfer names pages by a flat list with starts and the fill of each last page, and
gives the lse to base 2.
"""

import importlib
import importlib.util
import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvpager.ops.attention.backends.call import AttentionCall, Run

OPTIONS = frozenset({"scale", "window", "softcap"})
HEAD_DIMS = (64, 128, 256)  # what its paged kernels are generated for
WORKSPACE_BYTES = 128 << 20  # what its documentation asks for


def missing() -> str | None:
    """Why it can't be used; None if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed; `pip install flashinfer-python`"
    return None


def refusal(call: AttentionCall) -> str | None:
    """What of the call it can't take; None if it takes all."""
    if (common := call.refusal(OPTIONS)) is not None:
        return common
    if call.head_dim not in HEAD_DIMS:
        return f"a head dim of {call.head_dim} (it has {', '.join(map(str, HEAD_DIMS))})"
    return None


def plan(call: AttentionCall) -> Run:
    """Plan a step. All plans of a device share a workspace: one that another has displaced is made again when run."""
    pages = page_lists(call.block_tables, call.seq_lens, call.block_size)
    shared = _wrapper(call.query_start_loc is not None, call.device)
    shared.plan(call, pages)

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if shared.planned is not call:
            shared.plan(call, pages)
        if lse is None:
            shared.wrapper.run(query, (key_cache, value_cache), out=out)
        else:
            _, found = shared.wrapper.run(query, (key_cache, value_cache), out=out, return_lse=True)
            lse.copy_(found * math.log(2))
        call.clear_empty(out, lse)

    return run


def page_lists(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch's tables as FlashInfer wants them.

    Returns:
        Where each sequence's pages start [B + 1], all pages one after the other, and the positions used of each last
        page [B], int32. A sequence of length 0 has no page, and 0 positions.
    """
    lengths = seq_lens.long()
    num_pages = (lengths + block_size - 1) // block_size
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=seq_lens.device)
    starts[1:] = num_pages.cumsum(0)
    used = torch.arange(block_tables.shape[1], device=block_tables.device) < num_pages[:, None]
    last_fill = lengths - (num_pages - 1).clamp(min=0) * block_size
    return starts, block_tables[used].contiguous(), last_fill.to(torch.int32)


@cache
def _package() -> ModuleType:
    return importlib.import_module("flashinfer")


class _SharedWrapper:
    """A wrapper of FlashInfer with its workspace, and the call it is planned for."""

    def __init__(self, is_prefill: bool, device: torch.device) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if is_prefill:
            self.wrapper: Any = _package().BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        else:  # its tensor core kernel serves any group size, and is the faster one from groups of 4 on
            self.wrapper = _package().BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        self.planned: AttentionCall | None = None

    def plan(self, call: AttentionCall, pages: tuple[Tensor, Tensor, Tensor]) -> None:
        options = {
            "window_left": call.window_left, "logits_soft_cap": call.options.softcap, "sm_scale": call.options.scale,
            "q_data_type": call.query_dtype, "kv_data_type": call.cache_dtype,
        }  # fmt: skip
        sizes = (call.num_heads, call.num_kv_heads, call.head_dim, call.block_size)
        if call.query_start_loc is None:
            self.wrapper.plan(*pages, *sizes, **options)
        else:
            self.wrapper.plan(call.query_start_loc, *pages, *sizes, causal=True, **options)
        self.planned = call


_wrapper = cache(_SharedWrapper)  # one for each kind and device
