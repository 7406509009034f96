"""What an op writes has no two elements at one address: an expanded tensor is refused by every kernel set."""

import re

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError

N, K, S, D, H, T = 4, 2, 4, 8, 4, 3


def rows(*shape):
    return torch.ones(*shape)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def caches(dtype=torch.float32):
    return {name: torch.zeros(N, K, S, D, dtype=dtype) for name in ("key_cache", "value_cache")}


def codes():
    return {**caches(torch.int8), "key_scale": rows(N, K, S), "value_scale": rows(N, K, S)}


def token_rows():
    return {"key": rows(T, K, D), "value": rows(T, K, D), "slot_mapping": torch.arange(T)}


def fused():
    return {
        "qkv": rows(T, (H + 2 * K) * D), "q_weight": None, "k_weight": None, "cos_sin": rows(T, D),
        "positions": torch.arange(T), "slot_mapping": torch.arange(T), "query_out": rows(T, H, D),
    }  # fmt: skip


def attention():
    tables = torch.arange(T, dtype=torch.int32).reshape(T, 1)
    results = {"out": rows(T, H, D), "lse": rows(T, H)}
    return {**caches(), "query": rows(T, H, D), "block_tables": tables, "seq_lens": ints(*[2] * T), **results}


def parts():
    return {"out_a": rows(T, H, D), "lse_a": rows(T, H), "out_b": rows(T, H, D), "lse_b": rows(T, H)}


# Op -> good arguments, and the names of what it writes.
OPS = {
    "write_kv": (lambda: {**caches(), **token_rows()}, ("key_cache", "value_cache")),
    "write_kv of codes": (
        lambda: {**codes(), **token_rows()},
        ("key_cache", "value_cache", "key_scale", "value_scale"),
    ),
    "qk_norm_rope_write": (lambda: {**caches(), **fused()}, ("key_cache", "value_cache", "query_out")),
    "qk_norm_rope_write of codes": (lambda: {**codes(), **fused()}, ("key_cache", "key_scale", "value_scale")),
    "paged_attention": (attention, ("out", "lse")),
    "paged_prefill": (lambda: {**attention(), "query_start_loc": ints(*range(T + 1))}, ("out", "lse")),
    "merge_attention": (lambda: {**parts(), "out": rows(T, H, D), "lse": rows(T, H)}, ("out", "lse")),
    "gather_kv": (
        lambda: {
            **caches(), "block_tables": ints(0, 1, 2).reshape(3, 1), "seq_lens": ints(1, 1, 1),
            "key": rows(T, K, D), "value": rows(T, K, D),
        },
        ("key", "value"),
    ),
    "copy_blocks": (lambda: {"caches": list(caches().values()), "pairs": [(0, 1)]}, ("caches",)),
    "swap_blocks": (lambda: {"src": [rows(N, K, S)], "dst": [rows(N, K, S)], "pairs": [(0, 1)]}, ("dst",)),
    "update_tables": (
        lambda: {"block_tables": torch.zeros(3, 2, dtype=torch.int32), "changed": ints(0, 1, 5).reshape(1, 3)},
        ("block_tables",),
    ),
    "make_split_plan": (
        lambda: {"seq_lens": ints(3), "block_size": S, "num_parts": 1, "out": torch.zeros(6, dtype=torch.int32)},
        ("out",),
    ),
    "linear": (lambda: {"x": rows(T, D), "weight": rows(D, D), "out": rows(T, D)}, ("out",)),
    "rms_norm": (
        lambda: {"x": rows(T, D), "weight": rows(D), "eps": 1e-6, "residual": rows(T, D), "out": rows(T, D)},
        ("out", "residual"),
    ),
    "silu_mul": (lambda: {"gate": rows(T, D), "up": rows(T, D), "out": rows(T, D)}, ("out",)),
}  # fmt: skip
LAYERS = ("linear", "rms_norm", "silu_mul")  # have no CUDA kernel


def expanded(tensor):
    """Rows that are all the first one."""
    return tensor[:1].clone().expand(tensor.shape)


def sliding(tensor):
    """Rows that begin one element apart."""
    strides = (1, *tensor.contiguous().stride()[1:])
    return tensor.new_zeros(tensor.numel() + len(tensor)).as_strided(tensor.shape, strides)


def bits(arguments):
    """Every tensor among the arguments, as it lies now."""
    lists = [value if isinstance(value, list) else [value] for value in arguments.values()]
    return [tensor.clone() for value in lists for tensor in value if isinstance(tensor, torch.Tensor)]


# In one dimension elements one apart share nothing.
CASES = [
    (op, argument, overlapping)
    for op, (_, written) in OPS.items()
    for argument in written
    for overlapping in (expanded, sliding)
    if (op, overlapping) != ("make_split_plan", sliding)
]


@pytest.mark.parametrize(("op", "argument", "overlapping"), [case for case in CASES if case[0] not in LAYERS])
def test_what_is_written_must_not_overlap(kernels, op, argument, overlapping):
    check_refused(op, argument, overlapping)


@pytest.mark.parametrize("kernels", ["native", "reference"], indirect=True)
@pytest.mark.parametrize(("op", "argument", "overlapping"), [case for case in CASES if case[0] in LAYERS])
def test_what_a_layer_writes_must_not_overlap(kernels, op, argument, overlapping):
    check_refused(op, argument, overlapping)


def check_refused(op, argument, overlapping):
    name = op.split()[0]
    make, _ = OPS[op]
    getattr(ops, name)(**make())  # accepted as they are
    arguments = make()
    good = arguments[argument]
    arguments[argument] = [overlapping(good[0]), *good[1:]] if isinstance(good, list) else overlapping(good)
    before = bits(arguments)
    text = f"`{argument}`: wanted elements that share no memory, since they are written, got ["
    with pytest.raises(ArgumentError, match=re.escape(text)):
        getattr(ops, name)(**arguments)
    assert all(torch.equal(one, other) for one, other in zip(before, bits(arguments), strict=True))


def test_what_does_not_overlap_is_written(kernels):
    """Axes in another order, gaps between rows, and strides that no step is taken by."""
    for table in (
        torch.zeros(2, 3, dtype=torch.int32).T,
        torch.zeros(3, 9, dtype=torch.int32)[:, ::4],
        torch.zeros(2, dtype=torch.int32).as_strided((1, 2), (0, 1)),
    ):
        ops.update_tables(table, ints(0, 1, 5).reshape(1, 3))
        assert table[0].tolist()[:2] == [0, 5]
        assert table.sum() == 5


def test_one_scale_for_all_is_only_read(kernels):
    pool = {**codes(), "key_scale": rows(1), "value_scale": rows(1)}
    ops.write_kv(**pool, **token_rows())
    assert pool["key_cache"][0, :, :T].eq(1).all()
