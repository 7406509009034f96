"""What the attention ops accept: shapes, dtypes and devices, and the values of query starts."""

from typing import Unpack

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.attention.options import AttentionKeywords, AttentionOptions, check_options
from kvpager.ops.tensors import (
    accumulate_dtype,
    check_caches,
    check_exact,
    check_ints,
    check_rows,
    check_scales,
    check_starts,
    check_tables,
    check_written,
    refuse,
)


def check_attention(
    out: Tensor | None,
    lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    *lengths: Tensor,
    max_seq_len: int,
    max_query_len: int = 1,
    fixed_split: int = 0,
    split_plan: Tensor | None = None,
    workspace: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> None:
    """Metadata of both ops; `lengths` are seq_lens, for a prefill query_start_loc and seq_lens. Caches are HND."""
    *starts, seq_lens = lengths
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(options.get("key_scale"), options.get("value_scale"), key_cache)
    device = key_cache.device
    if query.dim() != 3:
        refuse("query", "[T, H, D]", query)
    H = query.shape[1]
    if H == 0 or H % K:
        raise ArgumentError("query", f"a number of heads that is a multiple of the {K} kv heads", f"{H} heads")
    check_rows("query", query, "[T, H, D]", key_cache, H, D)
    check_tables(block_tables, seq_lens, device)
    B = seq_lens.shape[0]
    if not starts and query.shape[0] != B:
        raise ArgumentError("query", f"{B} rows, one for each of `seq_lens`", f"{query.shape[0]} rows")
    for query_start_loc in starts:
        check_starts("query_start_loc", query_start_loc, seq_lens)
    check_options(AttentionOptions(**options), query)
    check_results(out, lse, query)
    check_split(fixed_split, split_plan, workspace, device)


def check_split(fixed_split: int, split_plan: Tensor | None, workspace: Tensor | None, device: torch.device) -> None:
    """Metadata of the options by which `paged_attention` cuts sequences."""
    if fixed_split < 0:
        raise ArgumentError("fixed_split", "0 (free) or a positive number of tokens", fixed_split)
    if split_plan is not None:
        check_ints("split_plan", split_plan, torch.int32, 1, "[any]", device)
    if workspace is not None:
        check_ints("workspace", workspace, torch.uint8, 1, "[any]", device)
        if workspace.numel() > 1 and workspace.stride(0) != 1:
            raise ArgumentError("workspace", "a contiguous last dimension (stride 1)", f"stride {workspace.stride(0)}")


def check_results(out: Tensor | None, lse: Tensor | None, query: Tensor) -> None:
    """A caller's `out` and `lse`: `out` has the query's shape and any strides with a contiguous last dimension."""
    if out is not None:
        check_rows("out", out, "[T, H, D]", query, query.shape[1], query.shape[2])
        if out.shape[0] != query.shape[0]:
            raise ArgumentError("out", f"{query.shape[0]} rows", f"{out.shape[0]} rows")
        check_written("out", out)
    if lse is not None:
        check_lse("lse", lse, query)
        check_written("lse", lse)


def check_lse(argument: str, lse: Tensor, query: Tensor) -> None:
    """An `lse` [T, H] beside a query or out [T, H, D]."""
    check_exact(argument, lse, query.shape[:2], accumulate_dtype(query.dtype), query.device)
