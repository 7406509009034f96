"""`copy_blocks` and `swap_blocks`: whole blocks move within their caches, or from some caches to others."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpager.errors import ArgumentError, SlotError
from kvpager.ops.op import Op
from kvpager.ops.tensors import check_ints, check_written, refuse


def _check_copy(caches: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `copy_blocks`: caches whose first dimension is the block, pairs [P, 2] beside them."""
    if not caches:
        raise ArgumentError("caches", "at least one cache", "none")
    for index, cache in enumerate(caches):
        _check_cache("caches", index, cache, caches[0])
        check_written("caches", cache)
    _check_pairs(pairs, caches[0].device)


def _check_pair_values(pairs: list[list[int]], num_blocks: int) -> None:
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


def _copy(caches: list[Tensor], pairs: Tensor) -> None:
    _check_pair_values(pairs.tolist(), caches[0].shape[0])
    sources, destinations = pairs.unbind(1)
    for cache in caches:
        cache[destinations] = cache[sources]


_COPY_BLOCKS = Op("copy_blocks", "(Tensor(a!)[] caches, Tensor pairs) -> ()", _check_copy, _copy)


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks within each cache: what copy-on-write asks for, before the next write.

    Args:
        caches: tensors [N, …] of 2 to 8 dimensions and any dtype and strides, on one device: a layer's key or value
            cache in either layout, or a view of a whole pool with the block first. Written.
        pairs: pairs [P, 2] int64 on the same device, or a list: (source, destination) block ids. No destination is a
            source or named twice. In a tensor on CUDA this last condition is not checked.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or a destination is a source or named twice.
        SlotError: a block id outside the pool; nothing is copied.

    O(P · bytes per block).
    """
    caches = _cache_list("caches", caches)
    if not isinstance(pairs, Tensor):
        rows = _pair_rows(pairs)
        if caches and caches[0].dim():
            _check_pair_values(rows, caches[0].shape[0])
        pairs = torch.tensor(rows, dtype=torch.int64, device=caches[0].device if caches else None).reshape(-1, 2)
    _COPY_BLOCKS(caches, pairs)


def _check_swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Metadata of `swap_blocks`: two lists of caches whose blocks have the same shape and dtype, one by one."""
    if not src:
        raise ArgumentError("src", "at least one cache", "none")
    if len(src) != len(dst):
        raise ArgumentError("dst", f"{len(src)} caches, as in `src`", len(dst))
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
        _check_cache("src", index, source, src[0])
        _check_cache("dst", index, target, dst[0])
        if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
            refuse("dst", f"blocks of the shape and dtype of `src` (entry {index})", target)
        check_written("dst", target)
    _check_pairs(pairs, pairs.device)


def _check_swap_values(pairs: list[list[int]], num_sources: int, num_targets: int) -> None:
    """Both blocks of a pair exist, and no destination is named twice. O(P)."""
    targets: set[int] = set()
    for row, (source, target) in enumerate(pairs):
        for kind, block, num_blocks in (("source", source, num_sources), ("destination", target, num_targets)):
            if not 0 <= block < num_blocks:
                raise SlotError(f"`pairs`: wanted {kind} blocks of 0 to {num_blocks - 1}, got {block} at row {row}")
        if target in targets:
            raise ArgumentError("pairs", "destinations named once", f"block {target} at row {row}")
        targets.add(target)


def _swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    _check_swap_values(pairs.tolist(), src[0].shape[0], dst[0].shape[0])
    sources, targets = pairs.unbind(1)
    for source, target in zip(src, dst, strict=True):
        moved = source[sources.to(source.device)].to(target.device)
        target[targets.to(target.device)] = moved


_SWAP_BLOCKS = Op("swap_blocks", "(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()", _check_swap, _swap)


def swap_blocks(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks from some caches to others, to another tier and back; scales are caches too.

    Between a GPU and pinned memory the copies are queued on the current stream and nothing waits: make a side stream
    current, so that they overlap with what computes, and order it with events. Pairs on the CPU go to the copy engines
    as one batch of merged runs (run by run on the default stream and under capture, where a graph keeps them for good);
    pairs on the GPU are read there by a kernel, which a captured graph replays with new pairs.

    Args:
        src: tensors [N, …] of 2 to 8 dimensions and any dtype and strides: where blocks come from.
        dst: as many tensors [N', …], each with blocks of the shape and dtype of its source and no memory in common with
            any source; written.
        pairs: pairs [P, 2] int64, or a list: (block of `src`, block of `dst`). No block of `dst` is named twice. In a
            tensor on CUDA the values are checked there, and this last condition is not.

    Raises:
        ArgumentError: shapes or dtypes do not fit, a destination is named twice, or memory beside a GPU is not pinned.
        SlotError: a block id outside its pool; nothing is copied.

    O(P · bytes per block).
    """
    src, dst = _cache_list("src", src), _cache_list("dst", dst)
    if not isinstance(pairs, Tensor):
        pairs = torch.tensor(_pair_rows(pairs), dtype=torch.int64).reshape(-1, 2)
    _SWAP_BLOCKS(src, dst, pairs)


def _check_cache(argument: str, index: int, cache: Tensor, first: Tensor) -> None:
    """Entry `index` of a list of caches, beside the first one."""
    if not 2 <= cache.dim() <= 8:
        refuse(argument, f"tensors of 2 to 8 dimensions, the first of them the block (entry {index})", cache)
    if cache.shape[0] != first.shape[0] or cache.device != first.device:
        refuse(argument, f"{first.shape[0]} blocks on {first.device} in each (entry {index})", cache)


def _check_pairs(pairs: Tensor, device: torch.device) -> None:
    check_ints("pairs", pairs, torch.int64, 2, "[P, 2]", device)
    if pairs.shape[1] != 2:
        refuse("pairs", "[P, 2] (source, destination)", pairs)


def _cache_list(argument: str, caches: Sequence[Tensor]) -> list[Tensor]:
    """The caches as a list. One tensor is none: going through it would take its blocks for caches."""
    if isinstance(caches, Tensor) or not isinstance(caches, Sequence):
        raise ArgumentError(argument, "a list of caches", type(caches).__name__)
    return list(caches)


def _pair_rows(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The pairs of a list as ints that a tensor can hold. O(P)."""
    try:
        rows = [[operator.index(block) for block in pair] for pair in pairs]
    except TypeError as error:
        raise ArgumentError("pairs", "a tensor [P, 2] int64 or a list of (source, destination)", error) from None
    for row, pair in enumerate(rows):
        if len(pair) != 2 or not all(abs(block) < 2**63 for block in pair):
            raise ArgumentError("pairs", "two block ids in each", f"{tuple(pair)} at row {row}")
    return rows
