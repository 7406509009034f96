"""Which kernels run: loads the native library, registers the reference kernels where it serves not, and the fakes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpager.native import native_status
from kvpager.ops import checks, layer_checks, reference, reference_fused, reference_layers, value_checks
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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    fixed_split: int = 0,
    schedule: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    checks.check_attention(
        out, lse, query, key_cache, value_cache, block_tables, None, seq_lens, sinks, scale, window, softcap,
        key_scale, value_scale,
    )  # fmt: skip
    checks.check_split(fixed_split, schedule, workspace, query)


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    checks.check_attention(
        out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, scale, window, softcap,
        key_scale, value_scale,
    )  # fmt: skip


def _check_word(word: Tensor) -> None:
    """The error word is made by `kvpager.ops.check_errors` alone."""


def _write_kv(*inputs: Tensor, **scales: Any) -> None:
    checks.check_write(*inputs, **scales)
    reference.write_kv(*inputs, **scales)


def _paged_attention(
    out: Tensor,
    lse: Tensor | None,
    *inputs: Tensor,
    fixed_split: int = 0,
    schedule: Tensor | None = None,
    workspace: Tensor | None = None,
    **options: Any,
) -> None:
    _check_attention(out, lse, *inputs, fixed_split=fixed_split, schedule=schedule, workspace=workspace, **options)
    if schedule is not None:  # the reference never cuts a sequence, so that every schedule gives the same
        value_checks.check_schedule_values(schedule.tolist(), inputs[-1].tolist(), fixed_split)
    _store(out, lse, reference.paged_attention(*inputs, **options))


def _paged_prefill(out: Tensor, lse: Tensor | None, *inputs: Tensor, **options: Any) -> None:
    _check_prefill(out, lse, *inputs, **options)
    _store(out, lse, reference.paged_prefill(*inputs, **options))


def _merge_attention(out: Tensor, lse: Tensor | None, *parts: Tensor) -> None:
    checks.check_merge(out, lse, *parts)
    _store(out, lse, reference.merge_attention(*parts))


def _qk_norm_rope_write(*inputs: Any, **options: Any) -> None:
    checks.check_fused(*inputs, **options)
    reference_fused.qk_norm_rope_write(*inputs, **options)


def _linear(*inputs: Any, **options: Any) -> None:
    layer_checks.check_linear(*inputs, **options)
    reference_layers.linear(*inputs, **options)


def _rms_norm(*inputs: Any, **options: Any) -> None:
    layer_checks.check_rms_norm(*inputs, **options)
    reference_layers.rms_norm(*inputs, **options)


def _silu_mul(*inputs: Any) -> None:
    layer_checks.check_silu_mul(*inputs)
    reference_layers.silu_mul(*inputs)


def _copy_blocks(caches: list[Tensor], pairs: Tensor) -> None:
    checks.check_copy(caches, pairs)
    reference.copy_blocks(caches, pairs)


def _swap_blocks(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    checks.check_swap(src, dst, pairs)
    reference.swap_blocks(src, dst, pairs)


def _update_tables(block_tables: Tensor, changed: Tensor) -> None:
    checks.check_update(block_tables, changed)
    reference.update_tables(block_tables, changed)


def _gather_kv(*tensors: Tensor, **scales: Any) -> None:
    checks.check_gather(*tensors, **scales)
    reference.gather_kv(*tensors, **scales)


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
    "qk_norm_rope_write": _qk_norm_rope_write,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "copy_blocks": _copy_blocks,
    "swap_blocks": _swap_blocks,
    "update_tables": _update_tables,
    "gather_kv": _gather_kv,
    "take_errors": _take_errors,
}
# Results go to tensors that exist already, so a fake has nothing to make: it checks what a kernel would check.
FAKES: dict[str, Callable[..., None]] = {
    "write_kv": checks.check_write,
    "paged_attention": _check_attention,
    "paged_prefill": _check_prefill,
    "merge_attention": checks.check_merge,
    "qk_norm_rope_write": checks.check_fused,
    "linear": layer_checks.check_linear,
    "rms_norm": layer_checks.check_rms_norm,
    "silu_mul": layer_checks.check_silu_mul,
    "copy_blocks": checks.check_copy,
    "swap_blocks": checks.check_swap,
    "update_tables": checks.check_update,
    "gather_kv": checks.check_gather,
    "take_errors": _check_word,
}

# What the CUDA library has no kernel for; the reference runs there.
WITHOUT_CUDA_KERNEL = frozenset({"linear", "rms_norm", "silu_mul"})


def register_kernels() -> None:
    """Make every op of `SCHEMAS` callable on CPU, CUDA and fake tensors; called once, by `kvpager.ops`."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    status = native_status()
    for served, key in ((status.loaded, "CPU"), (status.cuda_kernels, "CUDA")):
        for name in SCHEMAS:
            if not served or (key == "CUDA" and name in WITHOUT_CUDA_KERNEL):
                library.impl(name, REFERENCE_KERNELS[name], key)  # type: ignore[no-untyped-call]
