"""The cases of tests/cases.md on the tensor core kernel: bfloat16, float16 and codes of head dim 64, emulated."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.ops.tensors import QUANTISED_DTYPES as CODES

NAN = math.nan
pytestmark = [
    pytest.mark.parametrize("kernels", ["emulated"], indirect=True),
    pytest.mark.usefixtures("kernels"),
]
both = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@both
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("poison", [NAN, math.inf, 3e4])
def test_b066_poisoned_cache(make_case, dtype, block_size, poison):
    lengths = [1, 3, 4, 5, 8, 9, 16, 17]
    case = make_case(lengths, dtype=dtype, block_size=block_size, poison=poison, num_kv_heads=1, head_dim=64)
    for row, length in enumerate(lengths):
        width = -(-length // block_size)
        case.block_tables[row, width:] = len(case.key_cache) - 1
        for position in range(length):
            case.value_cache[case.block_tables[row, position // block_size], :, position % block_size] = 1
    query = case.random(len(lengths), 2, 64)
    out = ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    assert (out.float() - 1).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", CODES)
def test_b066_poisoned_codes_and_scales(make_case, dtype):
    """NaN scales beside whatever codes in all that is not written."""
    cache = torch.full((4, 1, 16, 64), 0x7F, dtype=torch.int8).view(dtype)
    scale = torch.full((4, 1, 16), NAN)
    for slot in range(5):
        cache.view(torch.int8)[2, 0, slot], scale[2, 0, slot] = torch.ones(64).to(dtype).view(torch.int8), 1
    out = ops.paged_attention(
        torch.ones(1, 2, 64).half(), cache, cache, ints(2).reshape(1, 1), ints(5), key_scale=scale, value_scale=scale
    )
    assert (out - 1).abs().max() <= 1e-3


def test_b067_offsets_pass_2_to_the_32(tmp_path):
    """Blocks 2^30 bytes apart in a sparse file, few pages of it touched: block 4 begins past 2^32 bytes."""
    N, S, D, stride = 6, 4, 64, 2**29 + 64
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(2 * stride * N)
    flat = torch.from_file(str(sparse), shared=True, size=stride * N, dtype=torch.float16)
    key_cache = flat.as_strided((N, 1, S, D), (stride, S * D, D, 1))
    value_cache = flat.as_strided((N, 1, S, D), (stride, S * D, D, 1), storage_offset=S * D)
    table = ints(4, 1, 5).reshape(1, 3)
    for position in range(9):
        value_cache[table[0, position // S], 0, position % S] = position
    query = torch.ones(1, 1, D, dtype=torch.float16)
    assert (ops.paged_attention(query, key_cache, value_cache, table, ints(9)) == 4).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (14, 2), (15, 3), (10, 2), (12, 4), (8, 8), (18, 2), (71, 1)]
)
def test_b068_head_ratios(num_heads, num_kv_heads):
    H, K = num_heads, num_kv_heads
    value_cache = torch.arange(1.0, K + 1).half().reshape(1, K, 1, 1).expand(1, K, 4, 64).contiguous()
    out = ops.paged_attention(
        torch.randn(1, H, 64).half(), torch.zeros_like(value_cache), value_cache, ints(0).reshape(1, 1), ints(4)
    )
    wanted = torch.tensor([head // (H // K) + 1.0 for head in range(H)])
    assert torch.equal(out[0].float(), wanted.unsqueeze(1).expand(H, 64))


@both
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_b069_head_sizes(make_case, tolerance, dtype, head_dim):
    """Every dim comes out where it went in, and the scale is 1/√D of the true D."""
    case = make_case([5], head_dim=head_dim, num_kv_heads=1, group=2, dtype=dtype)
    query = case.random(1, 2, head_dim)
    inputs = (case.block_tables, case.seq_lens)
    out = ops.paged_attention(query, case.key_cache, case.value_cache, *inputs)
    wanted, _ = case.oracle(0, query[0], 4, scale=head_dim**-0.5)
    assert (out[0].double() - wanted).abs().max() < tolerance[dtype]
    ramp = (torch.arange(head_dim) % 64).to(dtype).expand(case.value_cache.shape).contiguous()
    out = ops.paged_attention(query, case.key_cache, ramp, *inputs)
    torch.testing.assert_close(out, ramp[0, 0, 0].expand(1, 2, head_dim), rtol=1e-2, atol=0)


def test_b070_sequences_shorter_than_a_block():
    key, value = torch.randn(1, 1, 64).half(), torch.randn(1, 1, 64).half()
    caches = [torch.full((3, 1, 4, 64), NAN, dtype=torch.float16) for _ in range(2)]
    ops.write_kv(key.expand(3, 1, 64), value.expand(3, 1, 64), *caches, torch.tensor([0, 4, 8]))
    out = ops.paged_attention(
        torch.randn(1, 1, 64).half().expand(3, 1, 64), *caches, ints(0, 1, 2).reshape(3, 1), ints(1, 1, 1)
    )
    assert torch.equal(out, value.expand(3, 1, 64))


def test_b071_query_is_a_view(make_case):
    """A query cut from a fused projection, bit for bit as its contiguous copy; guard rows around out untouched."""
    case = make_case([3, 9, 4], group=3, head_dim=64, dtype=torch.bfloat16)
    H, K, D = 6, 2, 64
    qkv = case.random(3, (H + 2 * K) * D)
    query = qkv[:, : H * D].unflatten(1, (H, D))
    guarded = torch.full((5, H + 1, D), 77.0, dtype=torch.bfloat16)
    inputs = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    ops.paged_attention(query, *inputs, out=guarded[1:4, :H])
    assert torch.equal(guarded[1:4, :H], ops.paged_attention(query.contiguous(), *inputs))
    assert (guarded[[0, 4]] == 77).all()
    assert (guarded[:, H] == 77).all()


@pytest.mark.parametrize("num_parts", [None, 1, 2, 7])
def test_b074_empty_rows_in_a_batch(make_case, num_parts):
    """Zeros and −inf over whatever was there, under any cut; also where nothing but empty rows is left."""
    case = make_case([0, 3, 0, 40, 0], head_dim=64, dtype=torch.bfloat16)
    caches, tables = (case.key_cache, case.value_cache), case.block_tables
    for lengths in (case.seq_lens, torch.zeros_like(case.seq_lens)):
        out, lse = torch.full((5, 4, 64), NAN, dtype=torch.bfloat16), torch.full((5, 4), NAN)
        split_plan = None if num_parts is None else ops.make_split_plan(lengths, block_size=4, num_parts=num_parts)
        ops.paged_attention(torch.zeros_like(out), *caches, tables, lengths, out=out, lse=lse, split_plan=split_plan)
        empty = lengths == 0
        assert (out[empty] == 0).all()
        assert (lse[empty] == -math.inf).all()
        assert out.isfinite().all()
        assert lse[~empty].isfinite().all()
    assert ops.paged_attention(out[:0], *caches, tables[:0], lengths[:0]).shape == (0, 4, 64)


@pytest.mark.parametrize("arrangement", ["interleaved", "head-major", "packed"])
def test_b076_read_through_interleaved_views(make_case, arrangement):
    case = make_case([5, 9, 1], poison=0.0, head_dim=64, dtype=torch.float16)
    D = 64
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
    assert torch.equal(
        got, ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    )


@both
def test_b084_scales_take_effect(dtype):
    """Dim 0 of K: codes 0 and 4 under .25, of V: 0 and 2 under .5: e / (1 + e) of the second value, 1."""
    key, value = (torch.zeros(1, 1, 2, 64, dtype=torch.int8) for _ in range(2))
    key[0, 0, 1, 0], value[0, 0, 1, 0] = 4, 2
    for scales in (
        {"key_scale": torch.tensor([0.25]), "value_scale": torch.tensor(0.5)},
        {"key_scale": torch.full((1, 1, 2), 0.25), "value_scale": torch.full((1, 1, 2), 0.5)},
    ):
        out = ops.paged_attention(
            torch.ones(1, 1, 64, dtype=dtype), key, value, ints(0).reshape(1, 1), ints(2), scale=1.0, **scales
        )
        assert abs(float(out[0, 0, 0]) - 0.731059) < (1e-3 if dtype is torch.float16 else 4e-3)


@pytest.mark.parametrize("dtype", CODES)
def test_b085_rows_of_zeros_and_of_almost_nothing(dtype):
    """Value scales from 1e-38 to 1e3 in one sequence: the large are exact, the small are not NaN."""
    rows = torch.zeros(40, 1, 64)
    rows[1, 0, 3], rows[2], rows[3], rows[4:] = 5.0, 1e-30, 1e-44, torch.randn(36, 1, 64) * 1e-3
    rows[20] = 2000.0
    codes, scales = ops.quantise(rows, dtype)
    cache, scale = codes.reshape(1, 1, 40, 64), scales.reshape(1, 1, 40)
    keys, ones = torch.zeros_like(cache), torch.ones(1, 1, 40)
    query, table = torch.zeros(1, 1, 64).half(), ints(0).reshape(1, 1)
    for length in (3, 4, 19, 40):
        out = ops.paged_attention(query, keys, cache, table, ints(length), key_scale=ones, value_scale=scale)
        wanted = (codes.float() * scales.unsqueeze(-1))[:length].mean(0)
        torch.testing.assert_close(out[0].float(), wanted, rtol=2e-3, atol=1e-6)


@both
@pytest.mark.parametrize("codes_dtype", CODES)
def test_every_code_is_read_as_torch_reads_it(dtype, codes_dtype):
    """b086: four tokens of 64 codes, as V and, picked by one-hot queries, as K; NaN codes stay NaN."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.int8)
    if codes_dtype is torch.int8:
        codes[codes == -128] = 5
    cache, zeros = codes.reshape(4, 1, 1, 64).view(codes_dtype), torch.zeros(4, 1, 1, 64, dtype=torch.int8)
    scale = torch.full((4, 1, 1), 0.5)
    options = {"key_scale": scale, "value_scale": scale, "scale": 1.0}
    inputs = torch.arange(4).int().reshape(4, 1), torch.ones(4).int()
    numbers = 0.5 * cache[:, 0, 0].float()
    query = torch.eye(64, dtype=dtype).expand(4, 64, 64)
    out, _ = ops.paged_attention_lse(query, zeros.view(codes_dtype), cache, *inputs, **options)
    torch.testing.assert_close(out[:, 0], numbers.to(dtype), rtol=0, atol=0, equal_nan=True)
    if codes_dtype.is_floating_point:  # one NaN or inf among the dims makes every product NaN
        cache = torch.where(~numbers.isfinite(), zeros[:, 0, 0], cache[:, 0, 0].view(torch.int8)).view(codes_dtype)
        cache, numbers = cache.reshape(4, 1, 1, 64), numbers.nan_to_num(0.0, 0.0, 0.0)
    _, lse = ops.paged_attention_lse(query, cache, zeros.view(codes_dtype), *inputs, **options)
    torch.testing.assert_close(lse, numbers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_query_beyond_float16_is_scaled(size):
    """bfloat16 queries meet codes as float16: by a power of two that the scores get back."""
    query = (torch.randn(1, 2, 64) * size).bfloat16()
    key = torch.randint(-127, 128, (1, 1, 4, 64)).to(torch.int8)
    value = torch.randint(-127, 128, (1, 1, 4, 64)).to(torch.int8)
    scales = {"key_scale": torch.tensor([0.01 / size]), "value_scale": torch.tensor([0.01])}
    out = ops.paged_attention(query, key, value, ints(0).reshape(1, 1), ints(4), **scales)
    weights = torch.softmax(query[0].double() @ (key[0, 0].double() * 0.01 / size).T / 8, 1)
    torch.testing.assert_close(out[0].double(), weights @ (value[0, 0].double() * 0.01), rtol=0, atol=1.6e-2)
