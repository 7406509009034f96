"""The ops as torch sees them: opcheck, full-graph compilation for changing lengths, meta tensors, raw calls."""

import math
import re

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError, SlotError
from kvpager.ops.op import OPS


def arguments_of(name):
    """A small good call of each op: (args, kwargs)."""
    caches = [torch.randn(4, 2, 4, 8) for _ in range(2)]
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    out, lse, query = torch.empty(4, 6, 8), torch.empty(4, 6), torch.randn(4, 6, 8)
    heads = {"sinks": torch.randn(6), "alibi_slopes": torch.rand(6)}
    options = {"scale": 0.3, "max_seq_len": 8, "window": 3, "softcap": 2.0, **heads}
    return {
        "write_kv": ((torch.randn(3, 2, 8), torch.randn(3, 2, 8), *caches, torch.tensor([3, -1, 9])), {}),
        "paged_attention": ((out[:2], lse[:2], query[:2], *caches, table, lengths), options),
        "paged_prefill": ((out, lse, query, *caches, table, starts, lengths), {**options, "max_query_len": 4}),
        "merge_attention": ((out, None, query, torch.randn(4, 6), query + 1, torch.randn(4, 6)), {}),
        "qk_norm_rope_write": (
            (
                query,
                torch.randn(4, 80),
                torch.randn(8),
                None,
                torch.randn(9, 8),
                torch.tensor([0, 8, 3, 1]),
                *caches,
                torch.tensor([3, -1, 9, 15]),
            ),
            {"eps": 1e-6},
        ),
        "linear": ((torch.empty(4, 5), torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)), {}),
        "rms_norm": ((torch.empty(4, 8), torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)), {"eps": 1e-6}),
        "silu_mul": ((torch.empty(4, 8), torch.randn(4, 8), torch.randn(4, 8)), {}),
        "rank_tokens": (
            (torch.empty(4), torch.empty(4, dtype=torch.int64), torch.randn(4, 8), torch.tensor([0, 7, 3, 3])),
            {},
        ),
        "copy_blocks": ((caches, torch.tensor([[0, 1]])), {}),
        "swap_blocks": ((caches, [torch.zeros(3, 2, 4, 8) for _ in caches], torch.tensor([[3, 1], [0, 2]])), {}),
        "update_tables": ((table.clone(), torch.tensor([[1, 0, 3], [-1, 9, 9]], dtype=torch.int32)), {}),
        "gather_kv": (
            (torch.empty(9, 2, 8), torch.empty(9, 2, 8), *caches, table, lengths, torch.tensor([0, 5, 9]).int()),
            {},
        ),
        "take_errors": ((torch.zeros(1, dtype=torch.int64),), {}),
    }[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    args, kwargs = arguments_of(name)
    torch.library.opcheck(OPS[name].call, args, kwargs)


@pytest.mark.parametrize("name", ["paged_attention", "paged_prefill"])
def test_opcheck_without_options(name):
    args, kwargs = arguments_of(name)
    required = {key: kwargs[key] for key in ("scale", "max_seq_len", "max_query_len") if key in kwargs}
    torch.library.opcheck(OPS[name].call, (args[0], None, *args[2:]), required)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_once_for_twenty_lengths():
    """A full graph of copy, write, decode, prefill and merge, compiled once: lengths are SymInt."""
    torch._dynamo.reset()

    def step(query, key, value, key_cache, value_cache, slots, table, lengths, starts, pairs, max_seq_len):
        ops.copy_blocks([key_cache, value_cache], pairs)
        ops.write_kv(key, value, key_cache, value_cache, slots)
        bounds = {"max_seq_len": max_seq_len}
        decode = ops.paged_attention_lse(query * 2, key_cache, value_cache, table, lengths, **bounds)
        prefill = ops.paged_prefill_lse(query, key_cache, value_cache, table, starts, lengths, **bounds)
        return ops.merge_attention(*decode, *prefill) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(32, generator=generator).to(torch.int32).reshape(2, 16)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    for count, length in enumerate(range(3, 63, 3)):
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            caches = [torch.randn(32, 2, 4, 8, generator=generator) for _ in range(2)]
            rows = [torch.randn(2, heads, 8, generator=generator) for heads in (4, 2, 2)]
            slots = table[:, (length - 1) // 4].long() * 4 + (length - 1) % 4
            lengths = torch.full((2,), length, dtype=torch.int32)
            pairs = torch.tensor([[int(table[0, 0]), int(table[1, 15])]])
            wanted_caches = [cache.clone() for cache in caches]
            wanted = step(*rows, *wanted_caches, slots, table, lengths, starts, pairs, length)
            got = compiled(*rows, *caches, slots, table, lengths, starts, pairs, length)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
        assert torch.equal(caches[0], wanted_caches[0])
        assert torch.equal(caches[1], wanted_caches[1])


def test_bad_value_in_a_compiled_step_names_the_class():
    torch._dynamo.reset()
    compiled = torch.compile(ops.write_kv, fullgraph=True, backend="aot_eager")
    rows, cache = torch.zeros(1, 1, 2), torch.zeros(2, 1, 4, 2)
    with pytest.raises((RuntimeError, SlotError), match="`slot_mapping`: wanted -1 or a slot below 8, got 8"):
        compiled(rows, rows, cache, cache.clone(), torch.tensor([8]))


def test_meta_tensors_give_shapes():
    query = torch.empty(3, 4, 8, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(5, 2, 4, 8, device="meta", dtype=torch.bfloat16)
    table = torch.empty(3, 2, device="meta", dtype=torch.int32)
    lengths = torch.empty(3, device="meta", dtype=torch.int32)
    out, lse = ops.paged_attention_lse(query, cache, cache, table, lengths)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 4, 8), torch.bfloat16, (3, 4), torch.float32)


# --- typed errors of the wrappers -------------------------------------------------------------------------------------


def good_call():
    cache = torch.zeros(4, 2, 4, 8)
    return {
        "query": torch.zeros(2, 4, 8),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
    }


EMPTY_BLOCKS, SHORT_POOL = torch.zeros(4, 2, 0, 8), torch.zeros(3, 2, 4, 8)
META_LENGTHS = torch.ones(2, device="meta", dtype=torch.int32)
FLOATS = "float32, float16, bfloat16, float64, int8, float8_e4m3fn or float8_e5m2"
BAD_ARGUMENTS = [
    ("query", torch.zeros(2, 4, 7), "[T, H, D] with 4 heads and head dim 8, got [2, 4, 7] float32 on cpu"),
    ("query", torch.zeros(2, 4, 8).half(), "[T, H, D] float32 on cpu, got [2, 4, 8] float16 on cpu"),
    ("query", torch.zeros(4, 8), "[T, H, D], got [4, 8] float32 on cpu"),
    ("query", torch.zeros(3, 4, 8), "2 rows, one for each of `seq_lens`, got 3 rows"),
    ("query", torch.zeros(2, 8, 4).mT, "a contiguous last dimension (stride 1), got stride 4"),
    ("key_cache", torch.zeros(4, 2, 32), f"[N, K, S, D] {FLOATS}, got [4, 2, 32] float32 on cpu"),
    ("key_cache", torch.zeros(4, 2, 4, 8).int(), f"[N, K, S, D] {FLOATS}, got [4, 2, 4, 8] int32 on cpu"),
    ("key_cache", EMPTY_BLOCKS, "[N, K, S, D] with K, S and D of at least 1, got [4, 2, 0, 8] float32 on cpu"),
    ("value_cache", SHORT_POOL, "the shape, dtype and device of `key_cache`, got [3, 2, 4, 8] float32 on cpu"),
    ("seq_lens", META_LENGTHS, "[B] int32 on cpu, got [2] int32 on meta"),
    ("block_tables", torch.zeros(3, 2).int(), "2 rows, one for each of `seq_lens`, got 3 rows"),
    ("sinks", torch.zeros(2), "[4] float32 on cpu, got [2] float32 on cpu"),
    ("sinks", torch.zeros(4).half(), "[4] float32 on cpu, got [4] float16 on cpu"),
    ("alibi_slopes", torch.zeros(2), "[4] float32 on cpu, got [2] float32 on cpu"),
    ("alibi_slopes", torch.zeros(4, 1), "[4] float32 on cpu, got [4, 1] float32 on cpu"),
    ("alibi_slopes", torch.zeros(4).double(), "[4] float32 on cpu, got [4] float64 on cpu"),
    ("alibi_slopes", torch.zeros(4, device="meta"), "[4] float32 on cpu, got [4] float32 on meta"),
    ("window", -1, "0 (all positions) or a positive number of positions, got -1"),
    ("softcap", -1.0, "0 (none) or a finite positive number, got -1.0"),
    ("layout", "NDH", '"HND" or "NHD", got NDH'),
    ("out", torch.zeros(3, 4, 8), "2 rows, got 3 rows"),
    ("lse", torch.zeros(4, 2), "[2, 4] float32 on cpu, got [4, 2] float32 on cpu"),
]


@pytest.mark.parametrize(("argument", "bad", "wanted"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(argument, bad, wanted):
    ops.paged_attention(**good_call())
    with pytest.raises(ArgumentError, match=re.escape(f"`{argument}`: wanted {wanted}") + "$"):
        ops.paged_attention(**{**good_call(), argument: bad})


def test_bad_arguments_of_the_other_ops():
    cache = torch.zeros(4, 2, 4, 8)
    rows = torch.zeros(2, 2, 8)
    with pytest.raises(ArgumentError, match="`slot_mapping`: wanted \\[T\\] int64 on cpu, got \\[2\\] int32"):
        ops.write_kv(rows, rows, cache, cache.clone(), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="`value`: wanted at least 2 rows, one for each slot, got 1 rows"):
        ops.write_kv(rows, rows[:1], cache, cache.clone(), torch.arange(2))
    with pytest.raises(ArgumentError, match="`lse_b`: wanted \\[2, 2\\] float32"):
        ops.merge_attention(rows, torch.zeros(2, 2), rows, torch.zeros(2))
    with pytest.raises(ArgumentError, match="`out_b`: wanted 2 rows, got 1 rows"):
        ops.merge_attention(rows, torch.zeros(2, 2), rows[:1], torch.zeros(1, 2))
    with pytest.raises(ArgumentError, match="`caches`: wanted at least one cache, got none"):
        ops.copy_blocks([], [(0, 1)])
    with pytest.raises(ArgumentError, match="`caches`: wanted 4 blocks on cpu in each \\(entry 1\\)"):
        ops.copy_blocks([cache, cache[:3]], [(0, 1)])
    with pytest.raises(ArgumentError, match="`query_start_loc`: wanted 2 entries for 1 sequences, got 3"):
        ops.paged_prefill(
            rows, cache, cache, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize("given", ["list", "tensor"])
def test_bad_pairs_copy_nothing(kernels, given):
    cache = torch.arange(4.0).reshape(4, 1).expand(4, 8).contiguous()
    before = cache.clone()
    for pairs, error, message in [
        ([(0, 4)], SlotError, "`pairs`: wanted block ids of"),
        ([(-1, 2)], SlotError, "`pairs`: wanted block ids of"),
        ([(0, 1), (1, 2)], ArgumentError, "destinations that are no source"),
        ([(0, 2), (1, 2)], ArgumentError, "destinations that are no source"),
        ([(1, 1)], ArgumentError, "destinations that are no source"),
    ]:
        if given == "tensor" and error is ArgumentError and kernels.name == "emulated":
            continue  # documented: not checked in a tensor on CUDA
        with pytest.raises(error, match=message):
            ops.copy_blocks([cache], pairs if given == "list" else torch.tensor(pairs))
        assert torch.equal(cache, before)


@pytest.mark.parametrize("kernels", ["native", "emulated"], indirect=True)
@pytest.mark.parametrize("name", ["write_kv", "paged_attention", "paged_prefill", "merge_attention", "copy_blocks"])
@pytest.mark.usefixtures("kernels")
def test_raw_calls_with_wrong_shapes_are_refused(name):
    """The C++ entry points are safe without the wrappers: each tensor in turn is cut short or of another dtype."""
    op = OPS[name].call
    args, kwargs = arguments_of(name)
    op(*args, **kwargs)
    refused = 0
    for index, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            continue
        for wrong in (arg[..., :-1], arg.unsqueeze(0), arg.to(torch.uint8)):
            if name == "write_kv" and index == 4 and wrong.shape == (2,):
                continue  # fewer slots than rows are fine
            if name in ("paged_attention", "paged_prefill") and wrong.shape == (2, 1):
                continue  # a narrower table is well-formed
            with pytest.raises(RuntimeError, match="ArgumentError: `"):
                op(*args[:index], wrong, *args[index + 1 :], **kwargs)
            refused += 1
    assert refused >= 3


def test_softcap_sinks_and_window_change_what_they_must():
    """Limits with known answers: a huge softcap is none, window 1 returns V, an infinite sink takes everything."""
    torch.manual_seed(0)
    cache, value_cache = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    query = torch.randn(1, 1, 8)
    plain = ops.paged_attention(query, cache, value_cache, table, lengths)

    def attend(**options):
        return ops.paged_attention(query, cache, value_cache, table, lengths, **options)

    assert torch.allclose(attend(softcap=1e6), plain, atol=1e-5)
    assert torch.allclose(
        attend(softcap=1e-6), torch.cat([value_cache[1, 0], value_cache[0, 0, :2]]).mean(0), atol=1e-5
    )
    assert torch.allclose(attend(window=1), value_cache[0, 0, 1], atol=1e-6)
    assert torch.allclose(attend(window=6), plain, atol=1e-6)
    assert torch.allclose(attend(sinks=torch.tensor([80.0])), torch.zeros(8), atol=1e-6)
    assert torch.allclose(attend(sinks=torch.tensor([-math.inf])), plain, atol=1e-6)


def test_blocks_before_the_window_are_neither_read_nor_checked(kernels):
    """A table whose entries behind the window were given back (−1) still attends."""
    cache, value_cache = torch.full((2, 1, 4, 8), math.nan), torch.full((2, 1, 4, 8), math.nan)
    cache[1], value_cache[1] = 0, 3
    table, lengths = torch.tensor([[-1, 1]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    out = ops.paged_attention(torch.zeros(1, 1, 8), cache, value_cache, table, lengths, window=3)
    assert (out == 3).all()
    with pytest.raises(SlotError, match="block_tables"):
        ops.paged_attention(torch.zeros(1, 1, 8), cache, value_cache, table, lengths, window=4)
