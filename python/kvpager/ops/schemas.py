"""The schemas of the registered ops: the one place where a signature stands.

Every op writes into tensors it is given and returns nothing, so a captured graph or a compiled step allocates nothing.
The caches are HND, [N, K, S, D], with any strides over the first three dimensions; the wrappers turn NHD into views.
Lengths that change from step to step are SymInt: with `int`, torch.compile would compile anew for each value.
Kernels and fakes are registered elsewhere: by the native library (csrc/ops.cpp, csrc/cuda/) and `kvpager.ops.dispatch`.
"""

import torch
from torch._ops import OpOverload

NAMESPACE = "kvpager"

_SCALES = "Tensor? key_scale=None, Tensor? value_scale=None"
_ATTENTION_OPTIONS = f"int window=0, float softcap=0.0, Tensor? sinks=None, {_SCALES}"

SCHEMAS = {
    # The scales are written, unless there is one for the whole cache.
    "write_kv": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
        "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()"
    ),
    "paged_attention": (
        "(Tensor(a!) out, Tensor(b!)? lse, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
        f"Tensor seq_lens, *, float scale, SymInt max_seq_len, {_ATTENTION_OPTIONS}, "
        "int fixed_split=0, Tensor? schedule=None, Tensor(c!)? workspace=None) -> ()"
    ),
    "paged_prefill": (
        "(Tensor(a!) out, Tensor(b!)? lse, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
        "Tensor query_start_loc, Tensor seq_lens, *, float scale, SymInt max_query_len, SymInt max_seq_len, "
        f"{_ATTENTION_OPTIONS}) -> ()"
    ),
    "merge_attention": (
        "(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()"
    ),
    "qk_norm_rope_write": (
        "(Tensor(a!) query_out, Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, Tensor positions, "
        "Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slot_mapping, *, float eps, "
        "Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None) -> ()"
    ),
    "linear": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None) -> ()",
    "rms_norm": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor(b!)? residual=None, *, float eps) -> ()",
    "silu_mul": "(Tensor(a!) out, Tensor gate, Tensor up) -> ()",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs) -> ()",
    "swap_blocks": "(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()",
    "update_tables": "(Tensor(a!) block_tables, Tensor changed) -> ()",
    "gather_kv": (
        "(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
        f"Tensor seq_lens, Tensor seq_start_loc, *, {_SCALES}) -> ()"
    ),
    # Moves the device's error word into `word` [1] int64 and clears it, in stream order.
    "take_errors": "(Tensor(a!) word) -> ()",
}

library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def registered_op(name: str) -> OpOverload:
    """The op itself, resolved once: what the wrappers call, without the lookup by overload at each call."""
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload
