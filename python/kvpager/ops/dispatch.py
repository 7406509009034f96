"""Which kernels run: loads the native library, registers the reference kernels for every device it does not serve."""

from torch import Tensor

from kvpager.native import native_status
from kvpager.ops import reference
from kvpager.ops.schemas import SCHEMAS, library


def _paged_attention(out: Tensor, lse: Tensor | None, query: Tensor, *inputs: Tensor, **options: object) -> None:
    _store(out, lse, reference.paged_attention(query, *inputs, **options))  # type: ignore[arg-type]


def _paged_prefill(out: Tensor, lse: Tensor | None, query: Tensor, *inputs: Tensor, **options: object) -> None:
    _store(out, lse, reference.paged_prefill(query, *inputs, **options))  # type: ignore[arg-type]


def _merge_attention(
    out: Tensor, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    _store(out, lse, reference.merge_attention(out_a, lse_a, out_b, lse_b))


def _store(out: Tensor, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> None:
    out.copy_(result[0])
    if lse is not None:
        lse.copy_(result[1])


def _take_errors(word: Tensor) -> None:
    word.zero_()  # the reference kernels raise at once, so nothing is ever pending


REFERENCE_KERNELS = {
    "write_kv": reference.write_kv,
    "paged_attention": _paged_attention,
    "paged_prefill": _paged_prefill,
    "merge_attention": _merge_attention,
    "copy_blocks": reference.copy_blocks,
    "take_errors": _take_errors,
}


def register_kernels() -> None:
    """Make every op of `SCHEMAS` callable on CPU and CUDA tensors; called once, by `kvpager.ops`."""
    status = native_status()
    for served, key in ((status.loaded, "CPU"), (status.cuda_kernels, "CUDA")):
        if not served:
            for name in SCHEMAS:
                library.impl(name, REFERENCE_KERNELS[name], key)  # type: ignore[no-untyped-call]
