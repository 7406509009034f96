"""Quantised caches: what is written, what attention reads, and that both are the same on every instruction set."""

import math
import random

import pytest
import torch

from kvpager import PagedKVCache, ops
from kvpager.errors import ArgumentError
from kvpager.ops.tensors import QUANTISED_DTYPES as CODES

NAN, INF = math.nan, math.inf
kernels_on_cpu = pytest.mark.parametrize("kernels", ["native", "reference", "emulated"], indirect=True)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Pool:
    """A quantised pool, poisoned: NaN scales and codes of every kind in what is not written."""

    def __init__(self, *shape, dtype, layout="HND", one_scale=None):
        """`shape` is N, K, S, D."""
        self.cache = PagedKVCache(1, *shape, dtype=dtype, layout=layout)
        self.cache.storage.random_(0, 256, generator=torch.Generator().manual_seed(0))
        self.cache.key_scale[0].fill_(NAN)
        self.cache.value_scale[0].fill_(NAN)
        self.caches = (self.cache.key_cache[0], self.cache.value_cache[0])
        self.scales = {"key_scale": self.cache.key_scale[0], "value_scale": self.cache.value_scale[0]}
        if one_scale is not None:
            self.scales = {name: torch.tensor([one_scale]) for name in self.scales}
        self.layout = layout

    def write(self, key, value, slots):
        ops.write_kv(key, value, *self.caches, slots, **self.scales, layout=self.layout)


def oracle(query, keys, values, scale, softcap=0.0, sinks=None, alibi_slopes=None):
    """Float64 attention of one query [H, D] over rows [n, K, D], of which the last is its own."""
    group = query.shape[0] // keys.shape[1]
    outs = []
    for head in range(query.shape[0]):
        logits = keys[:, head // group].double() @ query[head].double() * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits += alibi_slopes[head].double() * torch.arange(1 - len(logits), 1)
        extra = logits.new_empty(0) if sinks is None else sinks[head].double().reshape(1)
        weights = torch.softmax(torch.cat([logits, extra]), 0)[: len(logits)]
        outs.append(weights @ values[:, head // group].double())
    return torch.stack(outs)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("seed", range(6))
def test_native_codes_are_those_of_the_specification(isa, dtype, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    K, D, T = rng.choice((1, 3)), rng.choice((1, 8, 20, 33, 64, 80)), 9
    number = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    rows = (torch.randn(2, T, K, D, generator=generator) * 10 ** rng.uniform(-4, 4)).clamp(-6e4, 6e4).to(number)
    one = rng.choice((None, 0.05))
    pool = Pool(5, K, 4, D, dtype=dtype, layout=rng.choice(("HND", "NHD")), one_scale=one)
    slots = torch.randperm(20, generator=generator)[:T]
    pool.write(rows[0], rows[1], slots)
    for cache, scale, numbers in zip(pool.caches, pool.scales.values(), rows, strict=True):
        codes, scales = ops.quantise(numbers, dtype, scale if one else None)
        by_slot = cache if pool.layout == "NHD" else cache.transpose(1, 2)
        got = by_slot.view(torch.int8)[slots // 4, slots % 4]
        assert torch.equal(got, codes.view(torch.int8))
        if one is None:
            scale_by_slot = scale if pool.layout == "NHD" else scale.transpose(1, 2)
            assert torch.equal(scale_by_slot[slots // 4, slots % 4], scales)
            error = (ops.dequantise(codes, scales) - numbers.float()).abs()
            bound = scales.unsqueeze(-1) / 2
            if dtype.is_floating_point:  # half a unit in the last place, or half a step of subnormal codes
                info = torch.finfo(dtype)
                bound = numbers.float().abs() * info.eps / 2 + bound * info.smallest_normal * info.eps
            assert (error <= bound * (1 + 1e-5)).all()


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
def test_numbers_of_every_size_are_rounded_as_torch_rounds_them(kernels, dtype):
    """Under the scale 1: random bits, every code, what lies half way between two codes, and the floats beside it."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    bits = torch.randint(low, high, (20_000,), generator=generator, dtype=torch.int32)
    known = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    known = known[known.isfinite()].sort().values
    half = (known[1:] + known[:-1]) / 2
    infinite = torch.full_like(half, INF)
    numbers = torch.cat([bits.view(torch.float32), known, half, half.nextafter(infinite), half.nextafter(-infinite)])
    rows = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 8)]).reshape(-1, 1, 8)
    pool = Pool(len(rows), 1, 1, 8, dtype=dtype, one_scale=1.0)
    pool.write(rows, rows, torch.arange(len(rows)))
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        wanted = rows.clamp(-largest, largest).to(dtype).float()  # a NaN stays one
    else:
        wanted = rows.clamp(-127, 127).nan_to_num(0.0).round()
    got = pool.caches[0].reshape(rows.shape).float()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def check_attention(case_seed, dtype, tolerance):
    rng, generator = random.Random(case_seed), torch.Generator().manual_seed(case_seed)
    K, group, S = rng.choice((1, 2)), rng.choice((1, 2, 3, 4, 7)), rng.choice((1, 4, 16))
    D = rng.choice((8, 20, 64, 80, 96, 128))
    number = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    lengths = [rng.randint(0, 4 * S + 1) for _ in range(3)] + [2 * S]
    widths = [-(-length // S) for length in lengths]
    pool = Pool(
        sum(widths) + 2, K, S, D, dtype=dtype, layout=rng.choice(("HND", "NHD")), one_scale=rng.choice((None, 0.03))
    )
    order = torch.randperm(sum(widths) + 2, generator=generator).tolist()
    table = torch.full((4, max(widths) + 1), -1, dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = ints(*order[:width])
        del order[:width]
    rows = []
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = table[row].long()[positions // S] * S + positions % S
        key, value = torch.randn(2, length, K, D, generator=generator).to(number)
        pool.write(key, value, slots)
        rows.append(slots)
    read = [ops.gather_kv(*pool.caches, table[row : row + 1], ints(length), **pool.scales, layout=pool.layout)
            for row, length in enumerate(lengths)]  # fmt: skip
    softcap, scale = rng.choice((0.0, 3.0)), 1 / math.sqrt(D)
    sinks = rng.choice((None, torch.randn(K * group, generator=generator)))
    slopes = rng.choice((None, torch.rand(K * group, generator=generator)))
    bend = {"softcap": softcap, "sinks": sinks, "alibi_slopes": slopes}
    options = {**pool.scales, "layout": pool.layout, **bend}
    query = torch.randn(4, K * group, D, generator=generator).to(number)
    out = ops.paged_attention(query, *pool.caches, table, ints(*lengths), **options)
    starts = torch.tensor([0, *[min(2, length) for length in lengths]]).cumsum(0).int()
    queries = torch.randn(int(starts[-1]), K * group, D, generator=generator).to(number)
    prefill = ops.paged_prefill(queries, *pool.caches, table, starts, ints(*lengths), **options)
    for row, length in enumerate(lengths):
        if length == 0:
            assert (out[row] == 0).all()
            continue
        key, value = read[row]
        wanted = oracle(query[row], key, value, scale, **bend)
        torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=tolerance[number])
        for i in range(min(2, length)):
            seen = length - min(2, length) + i + 1
            token = int(starts[row]) + i
            wanted = oracle(queries[token], key[:seen], value[:seen], scale, **bend)
            torch.testing.assert_close(prefill[token].double(), wanted, rtol=0, atol=tolerance[number])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("seed", range(8))
def test_attention_over_codes_equals_attention_over_their_numbers(isa, tolerance, dtype, seed):
    check_attention(seed, dtype, tolerance)


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
def test_both_kernel_sets_read_what_they_write(kernels, tolerance, dtype):
    check_attention(99, dtype, tolerance)


@pytest.mark.parametrize("number", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", CODES)
def test_every_code_is_read_as_torch_reads_it(isa, dtype, number):
    """One token of each code, in V then in K, whatever the query's type; NaN codes stay NaN."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.int8)
    if dtype is torch.int8:
        codes = codes[codes != -128]
    n, D = len(codes), 40
    cache = codes.reshape(n, 1, 1, 1).expand(n, 1, 1, D).contiguous().view(dtype)
    wanted = 0.5 * cache[:, 0, 0].float()
    zeros = torch.zeros(n, 1, 1, D, dtype=torch.int8).view(dtype)
    scale = torch.full((n, 1, 1), 0.5)
    rest = (torch.arange(n).int().reshape(n, 1), torch.ones(n).int())
    query = torch.zeros(n, 1, D, dtype=number)
    out = ops.paged_attention(query, zeros, cache, *rest, key_scale=scale, value_scale=scale)
    torch.testing.assert_close(out[:, 0], wanted.to(number), rtol=0, atol=0, equal_nan=True)
    query[:, :, -1] = 1
    cache.view(torch.int8)[wanted.isinf().reshape(n, 1, 1, D)] = 0  # an infinite logit has no softmax
    wanted[wanted.isinf()] = 0
    _, lse = ops.paged_attention_lse(query, cache, zeros, *rest, key_scale=scale, value_scale=scale, scale=1.0)
    torch.testing.assert_close(lse[:, 0], wanted[:, -1], rtol=1e-6, atol=0, equal_nan=True)


@kernels_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *CODES])
def test_b065_pad_rows_are_not_quantised(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    quantised = dtype in CODES
    number = torch.float32 if quantised else dtype
    rows = torch.randn(2, 8, 2, 8, generator=generator).to(number)
    rows[:, 4:] = torch.tensor([NAN, INF, -INF, NAN]).reshape(4, 1, 1).to(number)
    slots = torch.tensor([3, 4, 9, 11, -1, -1, -1, -1])
    results = []
    for padded in (True, False):
        cache = PagedKVCache(1, 3, 2, 4, 8, dtype=dtype)
        cache.storage.zero_()
        count = 8 if padded else 4
        cache.write(0, rows[0, :count], rows[1, :count], slots[:count])
        for scale in (*cache.key_scale, *cache.value_scale):
            assert scale.isfinite().all()
        assert all(view.float().isfinite().all() for view in (*cache.key_cache, *cache.value_cache))
        results.append(cache.storage.view(torch.uint8))
    assert torch.equal(*results)


@kernels_on_cpu
@pytest.mark.parametrize("path", ["decode", "prefill", "chunk", "gather"])
def test_b084_scales_take_effect(kernels, path):
    """D = 1, K codes 0 and 4 under .25, V codes 0 and 2 under .5: e / (1 + e) of the second value, 1."""
    key = torch.tensor([0, 4], dtype=torch.int8).reshape(1, 1, 2, 1)
    value = torch.tensor([0, 2], dtype=torch.int8).reshape(1, 1, 2, 1)
    table, lengths = ints(0).reshape(1, 1), ints(2)
    for scales in (
        {"key_scale": torch.tensor([0.25]), "value_scale": torch.tensor(0.5)},
        {"key_scale": torch.full((1, 1, 2), 0.25), "value_scale": torch.full((1, 1, 2), 0.5)},
    ):
        if path == "decode":
            out = ops.paged_attention(torch.ones(1, 1, 1), key, value, table, lengths, scale=1.0, **scales)
        elif path == "gather":
            rows = ops.gather_kv(key, value, table, lengths, **scales)
            assert rows[0].flatten().tolist() == [0, 1]
            assert rows[1].flatten().tolist() == [0, 1]
            continue
        else:
            queries = 2 if path == "prefill" else 1
            out = ops.paged_prefill(
                torch.ones(queries, 1, 1), key, value, table, ints(0, queries), lengths, scale=1.0, **scales
            )
        assert abs(float(out[-1]) - 0.731059) < 1e-6


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
def test_b085_rows_of_zeros_and_of_almost_nothing(kernels, dtype):
    pool = Pool(2, 1, 4, 8, dtype=dtype)
    rows = torch.zeros(5, 1, 8)
    rows[1, 0, 3], rows[2], rows[3] = 5.0, 1e-30, 1e-44
    rows[4] = torch.arange(8.0)
    pool.write(rows, rows, torch.arange(5))
    key, _ = ops.gather_kv(*pool.caches, ints(0, 1).reshape(1, 2), ints(5), **pool.scales)
    assert (key[0] == 0).all()
    assert key[1].flatten().tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    torch.testing.assert_close(key[2], rows[2], rtol=1e-2, atol=0)
    assert key[3].abs().max() < 1e-37
    torch.testing.assert_close(key[4], rows[4], rtol=1 / 16, atol=7 / 254)
    scales = pool.cache.key_scale[0].flatten()[:5]
    assert scales.isfinite().all()
    assert (scales > 0).all()


@kernels_on_cpu
@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
def test_b085_a_scale_that_is_no_positive_number_is_refused(kernels, scale):
    pool = Pool(2, 1, 4, 8, dtype=torch.int8, one_scale=scale)
    before = pool.cache.storage.clone()
    with pytest.raises(ArgumentError, match="`key_scale`: wanted a positive number as the one scale"):
        pool.write(torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.tensor([0]))
    assert torch.equal(before, pool.cache.storage)
    with pytest.raises(ArgumentError, match="`key_scale`: wanted a positive number as the one scale"):
        ops.paged_attention(torch.ones(1, 1, 8), *pool.caches, ints(0).reshape(1, 1), ints(1), **pool.scales)


@kernels_on_cpu
def test_b086_int8_codes(kernels):
    """Symmetric ±127, half to even, −128 never; errors of at most half a scale; a missing scale is an error."""
    for numbers, codes, back in (
        ([-1, -0.5, 0, 0.5, 1], [-127, -64, 0, 64, 127], [-1, -0.503937, 0, 0.503937, 1]),
        ([3, -4, 2], [95, -127, 64], [2.992126, -4, 2.015748]),
    ):
        pool = Pool(1, 1, 1, len(numbers), dtype=torch.int8)
        row = torch.tensor(numbers, dtype=torch.float32).reshape(1, 1, -1)
        pool.write(row, row, torch.tensor([0]))
        assert pool.caches[0].flatten().tolist() == codes
        read, _ = ops.gather_kv(*pool.caches, ints(0).reshape(1, 1), ints(1), **pool.scales)
        torch.testing.assert_close(read.flatten(), torch.tensor(back), rtol=0, atol=1e-6)
    pool = Pool(1, 1, 1000, 100, dtype=torch.int8)
    rows = torch.randn(1000, 1, 100, generator=torch.Generator().manual_seed(0)) * 3
    pool.write(rows, rows, torch.arange(1000))
    read, _ = ops.gather_kv(*pool.caches, ints(0).reshape(1, 1), ints(1000), **pool.scales)
    assert pool.caches[0].min() >= -127
    assert ((read - rows).abs() <= pool.cache.key_scale[0].reshape(1000, 1, 1) / 2 * (1 + 1e-5)).all()
    with pytest.raises(ArgumentError, match="`key_scale`: wanted the scales of the quantised cache, got none"):
        ops.write_kv(rows, rows, *pool.caches, torch.arange(1000))
    with pytest.raises(ArgumentError, match="`value_scale`: wanted the scales of the quantised cache, got none"):
        ops.paged_attention(rows[:1], *pool.caches, ints(0).reshape(1, 1), ints(1), key_scale=pool.scales["key_scale"])


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("block_major", [False, True])
def test_b087_scales_move_with_blocks(kernels, dtype, block_major):
    """To the host tier and back, by copy-on-write, and when a tail is written again: A reads as it did."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(2, 4, 2, 4, 8, dtype=dtype, block_major=block_major)
    host = PagedKVCache(2, 3, 2, 4, 8, dtype=dtype, block_major=not block_major)
    small, large = (torch.randn(8, 2, 8, generator=generator) * factor for factor in (1, 100))

    def write(rows, slots):
        for layer in range(2):
            cache.write(layer, rows + layer, rows - layer, slots)

    def read(*blocks, length=8):
        return [
            rows
            for layer in range(2)
            for rows in ops.gather_kv(
                cache.key_cache[layer], cache.value_cache[layer], ints(*blocks).reshape(1, -1), ints(length),
                key_scale=cache.key_scale[layer], value_scale=cache.value_scale[layer],
            )
        ]  # fmt: skip

    write(small, torch.arange(4, 12))  # blocks 1 and 2
    before = read(1, 2)
    cache.swap_blocks(host, [(1, 2), (2, 0)])
    write(large, torch.arange(4, 12))
    assert not torch.equal(read(1, 2)[0], before[0])
    host.swap_blocks(cache, [(2, 3), (0, 0)])
    assert all(torch.equal(*pair) for pair in zip(read(3, 0), before, strict=True))

    cache.copy_blocks([(0, 1)])  # a fork's tail, then the parent's own is written on
    write(large[:1], torch.tensor([1]))
    assert all(torch.equal(*pair) for pair in zip(read(3, 1), before, strict=True))
    assert all(torch.equal(a, b[:5]) for a, b in zip(read(3, 0, length=5), before, strict=True))
    write(small[5:6], torch.tensor([1]))  # truncated and appended to again
    assert all(torch.equal(*pair) for pair in zip(read(3, 0), before, strict=True))


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
def test_b089_what_came_first_sets_no_scale(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(8, 1, 16, generator=generator) * 20 - 10
    pools = []
    for warm in (True, False):
        pool = Pool(2, 1, 8, 16, dtype=dtype)
        if warm:
            pool.write(rows / 1000, rows / 1000, torch.arange(8))
        pool.write(rows, rows, torch.arange(8, 16))
        pools.append(pool)
    most = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 1 / 16
    for pool in pools:
        read, _ = ops.gather_kv(*pool.caches, ints(1).reshape(1, 1), ints(8), **pool.scales)
        large = rows.abs() >= 1
        assert ((read - rows).abs() / rows.abs())[large].max() <= most
    assert torch.equal(*(pool.cache.storage.view(2, 2, -1)[:, 1] for pool in pools))
    old, _ = ops.gather_kv(*pools[0].caches, ints(0).reshape(1, 1), ints(8), **pools[0].scales)
    pools[0].write(rows * 50, rows * 50, torch.arange(8, 16))
    again, _ = ops.gather_kv(*pools[0].caches, ints(0).reshape(1, 1), ints(8), **pools[0].scales)
    assert torch.equal(old, again)


@kernels_on_cpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_with_a_nan_or_an_inf_reads_as_nan(kernels, dtype, bad):
    pool = Pool(1, 2, 2, 4, dtype=dtype)
    rows = torch.ones(2, 2, 4)
    rows[0, 1, 2] = bad
    pool.write(rows, rows, torch.arange(2))
    read, _ = ops.gather_kv(*pool.caches, ints(0).reshape(1, 1), ints(2), **pool.scales)
    assert read[0, 1].isnan().all()
    assert read[0, 0].isfinite().all()
    assert read[1].isfinite().all()


@kernels_on_cpu
def test_scales_that_do_not_fit_are_refused(kernels):
    cache, rows = torch.zeros(2, 1, 4, 8, dtype=torch.int8), torch.ones(1, 1, 8)
    good = torch.ones(2, 1, 4)
    for bad in (good.double(), good[:1], good[..., :3], torch.ones(2), good.unsqueeze(0)):
        with pytest.raises(ArgumentError, match=r"`value_scale`: wanted \[2, 1, 4\] or \[1\] float32 on cpu, got"):
            ops.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0]), key_scale=good, value_scale=bad)
    floats = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ArgumentError, match="`key_scale`: wanted none beside a cache that is not quantised"):
        ops.write_kv(rows, rows, floats, floats.clone(), torch.tensor([0]), key_scale=good)
    with pytest.raises(ArgumentError, match=r"`query`: wanted .* float32, float16 or bfloat16 on cpu, got .* float64"):
        ops.paged_attention(
            rows.double(), cache, cache, ints(0).reshape(1, 1), ints(1), key_scale=good, value_scale=good
        )
