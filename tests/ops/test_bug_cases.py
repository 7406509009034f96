"""Cases from public bug reports that a cache of tensors can express, each under its id (tests/cases.md)."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError, SlotError

NAN = math.nan
INT32 = torch.int32


def ints(*values):
    return torch.tensor(values, dtype=INT32)


# --- slots and cache writes -------------------------------------------------------------------------------------------


def test_b056_slot_minus_one_writes_nothing(kernels):
    cache = torch.full((2, 1, 4, 2), 7.0)
    value_cache = cache.clone()
    rows = torch.arange(1.0, 5.0).reshape(4, 1, 1).expand(4, 1, 2).contiguous()
    ops.write_kv(rows, rows, cache, value_cache, torch.tensor([-1, 0, -1, 5]))
    wanted = torch.full((8, 2), 7.0)
    wanted[0], wanted[5] = 2, 4
    assert torch.equal(cache.reshape(8, 2), wanted)
    assert torch.equal(value_cache.reshape(8, 2), wanted)


@pytest.mark.parametrize("slot", [8, -2, 2**40, -(2**40)])
def test_b056_slots_outside_the_pool_are_refused(kernels, slot):
    """The guard blocks around the cache keep their bytes too; an atomic kernel set writes no other row either."""
    pool = torch.full((4, 1, 4, 2), 7.0)
    cache, value_cache = pool[1:3], pool[1:3].clone()
    rows = torch.ones(2, 1, 2)
    with pytest.raises(SlotError, match="slot_mapping"):
        ops.write_kv(rows, rows, cache, value_cache, torch.tensor([3, slot]))
    wanted = torch.full((4, 1, 4, 2), 7.0)
    if not kernels.atomic:
        wanted[1, 0, 3] = 1
    assert torch.equal(pool, wanted)


def test_b058_reserved_next_block_is_not_attended(kernels, make_ramp):
    for length, mean in ((8, 3.5), (4, 1.5), (16, 7.5)):
        ramp = make_ramp([length])
        spare = (set(range(len(ramp.key_cache))) - set(ramp.block_tables[0].tolist())).pop()
        ramp.key_cache[spare], ramp.value_cache[spare] = 0, 100
        table = torch.cat([ramp.block_tables, torch.tensor([[spare]], dtype=INT32)], 1)
        out = ops.paged_attention(torch.zeros(1, 1, 8), ramp.key_cache, ramp.value_cache, table, ramp.seq_lens)
        assert torch.allclose(out, torch.tensor(mean), atol=1e-6)


def test_b062_fewer_slots_than_rows(kernels):
    cache, value_cache = torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2)
    rows = torch.ones(8, 1, 2)
    rows[5:] = NAN
    ops.write_kv(rows, rows, cache, value_cache, torch.tensor([0, 2, 4, 9, 11]))
    assert cache.isfinite().all()
    assert int((cache.reshape(12, 2).sum(1) != 0).sum()) == 5
    with pytest.raises(ArgumentError, match="`key`: wanted at least 9 rows, one for each slot, got 8 rows"):
        ops.write_kv(rows, rows, cache, value_cache, torch.arange(9))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_b063_write_through_a_strided_cache_view(kernels, layout):
    kv = torch.zeros(3, 2, 4, 2, 8) if layout == "NHD" else torch.zeros(3, 2, 2, 4, 8)
    row = torch.full((1, 2, 8), 5.0)
    ops.write_kv(row, row, kv[:, 0], kv[:, 1], torch.tensor([6]), layout=layout)
    rows = kv if layout == "NHD" else kv.transpose(2, 3)
    assert (rows[1, :, 2] == 5).all()
    assert int((kv != 0).sum()) == 2 * 2 * 8


# --- decode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("poison", [NAN, math.inf, 3e4])
def test_b066_poisoned_cache(kernels, make_case, dtype, block_size, poison):
    """Everything unwritten holds poison, and padding entries of the table name poisoned blocks."""
    lengths = [1, 3, 4, 5, 8, 9, 16, 17]
    case = make_case(lengths, dtype=dtype, block_size=block_size, poison=poison, num_kv_heads=1)
    for row, length in enumerate(lengths):
        width = -(-length // block_size)
        case.block_tables[row, width:] = len(case.key_cache) - 1
        for position in range(length):
            case.value_cache[case.block_tables[row, position // block_size], :, position % block_size] = 1
    query = case.random(len(lengths), 2, 8)
    out = ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    assert (out.float() - 1).abs().max() <= (1e-6 if dtype is torch.float32 else 1e-2)


def test_b067_offsets_are_64_bit(kernels, tmp_path):
    """Blocks 2^29 elements apart in a sparse file, few pages of it touched: block · stride passes 2^31 at block 4."""
    N, S, D, stride = 6, 4, 8, 2**29 + 64
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(2 * stride * N)
    flat = torch.from_file(str(sparse), shared=True, size=stride * N, dtype=torch.float16)
    key_cache = flat.as_strided((N, 1, S, D), (stride, S * D, D, 1))
    value_cache = flat.as_strided((N, 1, S, D), (stride, S * D, D, 1), storage_offset=S * D)
    table = torch.tensor([[4, 1, 5]], dtype=INT32)
    slots = torch.tensor([int(table[0, p // S]) * S + p % S for p in range(9)])
    ramp = torch.arange(9.0).half().reshape(9, 1, 1).expand(9, 1, D).contiguous()
    ops.write_kv(torch.zeros_like(ramp), ramp, key_cache, value_cache, slots)
    assert value_cache[4, 0, :, 0].tolist() == [0, 1, 2, 3]
    query = torch.ones(1, 1, D, dtype=torch.float16)
    assert (ops.paged_attention(query, key_cache, value_cache, table, ints(9)) == 4).all()
    ops.copy_blocks([key_cache, value_cache], [(4, 2)])
    table[0, 0] = 2
    out = ops.paged_prefill(query.expand(2, 1, D), key_cache, value_cache, table, ints(0, 2), ints(9))
    assert out[:, 0, 0].tolist() == [3.5, 4]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (14, 2), (15, 3), (10, 2), (12, 4), (8, 8)])
def test_b068_head_ratios(kernels, num_heads, num_kv_heads):
    H, K = num_heads, num_kv_heads
    value_cache = torch.arange(1.0, K + 1).reshape(1, K, 1, 1).expand(1, K, 4, 8).contiguous()
    out = ops.paged_attention(
        torch.randn(1, H, 8), torch.zeros(1, K, 4, 8), value_cache, ints(0).reshape(1, 1), ints(4)
    )
    wanted = torch.tensor([head // (H // K) + 1.0 for head in range(H)])
    assert torch.equal(out[0], wanted.unsqueeze(1).expand(H, 8))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 2), (33, 2), (2, 3), (0, 4)])
def test_b068_head_ratios_that_do_not_divide(kernels, num_heads, num_kv_heads):
    H, K = num_heads, num_kv_heads
    cache, out = torch.zeros(1, K, 4, 8), torch.full((1, H, 8), 77.0)
    with pytest.raises(ArgumentError, match="multiple of the"):
        ops.paged_attention(torch.randn(1, H, 8), cache, cache, ints(0).reshape(1, 1), ints(4), out=out)
    assert (out == 77).all()


@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320])
def test_b069_head_sizes(kernels, make_case, head_dim):
    """Right for every head dim, or one typed refusal that names it; the scale is 1/√D of the true D."""
    D = head_dim
    case = make_case([5], head_dim=D, num_kv_heads=1, group=2)
    query = case.random(1, 2, D)
    if kernels.name == "emulated" and D > 256:
        with pytest.raises(ArgumentError, match=f"at most 256 on CUDA, got {D}"):
            ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
        return
    out = ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    wanted, _ = case.oracle(0, query[0], 4, scale=D**-0.5)
    assert (out[0].double() - wanted).abs().max() < 2e-6
    ramp = (torch.arange(D) % 64).float().expand(case.value_cache.shape).contiguous()
    out = ops.paged_attention(query, case.key_cache, ramp, case.block_tables, case.seq_lens)
    torch.testing.assert_close(out, ramp[0, 0, 0].expand(1, 2, D), rtol=1e-6, atol=1e-5)


def test_b070_sequences_shorter_than_a_block(kernels, make_ramp):
    key, value = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    caches = [torch.full((3, 1, 4, 8), NAN) for _ in range(2)]
    ops.write_kv(key.expand(3, 1, 8), value.expand(3, 1, 8), *caches, torch.tensor([0, 4, 8]))
    table = ints(0, 1, 2).reshape(3, 1)
    out = ops.paged_attention(torch.randn(1, 1, 8).expand(3, 1, 8), *caches, table, ints(1, 1, 1))
    assert torch.equal(out, value.expand(3, 1, 8))
    ramp = make_ramp([1, 4, 5])
    out = ops.paged_attention(torch.zeros(3, 1, 8), ramp.key_cache, ramp.value_cache, ramp.block_tables, ramp.seq_lens)
    assert torch.allclose(out[:, 0, 0], torch.tensor([0, 1.5, 2.0]))


def test_b071_query_is_a_view(kernels, make_case):
    """A query cut from a fused projection, bit for bit as its contiguous copy; guard rows around out untouched."""
    case = make_case([3, 9, 4], group=3)
    H, K, D = 6, 2, 8
    qkv = case.random(3, (H + 2 * K) * D)
    query = qkv[:, : H * D].unflatten(1, (H, D))
    guarded = torch.full((5, H + 1, D), 77.0)
    out = guarded[1:4, :H]
    inputs = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    ops.paged_attention(query, *inputs, out=out)
    assert torch.equal(out, ops.paged_attention(query.contiguous(), *inputs))
    assert (guarded[0] == 77).all()
    assert (guarded[4] == 77).all()
    assert (guarded[:, H] == 77).all()
    assert ops.paged_attention(query, *inputs).is_contiguous()


@pytest.mark.parametrize("prefill", [False, True])
def test_b074_empty_rows_in_a_batch(kernels, make_ramp, prefill):
    def attend(ramp, rows):
        query = torch.zeros(rows, 1, 8)
        out, lse = torch.full((rows, 1, 8), NAN), torch.full((rows, 1), NAN)
        caches = (ramp.key_cache, ramp.value_cache)
        if prefill:  # sequences without tokens have no query either; the rows left over belong to nobody
            starts = torch.cat([ints(0), (ramp.seq_lens > 0).cumsum(0).to(INT32)])
            ops.paged_prefill(query, *caches, ramp.block_tables, starts, ramp.seq_lens, out=out, lse=lse)
        else:
            ops.paged_attention(query, *caches, ramp.block_tables, ramp.seq_lens, out=out, lse=lse)
        return out, lse

    out, lse = attend(make_ramp([0, 3, 0, 1, 0]), 5)
    wanted = [1, 0, 0, 0, 0] if prefill else [0, 1, 0, 0, 0]
    assert torch.allclose(out[:, 0], torch.tensor(wanted).float().unsqueeze(1).expand(5, 8), rtol=0, atol=1e-6)
    empty = [2, 3, 4] if prefill else [0, 2, 4]
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert int(lse.isfinite().sum()) == 2
    assert abs(out.amax() - 1) < 1e-6
    out, lse = attend(make_ramp([0, 0]), 2)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    ramp = make_ramp([4])
    ramp.block_tables, ramp.seq_lens = ramp.block_tables[:0], ramp.seq_lens[:0]
    assert attend(ramp, 0)[0].shape == (0, 1, 8)


@pytest.mark.parametrize("arrangement", ["interleaved", "head-major", "packed"])
def test_b076_read_through_interleaved_views(kernels, make_case, arrangement):
    """K and V side by side per block, per head, or on the last axis: bit for bit as contiguous copies."""
    case = make_case([5, 9, 1], poison=0.0)
    N, K, S, D = case.key_cache.shape
    if arrangement == "interleaved":
        both = torch.stack([case.key_cache, case.value_cache], 1)
        views = both[:, 0], both[:, 1]
    elif arrangement == "head-major":
        both = torch.stack([case.key_cache, case.value_cache]).permute(2, 0, 1, 3, 4).contiguous()
        views = both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1)
    else:
        both = torch.cat([case.key_cache, case.value_cache], 3)
        views = both[..., :D], both[..., D:]
    query = case.random(3, 4, D)
    got = ops.paged_attention(query, *views, case.block_tables, case.seq_lens)
    wanted = ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    assert torch.equal(got, wanted)
    strided = torch.zeros(N, K, S, 2 * D)[..., ::2]
    with pytest.raises(ArgumentError, match="contiguous last dimension"):
        ops.paged_attention(query, strided, strided, case.block_tables, case.seq_lens)


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill_ramp(make_ramp, lengths, query_lens):
    ramp = make_ramp(lengths)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(INT32)
    query = torch.randn(int(starts[-1]), 1, 8)
    out = ops.paged_prefill(query, ramp.key_cache, ramp.value_cache, ramp.block_tables, starts, ramp.seq_lens)
    return out[:, 0, 0], starts


@pytest.mark.parametrize(
    ("query_len", "length", "wanted"), [(2, 5, [1.5, 2]), (3, 9, [3, 3.5, 4]), (4, 4, [0, 0.5, 1, 1.5])]
)
def test_b078_mask_is_aligned_at_the_end(kernels, make_ramp, query_len, length, wanted):
    out, _ = prefill_ramp(make_ramp, [length], [query_len])
    assert torch.allclose(out, torch.tensor(wanted, dtype=torch.float32))


def test_b079_mixed_batch(kernels, make_ramp):
    """Decode, fresh prefill, prefill on a prefix, decode of one token, one token on a prefix: in any order."""
    parts = [(9, 1, 4.0), (6, 6, 2.5), (11, 3, 5.0), (1, 1, 0.0), (5, 1, 2.0)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [1, 3, 4, 0, 2]):
        chosen = [parts[index] for index in order]
        out, starts = prefill_ramp(make_ramp, [part[0] for part in chosen], [part[1] for part in chosen])
        assert torch.allclose(out[starts[1:] - 1], torch.tensor([part[2] for part in chosen]))


def bad_metadata():
    """(what is wrong, error, argument, changes to the arguments of a good paged_prefill of lengths 5 and 9)."""
    table = torch.tensor([[0, 1, -1], [2, 3, 4]], dtype=INT32)
    past, negative = table.clone(), table.clone()
    past[1, 2], negative[0, 1] = 5, -1
    return [
        ("length past the table", ArgumentError, "seq_lens", {"seq_lens": ints(5, 13)}),
        ("negative length", ArgumentError, "seq_lens", {"seq_lens": ints(-1, 9), "query_start_loc": ints(0, 0, 2)}),
        ("length past the bound", ArgumentError, "seq_lens", {"max_seq_len": 8}),
        ("block past the pool", SlotError, "block_tables", {"block_tables": past}),
        ("padding within the length", SlotError, "block_tables", {"block_tables": negative}),
        ("falling starts", ArgumentError, "query_start_loc", {"query_start_loc": ints(0, 4, 3)}),
        ("starts not at 0", ArgumentError, "query_start_loc", {"query_start_loc": ints(1, 2, 5)}),
        ("starts past the query", ArgumentError, "query_start_loc", {"query_start_loc": ints(0, 2, 6)}),
        ("more queries than tokens", ArgumentError, "query_start_loc", {"seq_lens": ints(1, 9)}),
        ("query past the bound", ArgumentError, "query_start_loc", {"max_query_len": 2}),
        ("int64 table", ArgumentError, "block_tables", {"block_tables": table.long()}),
        ("int16 table", ArgumentError, "block_tables", {"block_tables": table.short()}),
        ("int64 lengths", ArgumentError, "seq_lens", {"seq_lens": torch.tensor([5, 9])}),
        ("int64 starts", ArgumentError, "query_start_loc", {"query_start_loc": torch.tensor([0, 2, 5])}),
    ]


@pytest.mark.parametrize("case", bad_metadata(), ids=lambda case: case[0])
def test_b080_metadata_is_checked(kernels, case):
    _, error, argument, changes = case
    arguments = {
        "query": torch.randn(5, 2, 8),
        "key_cache": torch.zeros(5, 1, 4, 8),
        "value_cache": torch.zeros(5, 1, 4, 8),
        "block_tables": torch.tensor([[0, 1, -1], [2, 3, 4]], dtype=INT32),
        "query_start_loc": ints(0, 2, 5),
        "seq_lens": ints(5, 9),
    }
    out = torch.full((5, 2, 8), 77.0)
    ops.paged_prefill(**arguments)
    with pytest.raises(error, match=f"`{argument}`"):
        ops.paged_prefill(**{**arguments, **changes}, out=out)
    if kernels.atomic:
        assert (out == 77).all()
    ops.paged_prefill(**arguments)  # the error is forgotten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 12, 13])
def test_b081_chunk_size_does_not_matter(kernels, make_case, dtype, chunk):
    """13 tokens written and attended in chunks: the cache's bytes and every output equal those of one shot."""
    T = 13
    case = make_case([T], dtype=dtype, group=3)
    query, key, value = case.random(T, 6, 8), case.keys[0], case.values[0]
    slots = torch.tensor([int(case.block_tables[0, p // 4]) * 4 + p % 4 for p in range(T)])

    def run(size):
        caches = [torch.full(case.key_cache.shape, NAN, dtype=dtype) for _ in range(2)]
        outs = []
        for start in range(0, T, size):
            stop = min(start + size, T)
            ops.write_kv(key[start:stop], value[start:stop], *caches, slots[start:stop])
            outs.append(
                ops.paged_prefill(query[start:stop], *caches, case.block_tables, ints(0, stop - start), ints(stop))
            )
        return torch.cat(outs), caches

    whole, whole_caches = run(T)
    chunked, caches = run(chunk)
    for cache, wanted in zip(caches, whole_caches, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))
    if kernels.name == "reference":  # its matrix products may round differently for other shapes
        assert (chunked.float() - whole.float()).abs().max() <= (1e-6 if dtype is torch.float32 else 1e-2)
    else:
        assert torch.equal(chunked, whole)
