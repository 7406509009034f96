"""Prefill on every instruction set: many chunks and tiles against the float64 reference, and bits that do not move."""

import math
import random

import pytest
import torch

from kvpager import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def paged(rng, generator, *, lengths, num_kv_heads, head_dim, block_size, dtype):
    """Random caches in an order of axes of their own, NaN where nothing is written, and shuffled tables."""
    widths = [-(-length // block_size) for length in lengths]
    N = sum(widths) + 2
    order = rng.choice(((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)))  # of block, head and slot in memory
    sizes = (N, num_kv_heads, block_size)
    caches = []
    for _ in range(2):
        memory = torch.full((*(sizes[axis] for axis in order), head_dim + rng.choice((0, 3))), math.nan, dtype=dtype)
        caches.append(memory.permute(*(order.index(axis) for axis in range(3)), 3)[..., :head_dim])
    free = torch.randperm(N, generator=generator).tolist()
    table = torch.full((len(lengths), max(widths, default=0) + 1), -7, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(widths[row]):
            block = table[row, column] = free.pop()
            count = min(block_size, length - column * block_size)
            for cache in caches:
                rows = torch.randn(num_kv_heads, count, head_dim, generator=generator)
                cache[int(block), :, :count] = rows.to(dtype)
    return caches, table


def draw(seed):
    """A random batch whose sequences need several chunks of keys and several blocks of rows, and options."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    K, group = rng.choice(((1, 1), (2, 3), (2, 8), (1, 7), (3, 2)))
    D = rng.choice((64, 80, 96, 128, 256, 20, 33))
    dtype = rng.choice(DTYPES)
    lengths = [rng.choice((0, 1, 17, 127, 128, 129, rng.randint(130, 300))) for _ in range(rng.randint(1, 3))]
    caches, table = paged(
        rng, generator, lengths=lengths, num_kv_heads=K, head_dim=D, block_size=rng.choice((1, 5, 16, 32)), dtype=dtype
    )
    query_lens = [rng.choice((length, min(length, rng.randint(0, 70)))) for length in lengths]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]) + 1, K * group, D, generator=generator).to(dtype)
    options = {
        "scale": rng.choice((D**-0.5, 0.2)),
        "window": rng.choice((0, 0, 1, 40, 128, 200)),
        "softcap": rng.choice((0.0, 3.0)),
        "sinks": rng.choice((None, torch.randn(K * group, generator=generator))),
        "alibi_slopes": rng.choice((None, torch.rand(K * group, generator=generator) - 0.02)),
    }
    return query, caches, table, starts, torch.tensor(lengths, dtype=torch.int32), options


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("isa")
def test_equals_the_float64_reference(tolerance, seed):
    query, caches, table, starts, lengths, options = draw(seed)
    out, lse = ops.paged_prefill_lse(query, *caches, table, starts, lengths, **options)
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    wanted, wanted_lse = ops.attention.reference.paged_prefill(
        query.double(), *(cache.double() for cache in caches), table, starts, lengths,
        max_query_len=10**6, max_seq_len=10**6, **wide,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance[query.dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "slopes"), [(0, None), (90, None), (90, torch.arange(-0.01, 0.5, 0.1))])
@pytest.mark.usefixtures("isa")
def test_b081_bits_do_not_depend_on_chunks_tiles_or_threads(threads, dtype, window, slopes):
    """290 tokens at once, in chunks of any size and on any number of threads: each token gets the same bits."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    T = 290
    caches, table = paged(
        rng, generator, lengths=[T], num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype
    )  # fmt: skip
    query = torch.randn(T, 6, 64, generator=generator).to(dtype)

    def run(size):
        outs = []
        for start in range(0, T, size):
            stop = min(start + size, T)
            bounds = torch.tensor([0, stop - start, stop], dtype=torch.int32)
            own = (query[start:stop], *caches, table, bounds[:2], bounds[2:])
            outs.append(ops.paged_prefill(*own, window=window, alibi_slopes=slopes))
        return torch.cat(outs)

    threads(1)
    whole = run(T)
    assert whole.isfinite().all()
    for size, count in ((T, 2), (T, 5), (128, 1), (97, 2), (13, 1)):
        threads(count)
        assert torch.equal(run(size), whole), (size, count)


@pytest.mark.usefixtures("isa")
def test_a_group_larger_than_a_tile_is_cut():
    """1 token with 450 query heads on a kv head: what one head gets does not depend on the others."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    caches, table = paged(
        rng, generator, lengths=[150], num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32
    )  # fmt: skip
    query = torch.randn(1, 900, 32, generator=generator)
    bounds = torch.tensor([0, 1, 150], dtype=torch.int32)
    out, lse = ops.paged_prefill_lse(query, *caches, table, bounds[:2], bounds[2:])
    for head in (0, 191, 192, 449, 450, 899):
        few = torch.stack([query[0, head % 450], query[0, 450 + head % 450]])[None]
        alone, lse_alone = ops.paged_prefill_lse(few, *caches, table, bounds[:2], bounds[2:])
        assert torch.equal(alone[0, head // 450], out[0, head])
        assert torch.equal(lse_alone[0, head // 450], lse[0, head])


@pytest.mark.usefixtures("isa")
def test_large_scores_and_softcaps():
    """Scores of 1e4 leave one position; a softcap of 1e6 bends nothing; one of 1e-6 makes all positions equal."""
    generator = torch.Generator().manual_seed(2)
    key, value = torch.randn(10, 1, 16, 8, generator=generator), torch.randn(10, 1, 16, 8, generator=generator)
    table, bounds = torch.arange(10, dtype=torch.int32)[None], torch.tensor([0, 1, 160], dtype=torch.int32)
    query = torch.randn(1, 1, 8, generator=generator)

    def attend(**options):
        return ops.paged_prefill(query, key, value, table, bounds[:2], bounds[2:], **options)[0, 0]

    scores = key.view(160, 8) @ query[0, 0]
    torch.testing.assert_close(attend(scale=1e4), value.view(160, 8)[scores.argmax()], rtol=0, atol=1e-6)
    torch.testing.assert_close(attend(softcap=1e6), attend(), rtol=0, atol=1e-5)
    torch.testing.assert_close(attend(softcap=1e-6), value.view(160, 8).mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.usefixtures("isa")
def test_merge_equals_the_reference(tolerance, dtype):
    """17 heads and head dim 20: no multiple of any vector. Empty parts hold NaN and are not read."""
    generator = torch.Generator().manual_seed(3)
    parts, lses = (
        torch.randn(2, 5, 17, 20, generator=generator).to(dtype),
        torch.randn(2, 5, 17, generator=generator) * 9,
    )
    lses = lses.to(torch.float64 if dtype is torch.float64 else torch.float32)
    lses[0, 1, 3] = lses[1, 2, 4] = lses[0, 4, 16] = lses[1, 4, 16] = -math.inf
    parts[lses == -math.inf] = math.nan
    out, lse = ops.merge_attention_lse(parts[0], lses[0], parts[1], lses[1])
    wanted, wanted_lse = ops.attention.reference.merge_attention(
        parts[0].double(), lses[0].double(), parts[1].double(), lses[1].double()
    )
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    assert (out[4, 16] == 0).all()
    assert lse[4, 16] == -math.inf
    in_place = parts[0].clone()
    ops.merge_attention(in_place, lses[0], parts[1], lses[1], out=in_place)
    assert torch.equal(in_place, out)
