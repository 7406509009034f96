"""The CUDA kernels' own sources under the emulator: every op under several schedules, and faults it must catch."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError, SlotError
from kvpager.ops.op import OPS

SEEDS = [1, 2, 3, 4]


@pytest.fixture
def emulated(emulated_library):
    return torch.ops.kvpager_emulated


def attend(namespace, case, options, query):
    out, lse = torch.full(query.shape, 77.0, dtype=query.dtype), torch.full(query.shape[:2], 77.0)
    namespace.paged_attention(
        out, lse, query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, max_seq_len=64, **options
    )
    return out, lse


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_under_random_schedules(emulated, make_case, monkeypatch, tolerance, seed, dtype):
    monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
    case = make_case([0, 1, 5, 11, 13], seed=seed, dtype=dtype, group=3, head_dim=40)
    query = case.random(5, case.num_heads, 40)
    sinks = torch.randn(case.num_heads, generator=case.generator)
    slopes = torch.rand(case.num_heads, generator=case.generator)
    options = {"scale": 0.2, "window": 7, "softcap": 3.0, "sinks": sinks, "alibi_slopes": slopes}
    got = attend(emulated, case, options, query)
    wanted = ops.attention.reference.paged_attention(
        query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, max_seq_len=64, **options
    )
    torch.testing.assert_close(got[0].float(), wanted[0], rtol=0, atol=tolerance[dtype])
    torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=1e-5)

    starts = torch.tensor([0, 0, 1, 3, 3, 5], dtype=torch.int32)
    out = torch.empty_like(query)
    inputs = (query, case.key_cache, case.value_cache, case.block_tables, starts, case.seq_lens)
    emulated.paged_prefill(out, None, *inputs, max_query_len=2, max_seq_len=64, **options)
    wanted_prefill = ops.attention.reference.paged_prefill(*inputs, max_query_len=2, max_seq_len=64, **options)
    torch.testing.assert_close(out.float(), wanted_prefill[0], rtol=0, atol=tolerance[dtype])

    merged, lse = torch.empty_like(query), got[1].clone()
    emulated.merge_attention(merged, lse, got[0], lse, out, got[1])
    wanted_merge = ops.attention.reference.merge_attention(got[0], got[1], out, got[1])
    torch.testing.assert_close(merged.float(), wanted_merge[0], rtol=0, atol=tolerance[dtype])
    torch.testing.assert_close(lse, wanted_merge[1], rtol=0, atol=1e-6)

    caches = [case.key_cache.clone(), case.value_cache.clone()]
    wanted_caches = [cache.clone() for cache in caches]
    slots = torch.tensor([3, -1, 0, 17])
    emulated.write_kv(case.keys[3][:4], case.values[3][:4], *caches, slots)
    OPS["write_kv"].reference(case.keys[3][:4], case.values[3][:4], *wanted_caches, slots)
    pairs = torch.tensor([[0, 2], [4, 1]])
    emulated.copy_blocks(caches, pairs)
    OPS["copy_blocks"].reference(wanted_caches, pairs)
    for cache, expected in zip(caches, wanted_caches, strict=True):
        assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("fault", [False, True])
def test_a_missing_barrier_is_caught(emulated, make_case, monkeypatch, fault):
    """Planted fault: the threads run through the barrier between the warps' results and their merge (the second)."""
    monkeypatch.setenv("KVPAGER_EMULATE_SKIP_BARRIER", "2" if fault else "0")
    case = make_case([13], head_dim=40)
    query = case.random(1, case.num_heads, 40)
    wanted, _ = case.oracle(0, query[0], 12, scale=0.2)
    differ = []
    for seed in SEEDS:
        monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
        out, _ = attend(emulated, case, {"scale": 0.2}, query)
        differ.append(not torch.allclose(out[0].double(), wanted, rtol=0, atol=1e-5))
    assert any(differ) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_missing_barrier_before_lse_is_overwritten_is_caught(emulated, monkeypatch, fault):
    """Planted fault: `lse` is `lse_a`, and a thread writes it while others have not read it yet."""
    monkeypatch.setenv("KVPAGER_EMULATE_SKIP_BARRIER", "1" if fault else "0")
    a, b = torch.ones(1, 1, 256), torch.full((1, 1, 256), 3.0)
    differ = []
    for seed in SEEDS:
        monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
        lse, lse_b, out = torch.zeros(1, 1), torch.full((1, 1), math.log(3)), torch.empty(1, 1, 256)
        emulated.merge_attention(out, lse, a, lse, b, lse_b)
        differ.append(not torch.allclose(out, torch.tensor(2.5)))
        assert torch.allclose(lse, torch.tensor(math.log(4)))
    assert any(differ) == fault


@pytest.mark.parametrize("kernels", ["emulated"], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_a_bad_row_is_skipped_and_the_others_are_right(make_case, monkeypatch):
    """CUDA's rule: the bad row's out keeps what it held, one error is kept on the device and raised when asked for."""
    monkeypatch.setattr(ops.device_errors, "CHECKED", False)
    case = make_case([5, 6, 7])
    case.block_tables[1, 1] = len(case.key_cache)
    query = case.random(3, 4, 8)
    out = torch.full_like(query, 77.0)
    ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, out=out, scale=0.3)
    assert (out[1] == 77).all()
    for row in (0, 2):
        wanted, _ = case.oracle(row, query[row], case.lengths[row] - 1, scale=0.3)
        torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=1e-6)
    with pytest.raises(SlotError, match="`block_tables`"):
        ops.check_errors("cpu")
    ops.check_errors("cpu")
    case.seq_lens[0] = 99
    ops.paged_attention(query, case.key_cache, case.value_cache, case.block_tables[:, :2], case.seq_lens, out=out)
    with pytest.raises((ArgumentError, SlotError)):
        ops.check_errors("cpu")
