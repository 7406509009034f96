"""ALiBi: against Bloom's own bias, and what follows from distances that are relative.

That it is right beside every other option is tested where those are: test_differential.py and the emulated tests.
"""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from kvpager import ops


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def slopes_of(num_heads, scale=1.0):
    """Those of Press et al., 2^(-8 h / H), and for numbers of heads between the powers of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes) * scale


@pytest.mark.parametrize("num_heads", [4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_attention_of_bloom(kernels, make_case, tolerance, num_heads, dtype):
    """Dense attention with transformers' bias, which is counted from position 0: softmax is the same."""
    n = 19 if kernels.name == "emulated" else 150
    case = make_case([n], num_kv_heads=2, group=num_heads // 2, head_dim=64, block_size=16, dtype=dtype)
    query = case.random(n, num_heads, 64)
    bias = build_alibi_tensor(torch.ones(1, n), num_heads, torch.float32).double()  # [H, 1, n]
    mask = torch.full((n, n), -math.inf).triu(1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        *(
            rows.transpose(0, 1).double().repeat_interleave(num_heads // 2, 0)
            for rows in (case.keys[0], case.values[0])
        ),
        attn_mask=bias + mask,
    ).transpose(0, 1)
    arguments = (case.key_cache, case.value_cache, case.block_tables)
    slopes = slopes_of(num_heads)
    out = ops.paged_prefill(query, *arguments, ints(0, n), case.seq_lens, alibi_slopes=slopes)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance[dtype])
    last = ops.paged_attention(query[-1:], *arguments, case.seq_lens, alibi_slopes=slopes)
    torch.testing.assert_close(last[0].double(), wanted[-1], rtol=0, atol=tolerance[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slopes_of_zero_are_none(kernels, make_case, dtype):
    """The same bits; and a slope of 0 among others changes nothing for its head."""
    case = make_case([37, 3], group=3, head_dim=64, block_size=16, dtype=dtype)
    query = case.random(2, 6, 64)
    inputs = (query, case.key_cache, case.value_cache, case.block_tables)
    wide = torch.promote_types(dtype, torch.float32)
    mixed = torch.tensor([0.0, 0.5, 0.0, 0.25, 1.0, 0.0], dtype=wide)
    for attend, lengths in (
        (ops.paged_attention_lse, (case.seq_lens,)),
        (ops.paged_prefill_lse, (ints(0, 1, 2), case.seq_lens)),
    ):
        plain = attend(*inputs, *lengths)
        for slopes in (torch.zeros(6, dtype=wide), mixed):
            for got, wanted in zip(attend(*inputs, *lengths, alibi_slopes=slopes), plain, strict=True):
                same = (got == wanted).flatten(2).all(2).all(0) if got.dim() == 3 else (got == wanted).all(0)
                assert same.tolist() == (slopes == 0).tolist()


def test_a_slope_that_is_not_finite_shows_in_its_head_alone(kernels, make_case):
    """The query's own key is at distance 0, and inf · 0 is NaN."""
    case = make_case([21], group=4, head_dim=64, block_size=16, dtype=torch.float16)
    query = case.random(2, 8, 64)
    slopes = torch.tensor([0.5, math.nan, 0.25, math.inf, 0.0, -math.inf, 0.1, 1.0])
    inputs = (case.key_cache, case.value_cache, case.block_tables)
    for out in (
        ops.paged_attention(query[:1], *inputs, case.seq_lens, alibi_slopes=slopes),
        ops.paged_prefill(query, *inputs, ints(0, 2), case.seq_lens, alibi_slopes=slopes),
    ):
        assert torch.equal(out.isnan().all(2), (~slopes.isfinite()).expand(len(out), 8))
        assert torch.equal(out.isnan().any(2), (~slopes.isfinite()).expand(len(out), 8))


def test_slopes_may_be_a_view(kernels, make_case):
    case = make_case([21], group=2, head_dim=64, block_size=16, dtype=torch.float16)
    query, slopes = case.random(1, 4, 64), torch.rand(4, 3)[:, 1]
    inputs = (query, case.key_cache, case.value_cache, case.block_tables)
    for attend, lengths in ((ops.paged_attention, ()), (ops.paged_prefill, (ints(0, 1),))):
        got = attend(*inputs, *lengths, case.seq_lens, alibi_slopes=slopes)
        assert torch.equal(got, attend(*inputs, *lengths, case.seq_lens, alibi_slopes=slopes.contiguous()))


def test_parts_merge_to_the_whole(kernels, make_case):
    """Distances are relative: a part that stands further back has the same out, and an lse that is lower by them."""
    case = make_case([48], group=2, head_dim=64, block_size=16)
    query, slopes = case.random(1, 4, 64), slopes_of(4)
    inputs, options = (case.key_cache, case.value_cache), {"alibi_slopes": slopes}
    whole, whole_lse = ops.paged_attention_lse(query, *inputs, case.block_tables, case.seq_lens, **options)
    front, front_lse = ops.paged_attention_lse(query, *inputs, case.block_tables[:, :1], ints(16), **options)
    back = ops.paged_attention_lse(query, *inputs, case.block_tables[:, 1:], ints(32), **options)
    merged, merged_lse = ops.merge_attention_lse(front, front_lse - 32 * slopes, *back)
    torch.testing.assert_close(merged, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(merged_lse, whole_lse, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("isa")
def test_far_keys_of_a_long_sequence():
    """q = 0: weights are 2^(-distance · slope / ln 2) alone, over many chunks and pieces of positions."""
    n = 5000
    caches = [torch.zeros(n // 16 + 1, 1, 16, 32), torch.ones(n // 16 + 1, 1, 16, 32)]
    table = torch.arange(n // 16 + 1, dtype=torch.int32)[None]
    slopes = torch.tensor([1e-3, 0.0])
    wanted = torch.logsumexp(slopes.double()[:, None] * torch.arange(1 - n, 1), 1)
    query = torch.zeros(1, 2, 32)
    for fixed_split in (0, 256):
        _, lse = ops.paged_attention_lse(query, *caches, table, ints(n), alibi_slopes=slopes, fixed_split=fixed_split)
        torch.testing.assert_close(lse[0].double(), wanted, rtol=0, atol=1e-5)
    _, lse = ops.paged_prefill_lse(query, *caches, table, ints(0, 1), ints(n), alibi_slopes=slopes)
    torch.testing.assert_close(lse[0].double(), wanted, rtol=0, atol=1e-5)


def test_a_compiled_step_takes_them():
    torch._dynamo.reset()
    caches = [torch.randn(4, 2, 4, 8) for _ in range(2)]
    arguments = (torch.randn(2, 4, 8), *caches, ints(2, 0, 1, 3).reshape(2, 2), ints(5, 3), torch.rand(4))

    def step(query, key_cache, value_cache, table, lengths, slopes):
        return ops.paged_attention(query, key_cache, value_cache, table, lengths, alibi_slopes=slopes * 2)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), step(*arguments))
