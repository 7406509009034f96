"""Attention over a prefix that a batch shares equals the plain ops over the whole tables."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError

S = 4


def batch(dtype, layout, *, prefix_len=12, suffix_lens=(1, 6, 9, 4), num_kv_heads=2, group=3, head_dim=16):
    """Sequences that share their first blocks: (caches, tables, lengths). What is not written holds NaN."""
    generator = torch.Generator().manual_seed(5)
    shared, widths = prefix_len // S, [-(-length // S) for length in suffix_lens]
    N = shared + sum(widths) + 1
    free = torch.randperm(N, generator=generator).tolist()
    prefix = [free.pop() for _ in range(shared)]
    table = torch.full((len(suffix_lens), shared + max(widths)), -1, dtype=torch.int32)
    caches = [torch.full((N, num_kv_heads, S, head_dim), math.nan).to(dtype) for _ in range(2)]

    def write(block, count):
        for cache in caches:
            cache[block, :, :count] = torch.randn(num_kv_heads, count, head_dim, generator=generator).to(dtype)

    for block in prefix:
        write(block, S)
    for row, length in enumerate(suffix_lens):
        blocks = [free.pop() for _ in range(widths[row])]
        table[row, : shared + len(blocks)] = torch.tensor(prefix + blocks)
        for place, block in enumerate(blocks):
            write(block, min(S, length - place * S))
    lengths = torch.tensor([prefix_len + length for length in suffix_lens], dtype=torch.int32)
    if layout == "NHD":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    return caches, table, lengths, num_kv_heads * group, generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.7}, {"sinks": True}])
def test_decode_equals_plain(kernels, tolerance, dtype, layout, options):
    caches, table, lengths, H, generator = batch(dtype, layout)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if "sinks" in options:
        options = {"sinks": torch.randn(H, generator=generator).to(wide)}
    query = torch.randn(4, H, 16, generator=generator).to(dtype)
    out, lse = ops.shared_prefix_attention_lse(query, *caches, table, lengths, 12, layout=layout, **options)
    wanted, wanted_lse = ops.paged_attention_lse(query, *caches, table, lengths, layout=layout, **options)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2 * tolerance[dtype])
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix_len", [0, 4, 12])
def test_prefill_equals_plain(kernels, tolerance, prefix_len):
    """Chunks of different lengths behind the prefix, one empty, and rows of padding, which stay zeros."""
    caches, table, lengths, H, generator = batch(torch.float32, "HND")
    starts = torch.tensor([0, 1, 5, 5, 9], dtype=torch.int32)
    query = torch.randn(11, 2 * H, 16, generator=generator)[:, ::2]  # a strided view
    out, lse = ops.shared_prefix_attention_lse(query, *caches, table, lengths, prefix_len, query_start_loc=starts)
    wanted, wanted_lse = ops.paged_prefill_lse(query, *caches, table, starts, lengths)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2 * tolerance[torch.float32])
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-5)
    assert (out[9:] == 0).all()


@pytest.mark.usefixtures("isa")
def test_a_large_batch_over_a_long_prefix(tolerance):
    """More rows than a tile has and more positions than a chunk has."""
    caches, table, lengths, H, generator = batch(
        torch.float32, "HND", prefix_len=200, suffix_lens=tuple(range(1, 71)), head_dim=32
    )
    query = torch.randn(70, H, 32, generator=generator)
    out = ops.shared_prefix_attention(query, *caches, table, lengths, 200)
    wanted = ops.paged_attention(query, *caches, table, lengths)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2 * tolerance[torch.float32])


def test_an_empty_batch():
    caches, table, lengths, H, _ = batch(torch.float32, "HND")
    out = ops.shared_prefix_attention(torch.zeros(0, H, 16), *caches, table[:0], lengths[:0], 12)
    assert out.shape == (0, H, 16)


def test_what_is_no_shared_prefix_is_refused():
    caches, table, lengths, H, _ = batch(torch.float32, "HND")
    query = torch.zeros(4, H, 16)
    for wrong in (-4, 6, 400):
        with pytest.raises(ArgumentError, match=f"`prefix_len`: wanted a multiple of the block size 4.* got {wrong}"):
            ops.shared_prefix_attention(query, *caches, table, lengths, wrong)
    with pytest.raises(ArgumentError, match=r"`block_tables`: wanted the same first 4 entries.*at row 1, column 3"):
        ops.shared_prefix_attention(query, *caches, table, lengths, 16)
    with pytest.raises(ArgumentError, match="`seq_lens`"):  # a sequence that ends within the prefix
        ops.shared_prefix_attention(query, *caches, table, lengths - 8, 12)
