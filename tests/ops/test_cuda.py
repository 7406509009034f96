"""The real CUDA kernels, where there is a GPU: against the oracle, in a captured graph, and their device errors.

Everywhere else the same sources run under the emulator in the other files.
"""

import pytest
import torch

from kvpager import native, ops
from kvpager.errors import ArgumentError, SlotError
from kvpager.ops.op import OPS
from kvpager.ops.tensors import QUANTISED_DTYPES as CODES

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and native.native_status().cuda_kernels), reason="no GPU, or built without nvcc"
)


def inputs_of(case):
    return [tensor.to(DEVICE) for tensor in (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 3.0)])
def test_attention_equals_oracle(make_case, tolerance, dtype, window, softcap):
    lengths = [0, 1, 16, 17, 100]
    case = make_case(lengths, dtype=dtype, group=5, head_dim=64, block_size=16)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    options = {"scale": 0.125, "window": window, "softcap": softcap}
    sinks, slopes = (draw(case.num_heads, generator=case.generator).to(wide) for draw in (torch.randn, torch.rand))
    on_device = {"sinks": sinks.to(DEVICE), "alibi_slopes": slopes.to(DEVICE)}
    query = case.random(len(lengths), case.num_heads, 64)
    key_cache, value_cache, table, seq_lens = inputs_of(case)
    out = ops.paged_attention(query.to(DEVICE), key_cache, value_cache, table, seq_lens, **on_device, **options)
    starts = torch.tensor([0, 0, 1, 2, 3, 5], dtype=torch.int32, device=DEVICE)
    prefill = ops.paged_prefill(
        query.to(DEVICE), key_cache, value_cache, table, starts, seq_lens, **on_device, **options
    )
    options |= {"sinks": sinks, "alibi_slopes": slopes}
    assert (out[0] == 0).all()
    for row in range(1, 5):
        wanted, _ = case.oracle(row, query[row], lengths[row] - 1, **options)
        torch.testing.assert_close(out[row].double().cpu(), wanted, rtol=0, atol=tolerance[dtype])
    for token, row in enumerate([1, 2, 3, 4, 4]):
        position = lengths[row] - (2 if token == 3 else 1)
        wanted, _ = case.oracle(row, query[token], position, **options)
        torch.testing.assert_close(prefill[token].double().cpu(), wanted, rtol=0, atol=tolerance[dtype])


def test_moves_equal_the_reference():
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(6, 2, 4, 8, generator=generator) for _ in range(2)]
    rows = [torch.randn(5, 2, 8, generator=generator) for _ in range(2)]
    slots, pairs = torch.tensor([3, -1, 0, 17]), torch.tensor([[0, 2], [4, 1]])
    on_device = [cache.to(DEVICE) for cache in caches]
    ops.write_kv(*(row.to(DEVICE) for row in rows), *on_device, slots.to(DEVICE))
    ops.copy_blocks(on_device, pairs.to(DEVICE))
    OPS["write_kv"].reference(*rows, *caches, slots)
    OPS["copy_blocks"].reference(caches, pairs)
    for cache, wanted in zip(on_device, caches, strict=True):
        assert torch.equal(cache.cpu(), wanted)


def test_captured_graph_follows_new_lengths_and_tables(make_case):
    case = make_case([9, 17], head_dim=64, block_size=4)
    query = case.random(2, case.num_heads, 64)
    static = [query.to(DEVICE), *inputs_of(case)]
    out = torch.empty_like(static[0])
    ops.paged_attention(*static, scale=0.125, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention(*static, scale=0.125, out=out)
    for lengths in ([9, 17], [5, 0], [1, 16]):
        static[4].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for row, length in enumerate(lengths):
            wanted = case.oracle(row, query[row], length - 1, scale=0.125)[0] if length else torch.zeros(4, 64).double()
            torch.testing.assert_close(out[row].double().cpu(), wanted, rtol=0, atol=2e-6)
    ops.check_errors()


@pytest.mark.parametrize("codes", [None, *CODES])
def test_a_captured_decode_allocates_nothing_and_follows_split_plans(make_case, tolerance, codes):
    """Schedule and workspace are static too; lengths, tables and cuts change between replays."""
    case = make_case([3000, 17, 0, 900], dtype=torch.bfloat16, num_kv_heads=4, group=4, head_dim=128, block_size=16)
    key_cache, value_cache, table, lengths = inputs_of(case)
    scales = {}
    if codes is not None:
        written = ~case.key_cache.isnan().any(-1)
        made = [ops.quantise(cache.nan_to_num(0.0), codes) for cache in (case.key_cache, case.value_cache)]
        key_cache, value_cache = (numbers.to(DEVICE) for numbers, _ in made)
        scales = {
            name: scale.where(written, torch.nan).to(DEVICE)
            for name, (_, scale) in zip(("key_scale", "value_scale"), made, strict=True)
        }
    query = case.random(4, 16, 128).to(DEVICE)
    num_parts = ops.default_num_parts(DEVICE, 4)
    split_plan = ops.make_split_plan(lengths, block_size=16, num_kv_heads=4)
    size = ops.workspace_bytes(4, 16, 128, max_seq_len=table.shape[1] * 16, num_parts=num_parts)
    workspace, out = torch.zeros(size, dtype=torch.uint8, device=DEVICE), torch.empty_like(query)
    inputs = (query, key_cache, value_cache, table, lengths)
    options = {"scale": 0.09, "split_plan": split_plan, "workspace": workspace, "out": out, **scales}
    ops.paged_attention(*inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention(*inputs, **options)
    for now in ([3000, 17, 0, 900], [1, 16, 0, 0], [2999, 5, 0, 899]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        ops.make_split_plan(lengths, block_size=16, num_parts=num_parts, out=split_plan)
        graph.replay()
        host = [tensor.cpu() for tensor in inputs]
        wanted, _ = ops.attention.reference.paged_attention(
            *host, scale=0.09, max_seq_len=4096, **{name: scale.cpu() for name, scale in scales.items()}
        )
        torch.testing.assert_close(out.float().cpu(), wanted, rtol=0, atol=tolerance[torch.bfloat16])
        assert (workspace == 0).all()
    ops.check_errors()


def test_bad_values_wait_on_the_device(make_case):
    case = make_case([5, 6])
    key_cache, value_cache, table, lengths = inputs_of(case)
    rows = torch.zeros(2, 2, 8, device=DEVICE)
    before = key_cache.clone()
    ops.write_kv(rows, rows, key_cache, value_cache, torch.tensor([-2, 10**6], device=DEVICE))
    assert torch.equal(key_cache.view(torch.int32), before.view(torch.int32))
    with pytest.raises(SlotError, match="`slot_mapping`"):
        ops.check_errors()
    ops.check_errors()
    ops.paged_attention(torch.zeros(2, 4, 8, device=DEVICE), key_cache, value_cache, table, lengths + 100)
    with pytest.raises(ArgumentError, match="`seq_lens`"):
        ops.check_errors()


@pytest.mark.parametrize("dtype", CODES)
def test_quantised_writes_and_gathers_equal_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(5, 2, 64, generator=generator).bfloat16() for _ in range(2)]
    caches = [torch.zeros(6, 2, 4, 64, dtype=torch.int8).view(dtype) for _ in range(2)]
    scales = {name: torch.zeros(6, 2, 4) for name in ("key_scale", "value_scale")}
    slots, table = torch.tensor([3, -1, 0, 17, 2]), torch.tensor([[0, 4]], dtype=torch.int32)
    on_device = [tensor.to(DEVICE) for tensor in (*rows, *caches)]
    scales_on_device = {name: scale.to(DEVICE) for name, scale in scales.items()}
    ops.write_kv(*on_device, slots.to(DEVICE), **scales_on_device)
    OPS["write_kv"].reference(*rows, *caches, slots, **scales)
    for cache, wanted in zip(on_device[2:], caches, strict=True):
        assert torch.equal(cache.cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert all(torch.equal(scales_on_device[name].cpu(), scale) for name, scale in scales.items())
    lengths = torch.tensor([6], dtype=torch.int32)
    read = ops.gather_kv(*on_device[2:], table.to(DEVICE), lengths.to(DEVICE), **scales_on_device)
    wanted_read = ops.gather_kv(*caches, table, lengths, **scales)
    assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(read, wanted_read, strict=True))


@pytest.mark.parametrize("pairs_on", ["cpu", DEVICE])
def test_blocks_swap_with_pinned_memory_on_a_side_stream(pairs_on):
    cache = torch.arange(6 * 2 * 4 * 64, dtype=torch.float32, device=DEVICE).reshape(6, 2, 4, 64)
    host = torch.zeros(4, 2, 4, 64, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.swap_blocks([cache], [host], torch.tensor([[3, 1], [4, 2], [0, 0]], device=pairs_on))
    stream.synchronize()
    assert torch.equal(host[:3], cache[[0, 3, 4]].cpu())
    assert (host[3] == 0).all()
    with pytest.raises(ArgumentError, match="pinned"):
        ops.swap_blocks([cache], [torch.zeros(4, 2, 4, 64)], torch.tensor([[0, 0]], device=pairs_on))


def test_captured_table_changes_follow_their_list():
    table = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
    changed = torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
    ops.update_tables(table, changed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.update_tables(table, changed)
    changed.copy_(torch.tensor([[2, 1, 9], [-1, 0, 0]], dtype=torch.int32))
    graph.replay()
    assert table[2, 1] == 9
    assert (table == -1).sum() == 11
    ops.check_errors()
