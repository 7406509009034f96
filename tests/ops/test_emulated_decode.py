"""Decode attention on tensor cores, its own CUDA source under the emulator: against float64, under random schedules."""

import math
import random

import pytest
import torch

from kvpager import ops

NAN = math.nan
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SEEDS = [1, 2, 3]
# Weights are rounded to the type of the products: bfloat16, or float16 beside codes.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture
def emulated(emulated_library):
    return torch.ops.kvpager_emulated


def quantised(case, codes, *, one_scale=None):
    """The case's caches as codes with scales [N, K, S], NaN and nonsense where nothing is written; its K/V as read."""
    caches, scales = [], {}
    for name, rows, cache in (("key", case.keys, case.key_cache), ("value", case.values, case.value_cache)):
        written = ~cache.isnan().any(-1)
        numbers = cache.float().nan_to_num(0.0)
        made, made_scales = ops.quantise(numbers, codes, None if one_scale is None else torch.tensor([one_scale]))
        noise = torch.randint(-127, 128, made.shape, generator=case.generator).to(torch.int8)
        caches.append(torch.where(written.unsqueeze(-1), made.view(torch.int8), noise).view(codes))
        back = ops.dequantise(made, made_scales)
        by_position = back if case.layout == "NHD" else back.transpose(1, 2)  # [N, S, K, D]
        scales[f"{name}_scale"] = (
            torch.tensor([one_scale]) if one_scale is not None else torch.where(written, made_scales, NAN)
        )
        for row, length in enumerate(case.lengths):
            positions = torch.arange(length)
            blocks = case.block_tables[row].long()[positions // case.block_size]
            rows[row] = by_position[blocks, positions % case.block_size]
    return caches, scales


def as_hnd(tensor, layout):
    return tensor.transpose(1, 2) if layout == "NHD" else tensor


def attend(namespace, case, query, caches, scales, *, num_parts=None, workspace=False, fixed_split=0, **options):
    """(out, lse) of the raw op; with a schedule of `num_parts` and a workspace, which must be left zeroed."""
    out, lse = torch.full(query.shape, 77.0, dtype=query.dtype), torch.full(query.shape[:2], 77.0)
    extra, room = {}, None
    bound = case.block_tables.shape[1] * case.block_size
    if num_parts is not None:
        extra["schedule"] = ops.make_schedule(
            case.seq_lens,
            block_size=case.block_size,
            window=options.get("window", 0),
            fixed_split=fixed_split,
            num_parts=num_parts,
        )
    if workspace:
        B, H, D = query.shape
        size = ops.workspace_bytes(B, H, D, max_seq_len=bound, fixed_split=fixed_split, num_parts=num_parts)
        room = extra["workspace"] = torch.zeros(size, dtype=torch.uint8)
    caches = [as_hnd(cache, case.layout) for cache in caches]
    scales = {name: as_hnd(scale, case.layout) if scale.dim() == 3 else scale for name, scale in scales.items()}
    namespace.paged_attention(
        out, lse, query, *caches, case.block_tables, case.seq_lens, max_seq_len=bound, fixed_split=fixed_split,
        **extra, **scales, **options,
    )  # fmt: skip
    assert room is None or (room == 0).all()
    return out, lse


def check(case, query, got, *, rows=None, **options):
    out, lse = got
    for row in range(len(case.lengths)) if rows is None else rows:
        length = case.lengths[row]
        if length == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -math.inf).all()
            continue
        wanted, wanted_lse = case.oracle(row, query[row], length - 1, **options)
        torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=TOLERANCE[query.dtype])
        torch.testing.assert_close(lse[row].double(), wanted_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", ["same", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_equals_float64_attention(emulated, make_case, monkeypatch, seed, kind, dtype, head_dim):
    """Any block size, group, layout, window, cap, sinks, cut; every unwritten row and scale holds NaN."""
    monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
    rng = random.Random(f"{seed} {kind} {dtype} {head_dim}")
    lengths = [rng.choice((0, 1, 15, 16, 17, 31, 70, 130)) for _ in range(rng.choice((1, 3, 5)))]
    case = make_case(
        lengths, seed=seed, dtype=dtype, head_dim=head_dim, layout=rng.choice(("HND", "NHD")),
        num_kv_heads=rng.choice((1, 2)), group=rng.choice((1, 2, 4, 5, 7, 8, 11)),
        block_size=rng.choice((1, 3, 8, 16, 24, 32)), interleaved=rng.random() < 0.3,
    )  # fmt: skip
    caches, scales = [case.key_cache, case.value_cache], {}
    if kind != "same":
        caches, scales = quantised(case, CODES[kind], one_scale=rng.choice((None, None, 0.04)))
    query = case.random(len(lengths), case.num_heads, head_dim)
    sinks = rng.choice((None, torch.randn(case.num_heads, generator=case.generator)))
    options = {
        "scale": head_dim**-0.5, "window": rng.choice((0, 1, 20, 65)), "softcap": rng.choice((0.0, 3.0)),
        "sinks": sinks,
    }  # fmt: skip
    cut = {"num_parts": rng.choice((None, 1, 2, 7, 40)), "fixed_split": rng.choice((0, 0, 16, 40))}
    cut["workspace"] = cut["num_parts"] is not None and rng.random() < 0.7
    check(case, query, attend(emulated, case, query, caches, scales, **cut, **options), **options)
