"""What the ops accept: shapes, dtypes and devices, and the values of the integers.

Every check raises before anything is written. One `check_<op>` for each op reads metadata only: the reference kernels
and the fakes call it first; the native kernels check the same in C++ (csrc/checks.h), and the wrappers call it when
one of those refuses, to word the refusal. The `check_*_values` read the integers themselves, in the reference kernels;
the native CPU kernels do the same in C++ with the same words, the CUDA kernels skip the offending row and set a device
error word.
"""

from typing import NoReturn

import torch
from torch import Tensor

from kvpager.errors import ArgumentError, SlotError

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
QUANTISED_DTYPES = frozenset({torch.int8, torch.float8_e4m3fn})


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic, `lse` and `sinks` for tensors of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _refuse(argument: str, wanted: str, tensor: Tensor) -> NoReturn:
    shape = ", ".join(str(size) for size in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise ArgumentError(argument, wanted, f"[{shape}] {dtype} on {tensor.device}")


def _check_rows(argument: str, tensor: Tensor, wanted: str, like: Tensor, heads: int, head_dim: int) -> None:
    """A [rows, heads, head_dim] tensor that goes with `like`, with its last dimension contiguous.

    It has the device of `like` and its dtype, or any of 32 or 16 bits beside a quantised cache.
    """
    shape = tensor.shape
    if len(shape) != 3 or shape[1] != heads or shape[2] != head_dim:
        _refuse(argument, f"{wanted} with {heads} heads and head dim {head_dim}", tensor)
    if like.dtype in QUANTISED_DTYPES:
        fits, dtype = tensor.dtype in FLOAT_DTYPES - {torch.float64}, "float32, float16 or bfloat16"
    else:
        fits, dtype = tensor.dtype is like.dtype, str(like.dtype).removeprefix("torch.")
    if not fits or tensor.device != like.device:
        _refuse(argument, f"{wanted} {dtype} on {like.device}", tensor)
    if tensor.stride(2) != 1 and head_dim > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(2)}")


def _check_ints(
    argument: str, tensor: Tensor, dtype: torch.dtype, dims: int, wanted: str, device: torch.device
) -> None:
    if tensor.dtype is not dtype or tensor.dim() != dims or tensor.device != device:
        _refuse(argument, f"{wanted} {str(dtype).removeprefix('torch.')} on {device}", tensor)


def check_caches(key_cache: Tensor, value_cache: Tensor) -> torch.Size:
    """Two caches [N, K, S, D] of one dtype and device; returns their shape."""
    shape = key_cache.shape
    if len(shape) != 4 or key_cache.dtype not in FLOAT_DTYPES | QUANTISED_DTYPES:
        _refuse("key_cache", "[N, K, S, D] float32, float16, bfloat16, float64, int8 or float8_e4m3fn", key_cache)
    if 0 in shape[1:]:
        _refuse("key_cache", "[N, K, S, D] with K, S and D of at least 1", key_cache)
    if value_cache.shape != shape or value_cache.dtype is not key_cache.dtype or value_cache.device != key_cache.device:
        _refuse("value_cache", "the shape, dtype and device of `key_cache`", value_cache)
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.stride(3) != 1 and shape[3] > 1:
            raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {cache.stride(3)}")
    return shape


def check_scales(key_scale: Tensor | None, value_scale: Tensor | None, key_cache: Tensor) -> None:
    """Scales of quantised caches [N, K, S, D]: [N, K, S], or one element; none beside other caches."""
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if key_cache.dtype not in QUANTISED_DTYPES:
            if scale is not None:
                _refuse(argument, "none beside a cache that is not quantised", scale)
        elif scale is None:
            raise ArgumentError(argument, "the scales of the quantised cache", "none")
        elif (
            scale.dtype is not torch.float32
            or scale.device != key_cache.device
            or (scale.shape != key_cache.shape[:3] and not (scale.dim() <= 1 and scale.numel() == 1))
        ):
            shape = ", ".join(str(size) for size in key_cache.shape[:3])
            _refuse(argument, f"[{shape}] or [1] float32 on {key_cache.device}", scale)


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
    _check_rows("key", key, "[T, K, D]", key_cache, K, D)
    _check_rows("value", value, "[T, K, D]", key_cache, K, D)
    if value.dtype is not key.dtype:
        _refuse("value", "the dtype of `key`", value)
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
        _refuse("query", "[T, H, D]", query)
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
            _refuse("sinks", f"[{H}] {str(dtype).removeprefix('torch.')} on {device}", sinks)
    if window < 0:
        raise ArgumentError("window", "0 (all positions) or a positive number of positions", window)
    if not softcap >= 0:
        raise ArgumentError("softcap", "0 (none) or a positive number", softcap)
    _check_results(out, lse, query)


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
        _refuse("value", "the shape and dtype of `key`", value)
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
    if lse is not None:
        _check_lse("lse", lse, query)


def _check_lse(argument: str, lse: Tensor, query: Tensor) -> None:
    """An `lse` [T, H] beside a query or out [T, H, D]."""
    dtype = accumulate_dtype(query.dtype)
    if lse.shape != query.shape[:2] or lse.dtype is not dtype or lse.device != query.device:
        shape = ", ".join(str(size) for size in query.shape[:2])
        _refuse(argument, f"[{shape}] {str(dtype).removeprefix('torch.')} on {query.device}", lse)


def check_merge(
    out: Tensor | None, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    """Metadata of `merge_attention`."""
    if out_a.dim() != 3 or out_a.dtype not in FLOAT_DTYPES:
        _refuse("out_a", "[T, H, D] float32, float16, bfloat16 or float64", out_a)
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
    device = key_cache.device
    if D % 2:
        raise ArgumentError("key_cache", "an even head dim, which turns in pairs", D)
    _check_ints("slot_mapping", slot_mapping, torch.int64, 1, "[T]", device)
    _check_ints("positions", positions, torch.int64, 1, "[T]", device)
    if query_out.dim() != 3:
        _refuse("query_out", "[T, H, D]", query_out)
    H = query_out.shape[1]
    if H == 0 or H % K:
        raise ArgumentError("query_out", f"a number of heads that is a multiple of the {K} kv heads", f"{H} heads")
    _check_rows("query_out", query_out, "[T, H, D]", key_cache, H, D)
    width = (H + 2 * K) * D
    _check_vectors("qkv", qkv, 2, width, query_out.dtype, device)
    _check_vectors("cos_sin", cos_sin, 2, D, accumulate_dtype(query_out.dtype), device)
    for argument, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _check_vectors(argument, weight, 1, D, query_out.dtype, device)
    rows = slot_mapping.shape[0]
    for argument, tensor in (("query_out", query_out), ("qkv", qkv), ("positions", positions)):
        if tensor.shape[0] < rows:
            raise ArgumentError(argument, f"at least {rows} rows, one for each slot", f"{tensor.shape[0]} rows")
    if not eps >= 0:
        raise ArgumentError("eps", "0 or a positive number", eps)


def _check_vectors(
    argument: str, tensor: Tensor, dims: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Vectors of `width` numbers, one or a stack of them, each contiguous."""
    if tensor.dim() != dims or tensor.shape[-1] != width or tensor.dtype is not dtype or tensor.device != device:
        shape = f"[any, {width}]" if dims == 2 else f"[{width}]"
        _refuse(argument, f"{shape} {str(dtype).removeprefix('torch.')} on {device}", tensor)
    if tensor.stride(-1) != 1 and width > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(-1)}")


def check_copy(caches: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `copy_blocks`: caches whose first dimension is the block, pairs [P, 2] beside them."""
    if not caches:
        raise ArgumentError("caches", "at least one cache", "none")
    for index, cache in enumerate(caches):
        if not 2 <= cache.dim() <= 8:
            _refuse("caches", f"tensors of 2 to 8 dimensions, the first of them the block (entry {index})", cache)
        if cache.device != caches[0].device or cache.shape[0] != caches[0].shape[0]:
            _refuse("caches", f"{caches[0].shape[0]} blocks on {caches[0].device} in each (entry {index})", cache)
    _check_ints("pairs", pairs, torch.int64, 2, "[P, 2]", caches[0].device)
    if pairs.shape[1] != 2:
        _refuse("pairs", "[P, 2] (source, destination)", pairs)


def check_swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `swap_blocks`: two lists of caches whose blocks have the same shape and dtype, one by one."""
    if not src:
        raise ArgumentError("src", "at least one cache", "none")
    if len(src) != len(dst):
        raise ArgumentError("dst", f"{len(src)} caches, as in `src`", len(dst))
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
        for argument, cache, like in (("src", source, src[0]), ("dst", target, dst[0])):
            if not 2 <= cache.dim() <= 8:
                _refuse(argument, f"tensors of 2 to 8 dimensions, the first of them the block (entry {index})", cache)
            if cache.shape[0] != like.shape[0] or cache.device != like.device:
                _refuse(argument, f"{like.shape[0]} blocks on {like.device} in each (entry {index})", cache)
        if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
            _refuse("dst", f"blocks of the shape and dtype of `src` (entry {index})", target)
    _check_ints("pairs", pairs, torch.int64, 2, "[P, 2]", pairs.device)
    if pairs.shape[1] != 2:
        _refuse("pairs", "[P, 2] (source, destination)", pairs)


def check_scale_values(key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    """A scale that stands for a whole cache is a positive number: nothing else can be divided by."""
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and scale.dim() <= 1 and not 0 < float(scale) < float("inf"):
            raise ArgumentError(argument, "a positive number as the one scale", float(scale))


def check_slot_values(slot_mapping: Tensor, num_slots: int) -> None:
    """Every slot is −1 (skip) or lies in the pool. O(T), reads the values."""
    bad = (slot_mapping < -1) | (slot_mapping >= num_slots)
    if bad.any():
        token = int(bad.nonzero()[0])
        got = int(slot_mapping[token])
        raise SlotError(f"`slot_mapping`: wanted -1 or a slot below {num_slots}, got {got} at token {token}")


def check_position_values(positions: Tensor, num_positions: int) -> None:
    """Every position is a row of the table of angles. O(T), reads the values."""
    bad = (positions < 0) | (positions >= num_positions)
    if bad.any():
        token = int(bad.nonzero()[0])
        wanted = f"0 to {num_positions - 1} (rows of `cos_sin`)"
        raise ArgumentError("positions", wanted, f"{int(positions[token])} at token {token}")


def check_sequence_values(
    block_tables: Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_blocks: int,
    block_size: int,
    max_seq_len: int,
    window: int,
) -> None:
    """Lengths fit the tables and the bound, and every table entry that will be read names a block. O(B·M).

    Entries of blocks that lie wholly before the first query's window are not read, so they are not checked either.
    """
    M = block_tables.shape[1]
    longest = min(M * block_size, max_seq_len)
    for row, (length, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        if not 0 <= length <= longest:
            wanted = f"lengths of 0 to {longest} ({M} blocks of {block_size}, `max_seq_len` {max_seq_len})"
            raise ArgumentError("seq_lens", wanted, f"{length} in row {row}")
        if length == 0 or query_len == 0:
            continue
        first = max(0, length - query_len + 1 - window) if window else 0
        columns = slice(first // block_size, -(-length // block_size))
        entries = block_tables[row, columns]
        bad = (entries < 0) | (entries >= num_blocks)
        if bad.any():
            column = int(bad.nonzero()[0])
            where = f"{int(entries[column])} at row {row}, column {column + columns.start}"
            raise SlotError(f"`block_tables`: wanted a block id of 0 to {num_blocks - 1}, got {where}")


def check_query_values(query_start_loc: list[int], seq_lens: list[int], num_tokens: int, max_query_len: int) -> None:
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


def check_start_values(seq_start_loc: list[int], seq_lens: list[int], num_rows: int) -> None:
    """Rows of `gather_kv`: they lie one sequence after another and fit into `key`."""
    written = 0
    for row, length in enumerate(seq_lens):
        start, stop = seq_start_loc[row], seq_start_loc[row + 1]
        if start < written or stop < start + length:
            wanted = "rising starts, each at least the sequence's length apart"
            raise ArgumentError("seq_start_loc", wanted, f"{start} to {stop} for length {length} at row {row}")
        written = start + length
    if seq_start_loc[-1] > num_rows:
        raise ArgumentError("seq_start_loc", f"a last entry of at most {num_rows} (rows of `key`)", seq_start_loc[-1])


def check_schedule_values(schedule: list[int], seq_lens: list[int], fixed_split: int) -> None:
    """A schedule: [B, fixed_split, row, position, …], cuts in order from the start of the batch to its end."""
    wanted = "one that make_schedule made for these `seq_lens` and `fixed_split`"
    B = len(seq_lens)
    if len(schedule) < 6 or len(schedule) % 2:
        raise ArgumentError("schedule", wanted, f"{len(schedule)} entries")
    if schedule[0] != B:
        raise ArgumentError("schedule", wanted, f"one for {schedule[0]} sequences")
    if schedule[1] != fixed_split:
        raise ArgumentError("schedule", wanted, f"one for splits of {schedule[1]} tokens")
    cuts = list(zip(schedule[2::2], schedule[3::2], strict=True))
    for i, (row, position) in enumerate(cuts):
        if i in (0, len(cuts) - 1):
            fits = (row, position) == ((0, 0) if i == 0 else (B, 0))
        else:
            fits = (row, position) >= cuts[i - 1] and (
                (row, position) == (B, 0) or (0 <= row < B and 0 <= position <= seq_lens[row])
            )
        if not fits or (fixed_split and position % fixed_split):
            raise ArgumentError("schedule", wanted, f"a cut at row {row}, position {position}")


def check_swap_values(pairs: list[list[int]], num_sources: int, num_targets: int) -> None:
    """Both blocks of a pair exist, and no destination is named twice. O(P)."""
    targets: set[int] = set()
    for row, (source, target) in enumerate(pairs):
        for kind, block, num_blocks in (("source", source, num_sources), ("destination", target, num_targets)):
            if not 0 <= block < num_blocks:
                raise SlotError(f"`pairs`: wanted {kind} blocks of 0 to {num_blocks - 1}, got {block} at row {row}")
        if target in targets:
            raise ArgumentError("pairs", "destinations named once", f"block {target} at row {row}")
        targets.add(target)


def check_pair_values(pairs: list[list[int]], num_blocks: int) -> None:
    """Block ids exist, and no destination is a source or another pair's destination. O(P)."""
    for row, pair in enumerate(pairs):
        for block in pair:
            if not 0 <= block < num_blocks:
                raise SlotError(f"`pairs`: wanted block ids of 0 to {num_blocks - 1}, got {block} at row {row}")
    sources = {source for source, _ in pairs}
    destinations: set[int] = set()
    for row, (_, destination) in enumerate(pairs):
        if destination in sources or destination in destinations:
            wanted = "destinations that are no source and named once"
            raise ArgumentError("pairs", wanted, f"block {destination} at row {row}")
        destinations.add(destination)
