"""The tensors of the ops: dtypes, layouts, and the checks of shapes, dtypes, devices and values that ops share.

Every check raises before anything is written. Checks of metadata stand in an op's `check`, those of values, which read
the tensors, in its reference; the native kernels check the same in C++.
"""

from typing import Literal, NoReturn

import torch
from torch import Tensor

from kvpager.cache_dtypes import CACHE_DTYPES, one_of
from kvpager.errors import ArgumentError, SlotError

FLOAT_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, d.torch_name) for d in CACHE_DTYPES if not d.is_codes)
QUANTISED_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, d.torch_name) for d in CACHE_DTYPES if d.is_codes)
CODED_DTYPES = tuple(dtype for dtype in FLOAT_DTYPES if dtype is not torch.float64)  # what codes are made of
FLOAT_NAMES = one_of(d.torch_name for d in CACHE_DTYPES if not d.is_codes)

Layout = Literal["HND", "NHD"]


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


def as_hnd(key_cache: Tensor, value_cache: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The caches as HND views; the kernels take strides."""
    if layout == "HND":
        return key_cache, value_cache
    if layout != "NHD":
        raise ArgumentError("layout", '"HND" or "NHD"', layout)
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not isinstance(cache, Tensor):
            raise ArgumentError(argument, "a tensor", type(cache).__name__)
        if cache.dim() != 4:
            raise ArgumentError(argument, "[N, S, K, D]", f"{cache.dim()} dimensions")
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


def scales_as_hnd(
    key_scale: Tensor | None, value_scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """The scales of quantised caches, in the caches' layout without D, as [N, K, S] views."""
    if layout == "HND":
        return key_scale, value_scale
    key_scale, value_scale = (
        scale.transpose(1, 2) if isinstance(scale, Tensor) and scale.dim() == 3 else scale
        for scale in (key_scale, value_scale)
    )
    return key_scale, value_scale


def check_rows(argument: str, tensor: Tensor, wanted: str, like: Tensor, heads: int, head_dim: int) -> None:
    """A [rows, heads, head_dim] tensor that goes with `like`, with its last dimension contiguous.

    It has the device of `like` and its dtype, or any of 32 or 16 bits beside a quantised cache.
    """
    shape = tensor.shape
    if len(shape) != 3 or shape[1] != heads or shape[2] != head_dim:
        refuse(argument, f"{wanted} with {heads} heads and head dim {head_dim}", tensor)
    if like.dtype in QUANTISED_DTYPES:
        fits, dtype = tensor.dtype in CODED_DTYPES, one_of(str(dtype).removeprefix("torch.") for dtype in CODED_DTYPES)
    else:
        fits, dtype = tensor.dtype is like.dtype, str(like.dtype).removeprefix("torch.")
    if not fits or tensor.device != like.device:
        refuse(argument, f"{wanted} {dtype} on {like.device}", tensor)
    if tensor.stride(2) != 1 and head_dim > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(2)}")


def check_ints(argument: str, tensor: Tensor, dtype: torch.dtype, dims: int, wanted: str, device: torch.device) -> None:
    """Integers of one dtype and number of dimensions."""
    if tensor.dtype is not dtype or tensor.dim() != dims or tensor.device != device:
        refuse(argument, f"{wanted} {str(dtype).removeprefix('torch.')} on {device}", tensor)


def check_tables(block_tables: Tensor, seq_lens: Tensor, device: torch.device) -> None:
    """Lengths [B] and the block tables [B, M] beside them."""
    check_ints("seq_lens", seq_lens, torch.int32, 1, "[B]", device)
    check_ints("block_tables", block_tables, torch.int32, 2, "[B, M]", device)
    if (num_rows := block_tables.shape[0]) != (B := seq_lens.shape[0]):
        raise ArgumentError("block_tables", f"{B} rows, one for each of `seq_lens`", f"{num_rows} rows")


def check_starts(argument: str, starts: Tensor, seq_lens: Tensor) -> None:
    """Where the rows of each sequence begin [B + 1], beside the lengths [B]."""
    check_ints(argument, starts, torch.int32, 1, "[B + 1]", seq_lens.device)
    if starts.shape[0] != (B := seq_lens.shape[0]) + 1:
        raise ArgumentError(argument, f"{B + 1} entries for {B} sequences", starts.shape[0])


def check_exact(
    argument: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """A tensor of one shape and dtype."""
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        sizes = ", ".join(str(size) for size in shape)
        refuse(argument, f"[{sizes}] {str(dtype).removeprefix('torch.')} on {device}", tensor)


def check_vectors(
    argument: str, tensor: Tensor, dims: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Vectors of `width` numbers, one or a stack of them, each contiguous."""
    if tensor.dim() != dims or tensor.shape[-1] != width or tensor.dtype is not dtype or tensor.device != device:
        shape = f"[any, {width}]" if dims == 2 else f"[{width}]"
        refuse(argument, f"{shape} {str(dtype).removeprefix('torch.')} on {device}", tensor)
    if tensor.stride(-1) != 1 and width > 1:
        raise ArgumentError(argument, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(-1)}")


def check_float_rows(argument: str, tensor: Tensor) -> tuple[int, int]:
    """Rows of floats [rows, width]; returns the two sizes."""
    if tensor.dim() != 2 or tensor.dtype not in FLOAT_DTYPES:
        refuse(argument, f"[rows, width] {FLOAT_NAMES}", tensor)
    check_vectors(argument, tensor, 2, tensor.shape[1], tensor.dtype, tensor.device)
    return tensor.shape[0], tensor.shape[1]


def check_rows_beside(argument: str, tensor: Tensor | None, like: Tensor, rows: int, width: int) -> None:
    """Rows of floats that go with `like`, where they are given."""
    if tensor is None:
        return
    check_vectors(argument, tensor, 2, width, like.dtype, like.device)
    if tensor.shape[0] != rows:
        raise ArgumentError(argument, f"{rows} rows", f"{tensor.shape[0]} rows")


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


def check_written(argument: str, tensor: Tensor | None) -> None:
    """Each dimension longer than 1 steps over all that the dimensions with smaller strides reach.

    As in csrc/tensors.h. Symbolic sizes are left to the kernel: a guard on them would compile a step anew. O(dims).
    """
    if tensor is None:
        return
    shape, strides = tuple(tensor.shape), tensor.stride()
    if any(isinstance(number, torch.SymInt) for number in (*shape, *strides)) or 0 in shape:
        return
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            got = f"{list(shape)} with strides {list(strides)}"
            raise ArgumentError(argument, "elements that share no memory, since they are written", got)
        reach += (size - 1) * stride


def check_written_caches(
    key_cache: Tensor, value_cache: Tensor, key_scale: Tensor | None, value_scale: Tensor | None
) -> None:
    """Caches that are written, and their scales; one scale for all of a cache is only read, and passes."""
    for argument, tensor in (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("key_scale", key_scale),
        ("value_scale", value_scale),
    ):
        check_written(argument, tensor)


# --- values -----------------------------------------------------------------------------------------------------------


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
