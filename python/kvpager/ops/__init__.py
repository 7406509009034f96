"""Paged attention ops over any paged K/V cache: allocating, checked wrappers around `torch.ops.kvpager`.

Letters: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, M blocks per table row.
`layout` names the axes of the caches: `"HND"` = [N, K, S, D] (default), `"NHD"` = [N, S, K, D]. Both may be strided
views (of one allocation for all layers, of interleaved K and V); the last dimension of every float tensor must be
contiguous. dtypes: those of numbers in `kvpager.cache_dtypes`, one for all float tensors of a call. Arithmetic is in
float32 (float64 for float64). Caches may also hold codes, with a float32 scale for each row of D beside them, or one
for the whole cache; `quantise` says which numbers they stand for.

Shapes, dtypes and devices that do not fit raise `ArgumentError`, before anything is written; so does a tensor that is
written and has two elements at one address, as an expanded one has. Bad values (slots, table
entries, lengths) raise `SlotError` or `ArgumentError` on the CPU, with nothing written. On CUDA the row is skipped and
an error is kept on the device until `check_errors()` raises it; `KVPAGER_CHECKED=1` does that after every call, at the
price of a device sync. In a compiled graph a bad value surfaces as the kernel's RuntimeError, with the same text.

The ops are for inference: no gradient flows through them. Importing this module loads the native library, or registers
the reference kernels and logs that once.
"""

from kvpager.ops.attention.merge import merge_attention, merge_attention_lse
from kvpager.ops.attention.paged import paged_attention, paged_attention_lse, paged_prefill, paged_prefill_lse
from kvpager.ops.attention.shared_prefix import shared_prefix_attention, shared_prefix_attention_lse
from kvpager.ops.attention.split_plan import default_num_parts, make_split_plan, workspace_bytes
from kvpager.ops.layers.linear import linear
from kvpager.ops.layers.qk_norm_rope_write import qk_norm_rope_write
from kvpager.ops.layers.rank_tokens import rank_tokens
from kvpager.ops.layers.rms_norm import rms_norm
from kvpager.ops.layers.silu_mul import silu_mul
from kvpager.ops.moves.blocks import copy_blocks, swap_blocks
from kvpager.ops.moves.gather_kv import gather_kv
from kvpager.ops.moves.quantise import dequantise, quantise
from kvpager.ops.moves.update_tables import update_tables
from kvpager.ops.moves.write_kv import write_kv
from kvpager.ops.op import check_errors
from kvpager.ops.tensors import Layout

__all__ = [
    "Layout",
    "check_errors",
    "copy_blocks",
    "default_num_parts",
    "dequantise",
    "gather_kv",
    "linear",
    "make_split_plan",
    "merge_attention",
    "merge_attention_lse",
    "paged_attention",
    "paged_attention_lse",
    "paged_prefill",
    "paged_prefill_lse",
    "qk_norm_rope_write",
    "quantise",
    "rank_tokens",
    "rms_norm",
    "shared_prefix_attention",
    "shared_prefix_attention_lse",
    "silu_mul",
    "swap_blocks",
    "update_tables",
    "workspace_bytes",
    "write_kv",
]
