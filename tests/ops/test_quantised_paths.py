"""Prefill, shared prefix, fused front end and prefix cache over quantised caches: every path reads and writes alike."""

import math

import pytest
import torch

from kvpager import KVBlockManager, PagedKVCache, ops
from kvpager.errors import ArgumentError
from kvpager.ops.tensors import QUANTISED_DTYPES as CODES

BOTH = pytest.mark.parametrize("kernels", ["native", "reference", "emulated"], indirect=True)
S = 16


def pool(dtype, *, num_blocks=21, num_kv_heads=2, head_dim=40, single_scale=False):
    """Empty quantised caches with their scales: (key_cache, value_cache), {"key_scale", "value_scale"}."""
    shape = (num_blocks, num_kv_heads, S, head_dim)
    caches = [torch.zeros(shape, dtype=torch.int8).view(dtype) for _ in range(2)]
    scales = [torch.full((1,), 0.04) if single_scale else torch.zeros(shape[:3]) for _ in range(2)]
    return caches, dict(zip(("key_scale", "value_scale"), scales, strict=True))


def filled(dtype, *, single_scale=False, rows=torch.float32):
    """A pool with one sequence of 300 tokens, its table, and what its codes stand for, as a plain float cache."""
    T = 300
    generator = torch.Generator().manual_seed(11)
    caches, scales = pool(dtype, single_scale=single_scale)
    table = torch.randperm(21, generator=generator)[None].to(torch.int32)
    positions = torch.arange(T)
    slots = table[0, positions // S].long() * S + positions % S
    key, value = (torch.randn(T, 2, 40, generator=generator).to(rows) for _ in range(2))
    ops.write_kv(key, value, *caches, slots, **scales)
    plain = [
        cache.float() * (scale if scale.dim() == 1 else scale[..., None])
        for cache, scale in zip(caches, scales.values(), strict=True)
    ]
    return caches, scales, plain, table, generator


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("single_scale", [False, True])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("isa")
def test_b084_prefill_is_that_over_the_dequantised_cache(tolerance, dtype, single_scale, rows):
    caches, scales, plain, table, generator = filled(dtype, single_scale=single_scale, rows=rows)
    query = torch.randn(200, 6, 40, generator=generator).to(rows)
    bounds = torch.tensor([0, 200, 300], dtype=torch.int32)
    options = {"window": 170, "softcap": 5.0}
    out, lse = ops.paged_prefill_lse(query, *caches, table, bounds[:2], bounds[2:], **scales, **options)
    wanted, wanted_lse = ops.attention.reference.paged_prefill(
        query.double(), *(cache.double() for cache in plain), table, bounds[:2], bounds[2:],
        scale=40**-0.5, max_query_len=200, max_seq_len=10**6, **options,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance[rows])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", CODES)
def test_b084_scales_take_effect_in_every_path(kernels, dtype):
    """D = 1, scale 1, q = 1; K codes 0 and 4, key scale 0.25; V codes 0 and 2, value scale 0.5: 0.731059."""
    caches = [torch.zeros(2, 1, 2, 1).to(dtype) for _ in range(2)]
    caches[0][1, 0, 1, 0], caches[1][1, 0, 1, 0] = 4, 2  # position 1; position 0 has codes 0
    for shape in ((1,), (2, 1, 2)):
        scales = {"key_scale": torch.full(shape, 0.25), "value_scale": torch.full(shape, 0.5)}
        table, length, one = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), 1.0
        query = torch.full((2, 1, 1), one)
        outs = [
            ops.paged_attention(query[:1], *caches, table, length, scale=1.0, **scales),
            ops.paged_prefill(
                query, *caches, table, torch.tensor([0, 2], dtype=torch.int32), length, scale=1.0, **scales
            ),
            ops.paged_prefill(
                query[:1], *caches, table, torch.tensor([0, 1], dtype=torch.int32), length, scale=1.0, **scales
            ),
        ]
        for out in outs:
            assert float(out[-1, 0, 0]) == pytest.approx(0.731059, abs=1e-6)
        key, value = ops.gather_kv(*caches, table, length, **scales)
        assert key.flatten().tolist() == [0, 1]
        assert value.flatten().tolist() == [0, 1]


@BOTH
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_shared_prefix_equals_plain(kernels, dtype, layout):
    caches, scales, _, table, generator = filled(dtype)
    if layout == "NHD":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
        scales = {name: scale.transpose(1, 2).contiguous() for name, scale in scales.items()}
    tables, lengths = table.expand(3, -1), torch.tensor([200, 240, 300], dtype=torch.int32)
    query = torch.randn(3, 6, 40, generator=generator)
    out = ops.shared_prefix_attention(query, *caches, tables, lengths, 192, **scales, layout=layout)
    wanted = ops.paged_attention(query, *caches, tables, lengths, **scales, layout=layout)
    torch.testing.assert_close(out, wanted, rtol=0, atol=4e-6)


def widest_step(dtype):
    """Between the two largest codes."""
    if not dtype.is_floating_point:
        return 1
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(info.max))


@BOTH
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("single_scale", [False, True])
def test_fused_writes_what_norm_turn_and_write_kv_write(kernels, dtype, rows, single_scale):
    generator = torch.Generator().manual_seed(3)
    qkv, weight = (
        torch.randn(9, 6 * 40, generator=generator).to(rows),
        torch.rand(40, generator=generator).to(rows) + 0.5,
    )
    angles, positions = torch.randn(30, 20, generator=generator), torch.randperm(30, generator=generator)[:9]
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    slots = torch.tensor([-1, 5, 0, 33, 16, 100, 17, -1, 335])
    caches, scales = pool(dtype, single_scale=single_scale)
    query = ops.qk_norm_rope_write(qkv, weight, weight, cos_sin, positions, *caches, slots, **scales)
    assert query.dtype is rows
    # The float path, in float32 throughout, then write_kv.
    plain = [torch.zeros(21, 2, S, 40) for _ in range(2)]
    wide = ops.qk_norm_rope_write(
        qkv.float(), weight.float(), weight.float(), cos_sin, positions, *plain, slots, eps=1e-6
    )
    torch.testing.assert_close(query.float(), wide, rtol=1e-2 if rows is not torch.float32 else 0, atol=1e-5)
    written = slots[slots >= 0]
    key, value = (cache[written // S, :, written % S] for cache in plain)
    wanted, wanted_scales = pool(dtype, single_scale=single_scale)
    ops.write_kv(key, value, *wanted, written, **wanted_scales)
    for name in ("key_scale", "value_scale"):
        torch.testing.assert_close(scales[name], wanted_scales[name], rtol=1e-6, atol=0)
    assert torch.equal(caches[1].view(torch.uint8), wanted[1].view(torch.uint8))  # values: bit for bit
    steps = (caches[0].float() - wanted[0].float()).abs()  # keys: a code at a tie may go either way
    assert float((steps > 0).float().mean()) < 0.01
    assert float(steps.max()) <= widest_step(dtype)


@BOTH
@pytest.mark.parametrize("dtype", CODES)
def test_b065_pad_rows_leave_no_code_and_no_scale(kernels, dtype):
    """Rows of NaN and inf with slot -1: no trace in codes or scales; the others are bit-equal to an unpadded run."""
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(6, 240, generator=generator)
    cos_sin = torch.cat([torch.ones(1, 20), torch.zeros(1, 20)], 1)
    weight, zeros = torch.ones(40), torch.zeros(6, dtype=torch.int64)

    def run(rows, slots):
        caches, scales = pool(dtype)
        ops.qk_norm_rope_write(rows, weight, weight, cos_sin, zeros[: len(rows)], *caches, slots, **scales)
        return [*(cache.view(torch.uint8) for cache in caches), *scales.values()]

    wanted = run(qkv[2:5], torch.tensor([7, 300, 20]))
    padded = qkv.clone()
    padded[[0, 1, 5]] = torch.tensor([[float("nan")], [float("inf")], [float("-inf")]])
    got = run(padded, torch.tensor([-1, -1, 7, 300, 20, -1]))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@BOTH
def test_scales_that_do_not_fit_are_named(kernels):
    qkv, cos_sin, zeros = torch.zeros(2, 240), torch.zeros(1, 40), torch.zeros(2, dtype=torch.int64)
    caches, scales = pool(torch.int8)

    def run(caches=caches, qkv=qkv, **scales):
        ops.qk_norm_rope_write(qkv, None, None, cos_sin, zeros, *caches, zeros, **scales)

    with pytest.raises(ArgumentError, match="`key_scale`: wanted the scales of the quantised cache, got none"):
        run()
    with pytest.raises(ArgumentError, match=r"`value_scale`: wanted \[21, 2, 16\] or \[1\] float32"):
        run(key_scale=scales["key_scale"], value_scale=scales["value_scale"][:3])
    got = "others on the device" if kernels.name == "emulated" else "0"
    with pytest.raises(ArgumentError, match=f"`key_scale`: wanted a positive number as the one scale, got {got}"):
        run(key_scale=torch.zeros(1), value_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="`key_scale`: wanted none beside a cache that is not quantised"):
        run(caches=[torch.zeros(21, 2, S, 40) for _ in range(2)], key_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="float32, float16 or bfloat16"):
        run(qkv=qkv.double(), **scales)
    assert all((cache == 0).all() for cache in caches)


@BOTH
@pytest.mark.parametrize("dtype", CODES)
def test_b087_a_prefix_hit_after_reuse_reads_its_own_scales(kernels, dtype):
    """A's blocks are let go, one is evicted and refilled with large rows: the rest is found, and reads as it did."""
    manager = KVBlockManager(4, 4, enable_prefix_caching=True)
    cache = PagedKVCache(1, 4, 2, 4, 8, dtype=dtype)
    rows = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(0))
    prompt = list(range(12))

    def admit(sequence, token_ids, numbers):
        """Tokens found, after the others were written and committed."""
        found, slots = manager.admit(sequence, token_ids)
        cache.write(0, numbers[found:], -numbers[found:], slots)
        manager.commit(sequence, len(token_ids))
        return found

    def read(sequence):
        return ops.gather_kv(
            cache.key_cache[0], cache.value_cache[0],
            manager.get_block_table_tensor([sequence]), manager.get_seq_lens_tensor([sequence]),
            key_scale=cache.key_scale[0], value_scale=cache.value_scale[0],
        )  # fmt: skip

    assert admit(0, prompt, rows) == 0
    written, table = read(0), manager.block_table(0)
    manager.release_sequence(0)
    assert admit(1, list(range(100, 108)), rows * 100) == 0
    refilled = set(manager.block_table(1)) & set(table)
    assert refilled == {table[2]}  # the fourth block was free, A's last goes first
    manager.release_sequence(1)
    assert admit(2, prompt, rows) == 8
    assert manager.block_table(2)[:2] == table[:2]
    assert all(torch.equal(*pair) for pair in zip(read(2), written, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("head_dim", [128, 16384])
def test_sums_of_the_largest_codes_do_not_overflow(head_dim):
    """All codes 127 and -127 under a query of ones, 64 tokens: the largest sums of products that integers can meet."""
    caches = [torch.full((4, 1, S, head_dim), 127, dtype=torch.int8) for _ in range(2)]
    caches[0][2:] = -127
    scales = {"key_scale": torch.full((1,), 1 / 127), "value_scale": torch.full((1,), 1 / 127)}
    query = torch.ones(1, 4, head_dim, dtype=torch.bfloat16)
    table, length = torch.arange(4, dtype=torch.int32)[None], torch.tensor([64], dtype=torch.int32)
    out, lse = ops.paged_attention_lse(query, *caches, table, length, **scales, scale=1 / head_dim)
    torch.testing.assert_close(out, torch.ones_like(query), rtol=0, atol=0)
    wanted = torch.tensor([1.0] * 32 + [-1.0] * 32).logsumexp(0).expand(1, 4)
    torch.testing.assert_close(lse, wanted, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_no_number_poisons_its_own_head_only(bad):
    caches, scales, _, table, generator = filled(torch.int8, rows=torch.bfloat16)
    query = torch.randn(1, 6, 40, generator=generator).bfloat16()
    length = torch.tensor([300], dtype=torch.int32)
    clean = ops.paged_attention(query, *caches, table, length, **scales)
    query[0, 1, 7] = bad
    out = ops.paged_attention(query, *caches, table, length, **scales)
    assert out[0, 1].isnan().all()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(out[0, others], clean[0, others])


@pytest.mark.usefixtures("isa")
def test_weights_of_one_chunk_may_differ_by_any_factor():
    """One token outweighs the rest by e^80, or its value scale by 10^6; D = 1."""
    keys, values = torch.zeros(1, 1, S, 1, dtype=torch.int8), torch.full((1, 1, S, 1), 100, dtype=torch.int8)
    keys[..., 3, :] = 127
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([S], dtype=torch.int32)
    key_scale, value_scale = torch.full((1, 1, S), 1.0), torch.full((1, 1, S), 0.01)
    for scale in (0.0, 80 / 127):
        for factor in (1.0, 1e6):
            value_scale[..., 3] = 0.01 * factor
            query = torch.ones(1, 1, 1, dtype=torch.bfloat16)
            out = ops.paged_attention(
                query, keys, values, table, length, key_scale=key_scale, value_scale=value_scale, scale=scale
            )
            weight = 1 / S if scale == 0 else 1.0
            torch.testing.assert_close(out.item(), factor * weight + (1 - weight), rtol=0.004, atol=0)
