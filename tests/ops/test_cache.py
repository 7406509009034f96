"""`PagedKVCache`: one allocation in both layouts and arrangements, its sizes, copies, and the two ways to attend."""

from dataclasses import dataclass

import pytest
import torch

from kvpager import AttentionMetadata, PagedKVCache
from kvpager.config import CacheConfig
from kvpager.errors import ArgumentError, ConfigError

ARRANGEMENTS = [(layout, block_major) for layout in ("HND", "NHD") for block_major in (False, True)]


@dataclass(frozen=True)
class Config:
    num_hidden_layers: int = 3
    num_key_value_heads: int = 2
    head_dim: int = 8


def metadata(table, lengths, query_lens):
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    slots = [
        int(table[row, p // 4]) * 4 + p % 4
        for row, (length, query_len) in enumerate(zip(lengths, query_lens, strict=True))
        for p in range(length - query_len, length)
    ]
    return AttentionMetadata(
        torch.tensor(slots), table, torch.tensor(lengths, dtype=torch.int32), starts, max(query_lens), max(lengths)
    )


@pytest.mark.parametrize(("layout", "block_major"), ARRANGEMENTS)
def test_prompt_then_decodes_through_every_arrangement(layout, block_major):
    """Two sequences of different lengths, three layers of different K/V, a prompt and then tokens one by one."""
    torch.manual_seed(0)
    cache = PagedKVCache(3, 9, 2, 4, 8, layout=layout, block_major=block_major)
    cache.storage.fill_(float("nan"))
    table = torch.tensor([[7, 2, 5], [0, 8, 3]], dtype=torch.int32)
    T = [9, 6]
    query, key, value = ([[torch.randn(length, heads, 8) for length in T] for _ in range(3)] for heads in (4, 2, 2))
    outs = [[[] for _ in T] for _ in range(3)]
    for lengths in ([7, 4], [8, 5], [9, 6]):
        query_lens = lengths if lengths == [7, 4] else [1, 1]
        step = metadata(table, lengths, query_lens)
        spans = [slice(length - n, length) for length, n in zip(lengths, query_lens, strict=True)]
        for layer in range(3):
            new = [torch.cat([rows[layer][b][spans[b]] for b in range(2)]) for rows in (query, key, value)]
            cache.write(layer, new[1], new[2], step.slot_mapping)
            out = cache.attend(layer, new[0], step)
            for b, part in enumerate(out.split(query_lens)):
                outs[layer][b].append(part)
    for layer in range(3):
        for b in range(2):
            wanted = torch.nn.functional.scaled_dot_product_attention(
                *(rows[layer][b].transpose(0, 1) for rows in (query, key, value)), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            torch.testing.assert_close(torch.cat(outs[layer][b]), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("layout", "block_major"), ARRANGEMENTS)
def test_one_allocation_holds_everything_once(layout, block_major):
    cache = PagedKVCache(3, 5, 2, 4, 8, layout=layout, block_major=block_major, dtype=torch.float16)
    assert cache.storage.is_contiguous()
    assert cache.bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert cache.bytes_per_block == 4 * cache.bytes_per_token
    assert cache.storage.nbytes == 5 * cache.bytes_per_block
    shape = (5, 2, 4, 8) if layout == "HND" else (5, 4, 2, 8)
    cache.storage.zero_()
    for view in (*cache.key_cache, *cache.value_cache):
        assert view.shape == shape
        view += 1
    assert (cache.storage == 1).all()
    if block_major:  # a block's bytes of all layers lie together
        assert cache.storage[2].nbytes == cache.bytes_per_block
        assert cache.storage[2].is_contiguous()


@pytest.mark.parametrize(("layout", "block_major"), ARRANGEMENTS)
def test_copy_blocks_goes_through_all_layers(layout, block_major):
    cache = PagedKVCache(2, 5, 2, 4, 8, layout=layout, block_major=block_major)
    cache.storage.copy_(torch.arange(cache.storage.numel()).reshape(cache.storage.shape))
    before = [view.clone() for view in (*cache.key_cache, *cache.value_cache)]
    cache.copy_blocks([(4, 0), (4, 2)])
    for view, old in zip((*cache.key_cache, *cache.value_cache), before, strict=True):
        assert torch.equal(view[[0, 2]], old[[4, 4]])
        assert torch.equal(view[[1, 3, 4]], old[[1, 3, 4]])


def test_one_query_each_decodes_and_padding_rows_prefill():
    """`max_query_len` 1 with fewer queries than sequences is a batch with padding rows, not a decode."""
    cache = PagedKVCache(1, 2, 1, 4, 8)
    cache.key_cache[0].zero_()
    cache.value_cache[0].fill_(2)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 1], dtype=torch.int32)
    step = AttentionMetadata(torch.tensor([2]), table, lengths, starts, 1, 4)
    assert (cache.attend(0, torch.ones(1, 1, 8), step) == 2).all()
    out = cache.attend(0, torch.ones(2, 1, 8), step)
    assert out[:, 0, 0].tolist() == [2, 0]


def test_options_reach_the_kernels():
    cache = PagedKVCache(1, 1, 1, 4, 8)
    cache.key_cache[0].zero_()
    cache.value_cache[0].copy_(torch.arange(4.0).reshape(4, 1).expand(4, 8))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    for query_len in (1, 2):
        step = AttentionMetadata(torch.tensor([3]), table, lengths, torch.tensor([0, query_len]).int(), query_len, 4)
        query = torch.ones(query_len, 1, 8)
        assert cache.attend(0, query, step, window=2)[-1, 0, 0] == 2.5
        sink = cache.attend(0, query, step, sinks=torch.full((1,), 100.0), scale=0.1, softcap=3.0)
        assert sink.abs().max() < 1e-6
        steep = cache.attend(0, query, step, alibi_slopes=torch.full((1,), 100.0))
        assert steep[-1, 0, 0] == 3  # its own position alone


def test_from_config():
    counted = PagedKVCache.from_config(Config(), CacheConfig(block_size=4, num_blocks=7), dtype=torch.bfloat16)
    assert (counted.num_layers, counted.num_blocks, counted.num_kv_heads, counted.head_dim) == (3, 7, 2, 8)
    per_block = counted.bytes_per_block
    for budget, num_blocks in ((7 * per_block, 7), (8 * per_block - 1, 7), (8 * per_block, 8)):
        config = CacheConfig(block_size=4, kv_cache_memory_bytes=budget)
        budgeted = PagedKVCache.from_config(Config(), config, dtype=torch.bfloat16, layout="NHD", block_major=True)
        assert budgeted.num_blocks == num_blocks
        assert (budgeted.layout, budgeted.block_major) == ("NHD", True)
    with pytest.raises(
        ConfigError, match=f"wanted at least {per_block} bytes \\(one block of 4 tokens\\), got {per_block - 1}"
    ):
        PagedKVCache.from_config(
            Config(), CacheConfig(block_size=4, kv_cache_memory_bytes=per_block - 1), dtype=torch.bfloat16
        )
    with pytest.raises(ConfigError, match="got none"):
        PagedKVCache.from_config(Config(), CacheConfig(block_size=4))


def test_bad_shapes_and_pools_that_do_not_fit():
    with pytest.raises(ConfigError, match="`num_blocks`: wanted at least 1, got 0"):
        PagedKVCache(1, 0, 1, 4, 8)
    for size in (1.5, "2", None, True, 2**70):
        with pytest.raises(ConfigError, match="`head_dim`: wanted a whole number of at most 63 bits, got"):
            PagedKVCache(1, 1, 1, 4, size)
    for device in ("moon", None):
        with pytest.raises(ConfigError, match="`device`: wanted"):
            PagedKVCache(1, 1, 1, 4, 8, device=device)
    with pytest.raises(ConfigError, match="`layout`"):
        PagedKVCache(1, 1, 1, 4, 8, layout="DHN")
    with pytest.raises(ConfigError, match="`dtype`"):
        PagedKVCache(1, 1, 1, 4, 8, dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"can't allocate \d+ bytes on cpu: 1099511627776 blocks of 256 bytes"):
        PagedKVCache(1, 2**40, 1, 4, 8)


def test_a_layer_or_a_target_that_is_none_is_named():
    cache = PagedKVCache(2, 4, 1, 4, 8)
    rows = torch.zeros(1, 1, 8)
    for layer in (2, -1, -3, None, "0", 2**70):
        with pytest.raises(ArgumentError, match="`layer`: wanted 0 … 1, got"):
            cache.write(layer, rows, rows, torch.tensor([0]))
    with pytest.raises(ArgumentError, match="`target`: wanted a `PagedKVCache`, got Tensor"):
        cache.swap_blocks(cache.storage, [(0, 1)])
