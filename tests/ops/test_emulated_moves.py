"""Writes, copies and table changes of the CUDA sources, under the emulator: bits against the specification."""

import math
import random

import pytest
import torch

from kvpager import PagedKVCache, ops
from kvpager.errors import SlotError
from kvpager.ops.op import OPS
from kvpager.ops.tensors import QUANTISED_DTYPES as CODES

pytestmark = [
    pytest.mark.parametrize("kernels", ["emulated"], indirect=True),
    pytest.mark.usefixtures("kernels", "schedule"),
]
NAN, INF = math.nan, math.inf


@pytest.fixture(params=[1, 2, 3])
def schedule(request, monkeypatch):
    """A random order of threads, blocks and copies."""
    monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(request.param))
    return request.param


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def pool(rng, dtype, *shape, one_scale=None):
    """A poisoned quantised layer of 5 blocks, `shape` K, S, D: HND caches and their scales, as the ops take them."""
    cache = PagedKVCache(1, 5, *shape, dtype=dtype, block_major=rng.choice((False, True)))
    cache.storage.random_(0, 256, generator=torch.Generator().manual_seed(0))
    scales = [cache.key_scale[0], cache.value_scale[0]]
    if one_scale is not None:
        scales = [torch.tensor([one_scale]) for _ in range(2)]
    return cache, [cache.key_cache[0], cache.value_cache[0]], scales


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("number", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128, 256])
def test_b065_b085_b086_codes_are_those_of_the_specification(schedule, dtype, number, head_dim):
    """Rows of all sizes, zeros, NaN and inf; -1 is skipped; nothing beside the slots is touched."""
    rng, generator = random.Random(head_dim + schedule), torch.Generator().manual_seed(head_dim + schedule)
    D, K, S, T = head_dim, rng.choice((1, 3)), 4, 7
    one = rng.choice((None, None, 0.05))
    cache, caches, scales = pool(rng, dtype, K, S, D, one_scale=one)
    rows = (torch.randn(2, T + 2, K, D, generator=generator) * 10 ** rng.uniform(-3, 3)).clamp(-6e4, 6e4).to(number)
    rows[0, 1], rows[1, 2, 0, 3], rows[0, 3, 0, -1], rows[1, 4, -1, 0] = 0, NAN, INF, -INF
    slots = torch.randperm(5 * S, generator=generator)[:T]
    slots[rng.randrange(T)] = -1
    before = cache.storage.clone()
    ops.write_kv(*rows, *caches, slots, key_scale=scales[0], value_scale=scales[1])
    got = cache.storage.clone()
    cache.storage.copy_(before)
    OPS["write_kv"].reference(*rows, *caches, slots, key_scale=scales[0], value_scale=scales[1])
    if dtype.is_floating_point and one:  # a NaN may lose its sign
        got[(got == 0xFF) & (cache.storage == 0x7F)] = 0x7F
    assert torch.equal(got, cache.storage)


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [None, *CODES])
@pytest.mark.parametrize("head_dim", [18, 64, 80, 256])
def test_fused_equals_one_step_after_the_other(schedule, tolerance, number, dtype, head_dim):
    rng, generator = random.Random(head_dim + schedule), torch.Generator().manual_seed(head_dim + schedule)
    D, K, group, S, T = head_dim, rng.choice((1, 2, 3)), rng.choice((1, 2, 5)), 4, 5
    H = K * group
    if dtype is None:
        caches, scales = [torch.full((5, K, S, D), 7.0, dtype=number) for _ in range(2)], [None, None]
    else:
        _, caches, scales = pool(rng, dtype, K, S, D, one_scale=rng.choice((None, 0.05)))
    qkv = torch.randn(T, (H + 2 * K) * D, generator=generator).to(number)
    weights = [rng.choice((None, torch.rand(D, generator=generator).to(number) + 0.5)) for _ in range(2)]
    angles = torch.rand(9, D // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 9, (T,), generator=generator)
    slots = torch.tensor([3, -1, 17, 0, 9])
    inputs = (qkv, *weights, cos_sin, positions)
    wanted_caches = [cache.clone() for cache in caches]
    wanted_scales = [scale.clone() if scale is not None else None for scale in scales]
    wanted = torch.empty(T, H, D, dtype=number)
    OPS["qk_norm_rope_write"].reference(
        wanted, *inputs, *wanted_caches, slots, eps=1e-6, key_scale=wanted_scales[0], value_scale=wanted_scales[1]
    )
    query = ops.qk_norm_rope_write(*inputs, *caches, slots, eps=1e-6, key_scale=scales[0], value_scale=scales[1])
    torch.testing.assert_close(query, wanted, rtol=tolerance[number], atol=2 * tolerance[number])
    assert torch.equal(bits(caches[1]), bits(wanted_caches[1]))  # values: bit for bit
    if dtype is None:
        torch.testing.assert_close(caches[0], wanted_caches[0], rtol=tolerance[number], atol=2 * tolerance[number])
        return
    torch.testing.assert_close(scales[0], wanted_scales[0], rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(scales[1].view(torch.int32), wanted_scales[1].view(torch.int32))
    steps = (caches[0].view(torch.int8).short() - wanted_caches[0].view(torch.int8).short()).abs()
    assert steps.max() <= 1  # a code at a tie may go either way
    assert (steps > 0).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_blocks_are_copied_at_any_alignment(schedule, dtype):
    """Sizes and strides that leave units of 1 to 16 bytes; gaps stay as they are."""
    rng, generator = random.Random(schedule), torch.Generator().manual_seed(schedule)
    for _ in range(4):
        shape = [6, *(rng.choice((1, 2, 3, 8)) for _ in range(rng.choice((1, 2, 3)))), rng.choice((1, 5, 16, 36))]
        order = [0, *rng.sample(range(1, len(shape)), len(shape) - 1)]
        memory = torch.randint(0, 255, [shape[axis] for axis in order], generator=generator).to(dtype)
        cache = memory.permute(*(order.index(axis) for axis in range(len(shape))))[..., : rng.choice((shape[-1], 3))]
        wanted = memory.clone()
        wanted_cache = wanted.as_strided(cache.shape, cache.stride())
        OPS["copy_blocks"].reference([wanted_cache], torch.tensor([[0, 5], [3, 1], [0, 4]]))
        ops.copy_blocks([cache], torch.tensor([[0, 5], [3, 1], [0, 4]]))
        assert torch.equal(bits(memory), bits(wanted))


@pytest.mark.parametrize("on_device", [False, True], ids=["pairs on the host", "pairs on the device"])
@pytest.mark.parametrize("dtype", ["int8", torch.bfloat16])
def test_b087_swapped_blocks_take_their_scales_along(schedule, monkeypatch, dtype, on_device):
    """By the copy engines' plan and by the kernel, between arrangements: codes and scales of all layers."""
    if on_device:
        monkeypatch.setenv("KVPAGER_EMULATE_ON_DEVICE", "1")
    device, host = (
        PagedKVCache(2, N, 2, 4, 12, dtype=dtype, block_major=(schedule + N) % 2 == 0, layout="NHD") for N in (6, 4)
    )
    for cache in (device, host):
        cache.storage.copy_(torch.arange(cache.storage.numel()).reshape(cache.storage.shape) % 251)
    wanted = [view.clone() for view in (*host.key_cache, *host.value_cache, *host.key_scale, *host.value_scale)]
    sources = (*device.key_cache, *device.value_cache, *device.key_scale, *device.value_scale)
    for view, source in zip(wanted, sources, strict=True):
        view[[1, 2, 0]] = source[[3, 4, 1]]
    device.swap_blocks(host, torch.tensor([[3, 1], [4, 2], [1, 0]]))
    views = (*host.key_cache, *host.value_cache, *host.key_scale, *host.value_scale)
    assert all(torch.equal(bits(view), bits(expected)) for view, expected in zip(views, wanted, strict=True))
    with pytest.raises(SlotError, match="others on the device" if on_device else "blocks of 0 to 3, got 4 at row 0"):
        device.swap_blocks(host, torch.tensor([[3, 4]]))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
def test_gather_widens_codes(schedule, dtype, number):
    rng, generator = random.Random(schedule), torch.Generator().manual_seed(schedule)
    _, caches, scales = pool(rng, dtype, 2, 4, 20, one_scale=rng.choice((None, 0.05)))
    rows = torch.randn(2, 20, 2, 20, generator=generator)
    named = {"key_scale": scales[0], "value_scale": scales[1]}
    ops.write_kv(*rows, *caches, torch.arange(20), **named)
    table, lengths = torch.tensor([[3, 0, 1], [2, 4, 9]], dtype=torch.int32), torch.tensor([9, 8], dtype=torch.int32)
    key, value = ops.gather_kv(*caches, table, lengths, dtype=number, **named)
    wanted = [torch.empty_like(key) for _ in range(2)]
    OPS["gather_kv"].reference(*wanted, *caches, table, lengths, torch.tensor([0, 9, 17]), **named)
    assert torch.equal(key, wanted[0])
    assert torch.equal(value, wanted[1])
