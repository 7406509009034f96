"""Random cases on every kernel set against the float64 oracle: shapes, strides, layouts, dtypes, options, poison."""

import math
import random

import pytest
import torch

from kvpager import native, ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RATIOS = (1, 2, 3, 5, 7, 8)
POISON = (math.nan, math.inf, 1e30)


def draw(seed, make_case, *, small):
    """A random case and random options. Lengths run from 0 to 4 S + 1."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 5) if small else (1, 2, 3, 4, 8, 16, 17))
    case = make_case(
        [rng.randint(0, 4 * block_size + 1) for _ in range(rng.randint(1, 3 if small else 5))],
        seed=seed,
        num_kv_heads=rng.choice((1, 2) if small else (1, 2, 3)),
        group=rng.choice(RATIOS[:4] if small else RATIOS),
        head_dim=rng.choice((8, 24, 40) if small else (1, 8, 16, 20, 33, 64, 128)),
        block_size=block_size,
        dtype=rng.choice(DTYPES),
        layout=rng.choice(("HND", "NHD")),
        poison=rng.choice(POISON),
        interleaved=rng.random() < 0.3,
    )
    wide = torch.float64 if case.dtype is torch.float64 else torch.float32
    options = {
        "scale": rng.choice((1 / math.sqrt(case.head_dim), 0.3)),
        "window": rng.choice((0, 0, 1, 3, block_size, 2 * block_size + 1)),
        "softcap": rng.choice((0.0, 0.0, 2.0)),
        "sinks": rng.choice((None, torch.randn(case.num_heads, generator=case.generator).to(wide))),
    }
    if seed % 2:
        slopes = torch.rand(case.num_heads, generator=torch.Generator().manual_seed(seed)) - 0.05
        options["alibi_slopes"] = slopes.to(wide)
    return rng, case, options


def fused_query(case, num_tokens):
    """A query that is a view of a fused qkv projection, as models have it."""
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = case.random(num_tokens, width)
    return qkv[:, : case.num_heads * case.head_dim].unflatten(1, (case.num_heads, case.head_dim))


def check_decode(case, options, tolerance):
    query = fused_query(case, len(case.lengths))
    guarded = torch.full((len(case.lengths) + 2, case.num_heads, case.head_dim), 77.0, dtype=case.dtype)
    out, lse = ops.paged_attention_lse(
        query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens,
        **options, layout=case.layout, out=guarded[1:-1],
    )  # fmt: skip
    assert (guarded[0] == 77).all()
    assert (guarded[-1] == 77).all()
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -math.inf).all()
            continue
        wanted, wanted_lse = case.oracle(row, query[row], length - 1, **options)
        torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=tolerance[case.dtype])
        torch.testing.assert_close(lse[row].double(), wanted_lse, rtol=0, atol=max(1e-5, tolerance[lse.dtype]))


def check_prefill(rng, case, options, tolerance):
    query_lens = [rng.randint(0, length) for length in case.lengths]
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    padding = rng.choice((0, 2))
    query = fused_query(case, starts[-1] + padding)
    out, lse = ops.paged_prefill_lse(
        query, case.key_cache, case.value_cache, case.block_tables,
        torch.tensor(starts, dtype=torch.int32), case.seq_lens, **options, layout=case.layout,
    )  # fmt: skip
    assert (out[starts[-1] :] == 0).all()
    assert (lse[starts[-1] :] == -math.inf).all()
    for row, (length, query_len) in enumerate(zip(case.lengths, query_lens, strict=True)):
        for i in range(query_len):
            token = starts[row] + i
            wanted, wanted_lse = case.oracle(row, query[token], length - query_len + i, **options)
            torch.testing.assert_close(out[token].double(), wanted, rtol=0, atol=tolerance[case.dtype])
            torch.testing.assert_close(lse[token].double(), wanted_lse, rtol=0, atol=max(1e-5, tolerance[lse.dtype]))


@pytest.mark.parametrize("seed", range(30))
def test_decode_equals_oracle(kernels, make_case, tolerance, seed):
    _, case, options = draw(seed, make_case, small=kernels.name == "emulated")
    check_decode(case, options, tolerance)


@pytest.mark.parametrize("seed", range(100, 130))
def test_prefill_equals_oracle(kernels, make_case, tolerance, seed):
    rng, case, options = draw(seed, make_case, small=kernels.name == "emulated")
    check_prefill(rng, case, options, tolerance)


@pytest.mark.parametrize("seed", range(200, 210))
@pytest.mark.parametrize("blocks", ["decode", "prefill"])
def test_blockwise_lesson_equals_gather(make_case, seed, blocks):
    rng, case, options = draw(seed, make_case, small=False)
    tables, lengths = case.block_tables, case.seq_lens
    caches = [case.key_cache, case.value_cache]
    if case.layout == "NHD":
        caches = [cache.transpose(1, 2) for cache in caches]
    if blocks == "decode":
        query = fused_query(case, len(case.lengths))
        got = ops.attention.reference.paged_attention_blockwise(query, *caches, tables, lengths, **options)
        wanted = ops.attention.reference.paged_attention(query, *caches, tables, lengths, max_seq_len=10**6, **options)
    else:
        query_lens = [rng.randint(0, length) for length in case.lengths]
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        query = fused_query(case, int(starts[-1]))
        got = ops.attention.reference.paged_prefill_blockwise(query, *caches, tables, starts, lengths, **options)
        wanted = ops.attention.reference.paged_prefill(
            query, *caches, tables, starts, lengths, max_query_len=10**6, max_seq_len=10**6, **options
        )
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [1, 5, 8])
def test_paged_equals_contiguous(kernels, make_case, group):
    """Permuted tables, NaN in every unwritten slot: within 1e-6 of contiguous float64 attention, in float32."""
    lengths = [1, 15, 16, 17, 65] if kernels.name != "emulated" else [1, 17]
    case = make_case(lengths, group=group, head_dim=64, block_size=16)
    query = case.random(len(lengths), case.num_heads, 64)
    out = ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    for row, length in enumerate(lengths):
        wanted, _ = case.oracle(row, query[row], length - 1, scale=1 / 8)
        assert (out[row].double() - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 70])
def test_long_sequences_with_growing_scores(kernels, make_case, tolerance, dtype, window):
    """Every later part of the sequence holds a larger logit, so all sums before it must be rescaled."""
    lengths = [63, 64, 65, 129, 200] if kernels.name != "emulated" else [33, 70]
    case = make_case(lengths, dtype=dtype, block_size=16, head_dim=16)
    query = torch.ones(3 * len(lengths), case.num_heads, 16, dtype=dtype)
    for row, length in enumerate(lengths):
        case.keys[row] += (torch.arange(length) / length).reshape(length, 1, 1).to(dtype)
        for position in range(length):
            block, offset = int(case.block_tables[row, position // 16]), position % 16
            case.key_cache[block, :, offset] = case.keys[row][position]
    starts = torch.arange(0, len(query) + 1, 3, dtype=torch.int32)
    out = ops.paged_prefill(
        query, case.key_cache, case.value_cache, case.block_tables, starts, case.seq_lens, window=window
    )
    for row, length in enumerate(lengths):
        for i in range(3):
            wanted, _ = case.oracle(row, query[3 * row + i], length - 3 + i, scale=0.25, window=window)
            torch.testing.assert_close(out[3 * row + i].double(), wanted, rtol=0, atol=tolerance[dtype])


@pytest.mark.parametrize("seed", range(300, 312))
def test_write_equals_indexing(kernels, make_case, seed):
    """Random slots with −1 among them, more rows than slots, strided K/V and caches: only the named slots change."""
    rng, case, _ = draw(seed, make_case, small=True)
    K, S, D = case.num_kv_heads, case.block_size, case.head_dim
    N = case.key_cache.shape[0]
    num_tokens = rng.randint(0, N * S)
    slots = torch.randperm(N * S, generator=case.generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=case.generator) < 0.3] = -1
    qkv = case.random(num_tokens + 2, 4 * K, D)
    key, value = qkv[:, K : 2 * K], qkv[:, 3 * K :]
    key[num_tokens:] = math.nan
    caches = (case.key_cache, case.value_cache)
    wanted = [cache.clone() for cache in caches]
    for cache, rows in zip(wanted, (key, value), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block = cache[slot // S] if case.layout == "NHD" else cache[slot // S].transpose(0, 1)
                block[slot % S] = rows[token]
    ops.write_kv(key, value, *caches, slots, layout=case.layout)
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_equals_attention_over_the_union(kernels, make_case, tolerance, dtype):
    """The same keys cut in two at every point, a cut at either end leaving one part empty and its out unread."""
    length = 9
    case = make_case([length], dtype=dtype, group=3)
    query = case.random(1, case.num_heads, 8)
    whole, whole_lse = case.oracle(0, query[0], length - 1, scale=0.4)
    for cut in (0, 1, 4, 5, 9):
        parts = []
        for first, stop in ((0, cut), (cut, length)):
            table = torch.arange(0, 3, dtype=torch.int32).reshape(1, 3)
            caches = [torch.full((3, 2, 4, 8), math.nan, dtype=dtype) for _ in range(2)]
            slots = torch.arange(stop - first)
            ops.write_kv(case.keys[0][first:stop], case.values[0][first:stop], *caches, slots)
            out, lse = ops.paged_attention_lse(
                query, *caches, table, torch.tensor([stop - first], dtype=torch.int32), scale=0.4
            )
            if first == stop:
                out.fill_(math.nan)
            parts += [out, lse]
        merged, merged_lse = ops.merge_attention_lse(*parts)
        torch.testing.assert_close(merged[0].double(), whole, rtol=0, atol=2 * tolerance[dtype])
        torch.testing.assert_close(merged_lse[0].double(), whole_lse, rtol=0, atol=1e-5)
        in_place = ops.merge_attention(*parts, out=parts[0], lse=parts[1])
        assert in_place is parts[0]
        assert torch.equal(in_place, merged)
        assert torch.equal(parts[1], merged_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_f230_an_lse_of_plus_infinity_is_an_empty_part(kernels, dtype):
    """What FlashAttention-2 reports for a part without positions; `out` of it is not read."""
    T, H, D = 3, 5, 8
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(T, H, D, generator=generator).to(dtype) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse_a, lse_b = (torch.randn(T, H, generator=generator).to(wide) for _ in range(2))
    whole = ops.merge_attention(a, lse_a, b, lse_b)
    lse_a[:, [0, 2]], a[:, [0, 2]] = math.inf, math.nan  # head 0: a is empty
    lse_b[:, [1, 2]], b[:, [1, 2]] = math.inf, math.nan  # head 1: b is; head 2: both are
    lse_b[0, 2] = -math.inf
    lse = torch.empty_like(lse_a)
    merged = ops.merge_attention(a, lse_a, b, lse_b, lse=lse)
    out = merged[0] if isinstance(merged, tuple) else merged
    assert torch.equal(out[:, 0], b[:, 0])
    assert torch.equal(out[:, 1], a[:, 1])
    assert (out[:, 2] == 0).all()
    assert torch.equal(out[:, 3:], whole[:, 3:])
    torch.testing.assert_close(lse[:, :2], torch.stack([lse_b[:, 0], lse_a[:, 1]], dim=1))
    assert (lse[:, 2] == -math.inf).all()


def test_merge_of_two_empty_parts_is_empty(kernels):
    nothing, lse = torch.full((2, 3, 4), math.nan), torch.full((2, 3), -math.inf)
    out, out_lse = ops.merge_attention_lse(nothing, lse, nothing, lse)
    assert (out == 0).all()
    assert (out_lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
def test_copy_blocks_equals_indexing(kernels, dtype):
    """Contiguous, transposed and interleaved caches in one call; gaps of a strided view stay as they are."""
    generator = torch.Generator().manual_seed(1)

    def fresh(*shape):
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    bases = [fresh(6, 2, 4, 8), fresh(6, 4, 3, 5), fresh(6, 2, 2, 3, 4), fresh(6, 4, 4)]
    views = [bases[0], bases[1].transpose(1, 2), bases[2][:, 1], bases[3][:, ::2, 1:3]]
    wanted = [base.clone() for base in bases]
    wanted_views = [wanted[0], wanted[1].transpose(1, 2), wanted[2][:, 1], wanted[3][:, ::2, 1:3]]
    pairs = torch.tensor([[0, 3], [5, 1], [0, 4]])
    for view in wanted_views:
        for source, destination in pairs.tolist():
            view[destination] = view[source]
    ops.copy_blocks(views, pairs)
    for base, expected in zip(bases, wanted, strict=True):
        assert torch.equal(base, expected)
    ops.copy_blocks(views, [])
    ops.copy_blocks(views, [(3, 2)])
    assert torch.equal(bases[0][2], bases[0][0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_passes_through(kernels, dtype):
    """A sequence of one token returns its V bit for bit: widening and narrowing know every number of the type."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16)
    if kernels.name == "emulated":
        numbers = numbers[:: 2**16 // 4096 + 1][:3840]  # every 17th
    values = numbers.view(dtype).reshape(-1, 1, 1, 256)
    values = values.clone()
    values[values.isnan()] = 0
    if kernels.name == "native" and dtype is torch.bfloat16 and native.active_cpu_isa() == "avx512_bf16":
        values[values.abs() < torch.finfo(dtype).tiny] = 0  # vdpbf16ps takes subnormals for zeros
    N = values.shape[0]
    table = torch.arange(N, dtype=torch.int32).reshape(N, 1)
    ones = torch.ones(N, dtype=torch.int32)
    query = torch.zeros(N, 1, 256, dtype=dtype)
    out = ops.paged_attention(query, torch.zeros_like(values), values, table, ones)
    assert torch.equal(out, values.squeeze(1) + 0)  # + 0: a negative zero times a weight of 1 may lose its sign


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_rounds_to_nearest_even(kernels, dtype):
    """The mean of two numbers of the type, rounded as torch rounds; subnormals and overflow to inf included."""
    generator = torch.Generator().manual_seed(2)
    rows = 1 if kernels.name == "emulated" else 40
    bits = torch.randint(-(2**15), 2**15, (2, rows, 1, 512), generator=generator).to(torch.int16)
    bits[:, :, :, :64] &= 0x83FF if dtype is torch.float16 else 0x807F  # subnormals
    a, b = bits.view(dtype).nan_to_num(1.0, posinf=2.0, neginf=2.0)
    lse = torch.zeros(rows, 1)
    out = ops.merge_attention(a, lse, b, lse)
    assert torch.equal(out, (0.5 * a.float() + 0.5 * b.float()).to(dtype))
