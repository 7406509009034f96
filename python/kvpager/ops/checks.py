"""What the ops accept: shapes, dtypes and devices.

Every check raises before anything is written. One `check_<op>` for each op reads metadata only: the reference kernels
and the fakes call it first; the native kernels check the same in C++ (csrc/checks.h), and the wrappers call it when
one of those refuses, to word the refusal. The values of integers are for `value_checks`, the layers around attention
for `layer_checks`.
"""

from typing import NoReturn

import torch
from torch import Tensor

from kvpager.cache_dtypes import CACHE_DTYPES, one_of
from kvpager.errors import ArgumentError
from kvpager.ops.overlap import check_written, check_written_caches

FLOAT_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, d.torch_name) for d in CACHE_DTYPES if not d.is_codes)
QUANTISED_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, d.torch_name) for d in CACHE_DTYPES if d.is_codes)
FLOAT_NAMES = one_of(d.torch_name for d in CACHE_DTYPES if not d.is_codes)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic, `lse` and `sinks` for tensors of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def refuse(argument: str, wanted: str, tensor: Tensor) -> NoReturn:
    """Raise an ArgumentError that says what the tensor is instead."""
    shape = ", ".join(str(size) for size in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise ArgumentError(argument, wanted, f"[{shape}] {dtype} on {tensor.device}")


def require_tensors(**tensors: object) -> None:
    """What a wrapper reads before its op is called has to be tensors."""
    for argument, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(argument, "a tensor", type(value).__name__)


def _check_rows(argument: str, tensor: Tensor, wanted: str, like: Tensor, heads: int, head_dim: int) -> None:
    """A [rows, heads, head_dim] tensor that goes with `like`, with its last dimension contiguous.

    It has the device of `like` and its dtype, or any of 32 or 16 bits beside a quantised cache.
    """
    shape = tensor.shape
    if len(shape) != 3 or shape[1] != heads or shape[2] != head_dim:
        refuse(argument, f"{wanted} with {heads} heads and head dim {head_dim}", tensor)
    if like.dtype in QUANTISED_DTYPES:
        fits = tensor.dtype in FLOAT_DTYPES and tensor.dtype is not torch.float64
        dtype = "float32, float16 or bfloat16"
    else:
        fits, dtype = tensor.dtype is like.dtype, str(like.dtype).removeprefix("torch.")
    if not fits or tensor.device != like.device:
        refuse(argument, f"{wanted} {dtype} on {like.device}", tensor)
    if tensor.stride(2) != 1 and head_dim > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(2)}")


def _check_ints(
    argument: str, tensor: Tensor, dtype: torch.dtype, dims: int, wanted: str, device: torch.device
) -> None:
    if tensor.dtype is not dtype or tensor.dim() != dims or tensor.device != device:
        refuse(argument, f"{wanted} {str(dtype).removeprefix('torch.')} on {device}", tensor)


def check_caches(key_cache: Tensor, value_cache: Tensor) -> torch.Size:
    """Two caches [N, K, S, D] of one dtype and device; returns their shape."""
    shape = key_cache.shape
    if len(shape) != 4 or key_cache.dtype not in FLOAT_DTYPES + QUANTISED_DTYPES:
        refuse("key_cache", f"[N, K, S, D] {one_of(d.torch_name for d in CACHE_DTYPES)}", key_cache)
    if 0 in shape[1:]:
        refuse("key_cache", "[N, K, S, D] with K, S and D of at least 1", key_cache)
    if value_cache.shape != shape or value_cache.dtype is not key_cache.dtype or value_cache.device != key_cache.device:
        refuse("value_cache", "the shape, dtype and device of `key_cache`", value_cache)
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.stride(3) != 1 and shape[3] > 1:
            raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {cache.stride(3)}")
    return shape


def check_scales(key_scale: Tensor | None, value_scale: Tensor | None, key_cache: Tensor) -> None:
    """Scales of quantised caches [N, K, S, D]: [N, K, S], or one element; none beside other caches."""
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if key_cache.dtype not in QUANTISED_DTYPES:
            if scale is not None:
                refuse(argument, "none beside a cache that is not quantised", scale)
        elif scale is None:
            raise ArgumentError(argument, "the scales of the quantised cache", "none")
        elif (
            scale.dtype is not torch.float32
            or scale.device != key_cache.device
            or (scale.shape != key_cache.shape[:3] and not (scale.dim() <= 1 and scale.numel() == 1))
        ):
            shape = ", ".join(str(size) for size in key_cache.shape[:3])
            refuse(argument, f"[{shape}] or [1] float32 on {key_cache.device}", scale)


def check_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Metadata of `write_kv`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    check_written_caches(key_cache, value_cache, key_scale, value_scale)
    _check_rows("key", key, "[T, K, D]", key_cache, K, D)
    _check_rows("value", value, "[T, K, D]", key_cache, K, D)
    if value.dtype is not key.dtype:
        refuse("value", "the dtype of `key`", value)
    _check_ints("slot_mapping", slot_mapping, torch.int64, 1, "[T]", key_cache.device)
    rows = slot_mapping.shape[0]
    if key.shape[0] < rows:
        raise ArgumentError("key", f"at least {rows} rows, one for each slot", f"{key.shape[0]} rows")
    if value.shape[0] < rows:
        raise ArgumentError("value", f"at least {rows} rows, one for each slot", f"{value.shape[0]} rows")


def check_attention(
    out: Tensor | None,
    lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor | None,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Metadata of `paged_attention` (`query_start_loc` None) and `paged_prefill`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    device = key_cache.device
    if query.dim() != 3:
        refuse("query", "[T, H, D]", query)
    H = query.shape[1]
    if H == 0 or H % K:
        raise ArgumentError("query", f"a number of heads that is a multiple of the {K} kv heads", f"{H} heads")
    _check_rows("query", query, "[T, H, D]", key_cache, H, D)
    _check_ints("block_tables", block_tables, torch.int32, 2, "[B, M]", device)
    _check_ints("seq_lens", seq_lens, torch.int32, 1, "[B]", device)
    B = seq_lens.shape[0]
    if block_tables.shape[0] != B:
        raise ArgumentError("block_tables", f"{B} rows, one for each of `seq_lens`", f"{block_tables.shape[0]} rows")
    if query_start_loc is None:
        if query.shape[0] != B:
            raise ArgumentError("query", f"{B} rows, one for each of `seq_lens`", f"{query.shape[0]} rows")
    else:
        _check_ints("query_start_loc", query_start_loc, torch.int32, 1, "[B + 1]", device)
        if query_start_loc.shape[0] != B + 1:
            raise ArgumentError("query_start_loc", f"{B + 1} entries for {B} sequences", query_start_loc.shape[0])
    if sinks is not None:
        dtype = accumulate_dtype(query.dtype)
        if sinks.dim() != 1 or sinks.shape[0] != H or sinks.dtype is not dtype or sinks.device != device:
            refuse("sinks", f"[{H}] {str(dtype).removeprefix('torch.')} on {device}", sinks)
    if window < 0:
        raise ArgumentError("window", "0 (all positions) or a positive number of positions", window)
    check_factors(scale, softcap, query.dtype)
    _check_results(out, lse, query)


def check_factors(scale: float | None, softcap: float, dtype: torch.dtype) -> None:
    """What scores are multiplied and bent by is finite where it is used: in the arithmetic of a query of `dtype`."""
    largest = torch.finfo(accumulate_dtype(dtype)).max
    if not 0 <= softcap <= largest:
        raise ArgumentError("softcap", "0 (none) or a finite positive number", softcap)
    if isinstance(scale, (int, float)) and not -largest <= scale <= largest:
        raise ArgumentError("scale", "a finite number", scale)


def check_split(fixed_split: int, schedule: Tensor | None, workspace: Tensor | None, query: Tensor) -> None:
    """Metadata of the options by which `paged_attention` cuts sequences."""
    if fixed_split < 0:
        raise ArgumentError("fixed_split", "0 (free) or a positive number of tokens", fixed_split)
    if schedule is not None:
        _check_ints("schedule", schedule, torch.int32, 1, "[any]", query.device)
    if workspace is not None:
        _check_ints("workspace", workspace, torch.uint8, 1, "[any]", query.device)
        if workspace.numel() > 1 and workspace.stride(0) != 1:
            raise ArgumentError("workspace", "a contiguous last dimension (stride 1)", f"stride {workspace.stride(0)}")


def check_gather(
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
    _check_rows("key", key, "[T, K, D]", key_cache, K, D)
    _check_rows("value", value, "[T, K, D]", key_cache, K, D)
    if value.dtype is not key.dtype or value.shape != key.shape:
        refuse("value", "the shape and dtype of `key`", value)
    check_written("key", key)
    check_written("value", value)
    _check_ints("seq_lens", seq_lens, torch.int32, 1, "[B]", key_cache.device)
    B = seq_lens.shape[0]
    _check_ints("block_tables", block_tables, torch.int32, 2, "[B, M]", key_cache.device)
    if block_tables.shape[0] != B:
        raise ArgumentError("block_tables", f"{B} rows, one for each of `seq_lens`", f"{block_tables.shape[0]} rows")
    _check_ints("seq_start_loc", seq_start_loc, torch.int32, 1, "[B + 1]", key_cache.device)
    if seq_start_loc.shape[0] != B + 1:
        raise ArgumentError("seq_start_loc", f"{B + 1} entries for {B} sequences", seq_start_loc.shape[0])


def _check_results(out: Tensor | None, lse: Tensor | None, query: Tensor) -> None:
    """A caller's `out` and `lse`: `out` has the query's shape and any strides with a contiguous last dimension."""
    if out is not None:
        _check_rows("out", out, "[T, H, D]", query, query.shape[1], query.shape[2])
        if out.shape[0] != query.shape[0]:
            raise ArgumentError("out", f"{query.shape[0]} rows", f"{out.shape[0]} rows")
        check_written("out", out)
    if lse is not None:
        _check_lse("lse", lse, query)
        check_written("lse", lse)


def _check_lse(argument: str, lse: Tensor, query: Tensor) -> None:
    """An `lse` [T, H] beside a query or out [T, H, D]."""
    dtype = accumulate_dtype(query.dtype)
    if lse.shape != query.shape[:2] or lse.dtype is not dtype or lse.device != query.device:
        shape = ", ".join(str(size) for size in query.shape[:2])
        refuse(argument, f"[{shape}] {str(dtype).removeprefix('torch.')} on {query.device}", lse)


def check_merge(
    out: Tensor | None, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    """Metadata of `merge_attention`."""
    if out_a.dim() != 3 or out_a.dtype not in FLOAT_DTYPES:
        refuse("out_a", f"[T, H, D] {FLOAT_NAMES}", out_a)
    T, H, D = out_a.shape
    _check_rows("out_a", out_a, "[T, H, D]", out_a, H, D)
    _check_rows("out_b", out_b, "[T, H, D]", out_a, H, D)
    if out_b.shape[0] != T:
        raise ArgumentError("out_b", f"{T} rows", f"{out_b.shape[0]} rows")
    _check_lse("lse_a", lse_a, out_a)
    _check_lse("lse_b", lse_b, out_a)
    _check_results(out, lse, out_a)


def check_fused(
    query_out: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Metadata of `qk_norm_rope_write`; caches are HND."""
    _, K, _, D = check_caches(key_cache, value_cache)
    check_scales(key_scale, value_scale, key_cache)
    check_written_caches(key_cache, value_cache, key_scale, value_scale)
    device = key_cache.device
    if D % 2:
        raise ArgumentError("key_cache", "an even head dim, which turns in pairs", D)
    _check_ints("slot_mapping", slot_mapping, torch.int64, 1, "[T]", device)
    _check_ints("positions", positions, torch.int64, 1, "[T]", device)
    if query_out.dim() != 3:
        refuse("query_out", "[T, H, D]", query_out)
    H = query_out.shape[1]
    if H == 0 or H % K:
        raise ArgumentError("query_out", f"a number of heads that is a multiple of the {K} kv heads", f"{H} heads")
    _check_rows("query_out", query_out, "[T, H, D]", key_cache, H, D)
    check_written("query_out", query_out)
    width = (H + 2 * K) * D
    check_vectors("qkv", qkv, 2, width, query_out.dtype, device)
    check_vectors("cos_sin", cos_sin, 2, D, accumulate_dtype(query_out.dtype), device)
    for argument, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_vectors(argument, weight, 1, D, query_out.dtype, device)
    rows = slot_mapping.shape[0]
    for argument, tensor in (("query_out", query_out), ("qkv", qkv), ("positions", positions)):
        if tensor.shape[0] < rows:
            raise ArgumentError(argument, f"at least {rows} rows, one for each slot", f"{tensor.shape[0]} rows")
    if not eps >= 0:
        raise ArgumentError("eps", "0 or a positive number", eps)


def check_vectors(
    argument: str, tensor: Tensor, dims: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Vectors of `width` numbers, one or a stack of them, each contiguous."""
    if tensor.dim() != dims or tensor.shape[-1] != width or tensor.dtype is not dtype or tensor.device != device:
        shape = f"[any, {width}]" if dims == 2 else f"[{width}]"
        refuse(argument, f"{shape} {str(dtype).removeprefix('torch.')} on {device}", tensor)
    if tensor.stride(-1) != 1 and width > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(-1)}")


def check_copy(caches: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `copy_blocks`: caches whose first dimension is the block, pairs [P, 2] beside them."""
    if not caches:
        raise ArgumentError("caches", "at least one cache", "none")
    for index, cache in enumerate(caches):
        if not 2 <= cache.dim() <= 8:
            refuse("caches", f"tensors of 2 to 8 dimensions, the first of them the block (entry {index})", cache)
        if cache.device != caches[0].device or cache.shape[0] != caches[0].shape[0]:
            refuse("caches", f"{caches[0].shape[0]} blocks on {caches[0].device} in each (entry {index})", cache)
        check_written("caches", cache)
    _check_ints("pairs", pairs, torch.int64, 2, "[P, 2]", caches[0].device)
    if pairs.shape[1] != 2:
        refuse("pairs", "[P, 2] (source, destination)", pairs)


def check_swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `swap_blocks`: two lists of caches whose blocks have the same shape and dtype, one by one."""
    if not src:
        raise ArgumentError("src", "at least one cache", "none")
    if len(src) != len(dst):
        raise ArgumentError("dst", f"{len(src)} caches, as in `src`", len(dst))
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
        for argument, cache, like in (("src", source, src[0]), ("dst", target, dst[0])):
            if not 2 <= cache.dim() <= 8:
                refuse(argument, f"tensors of 2 to 8 dimensions, the first of them the block (entry {index})", cache)
            if cache.shape[0] != like.shape[0] or cache.device != like.device:
                refuse(argument, f"{like.shape[0]} blocks on {like.device} in each (entry {index})", cache)
        if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
            refuse("dst", f"blocks of the shape and dtype of `src` (entry {index})", target)
        check_written("dst", target)
    _check_ints("pairs", pairs, torch.int64, 2, "[P, 2]", pairs.device)
    if pairs.shape[1] != 2:
        refuse("pairs", "[P, 2] (source, destination)", pairs)


def check_update(block_tables: Tensor, changed: Tensor) -> None:
    """Metadata of `update_tables`: a table and the list of its changes beside it."""
    _check_ints("block_tables", block_tables, torch.int32, 2, "[B, M]", block_tables.device)
    _check_ints("changed", changed, torch.int32, 2, "[C, 3]", block_tables.device)
    if changed.shape[1] != 3:
        refuse("changed", "[C, 3] (row, column, block)", changed)
    check_written("block_tables", block_tables)
