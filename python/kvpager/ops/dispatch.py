"""Which kernels run: loads the native library, registers the reference kernels where it serves not, and the fakes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpager.native import native_status
from kvpager.ops import checks, reference
from kvpager.ops.schemas import NAMESPACE, SCHEMAS, library


def _check_attention(
    out: Tensor,
    lse: Tensor | None,
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
) -> None:
    checks.check_attention(
        out, lse, query, key_cache, value_cache, block_tables, None, seq_lens, sinks, window, softcap
    )


def _check_prefill(
    out: Tensor,
    lse: Tensor | None,
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
) -> None:
    checks.check_attention(
        out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, window, softcap
    )


def _check_word(word: Tensor) -> None:
    """The error word is made by `kvpager.ops.check_errors` alone."""


def _write_kv(*inputs: Tensor) -> None:
    checks.check_write(*inputs)
    reference.write_kv(*inputs)


def _paged_attention(out: Tensor, lse: Tensor | None, *inputs: Tensor, **options: Any) -> None:
    _check_attention(out, lse, *inputs, **options)
    _store(out, lse, reference.paged_attention(*inputs, **options))


def _paged_prefill(out: Tensor, lse: Tensor | None, *inputs: Tensor, **options: Any) -> None:
    _check_prefill(out, lse, *inputs, **options)
    _store(out, lse, reference.paged_prefill(*inputs, **options))


def _merge_attention(out: Tensor, lse: Tensor | None, *parts: Tensor) -> None:
    checks.check_merge(out, lse, *parts)
    _store(out, lse, reference.merge_attention(*parts))


def _copy_blocks(caches: list[Tensor], pairs: Tensor) -> None:
    checks.check_copy(caches, pairs)
    reference.copy_blocks(caches, pairs)


def _take_errors(word: Tensor) -> None:
    word.zero_()  # the reference kernels raise at once, so nothing is ever pending


def _store(out: Tensor, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> None:
    out.copy_(result[0])
    if lse is not None:
        lse.copy_(result[1])


REFERENCE_KERNELS: dict[str, Callable[..., None]] = {
    "write_kv": _write_kv,
    "paged_attention": _paged_attention,
    "paged_prefill": _paged_prefill,
    "merge_attention": _merge_attention,
    "copy_blocks": _copy_blocks,
    "take_errors": _take_errors,
}
# Results go to tensors that exist already, so a fake has nothing to make: it checks what a kernel would check.
FAKES: dict[str, Callable[..., None]] = {
    "write_kv": checks.check_write,
    "paged_attention": _check_attention,
    "paged_prefill": _check_prefill,
    "merge_attention": checks.check_merge,
    "copy_blocks": checks.check_copy,
    "take_errors": _check_word,
}


def register_kernels() -> None:
    """Make every op of `SCHEMAS` callable on CPU, CUDA and fake tensors; called once, by `kvpager.ops`."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    status = native_status()
    for served, key in ((status.loaded, "CPU"), (status.cuda_kernels, "CUDA")):
        if not served:
            for name in SCHEMAS:
                library.impl(name, REFERENCE_KERNELS[name], key)  # type: ignore[no-untyped-call]
