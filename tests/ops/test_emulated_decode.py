"""Decode attention on tensor cores, its own CUDA source under the emulator: against float64, under random schedules."""

import math
import random

import pytest
import torch

from kvpager import ops
from kvpager.cache_dtypes import CACHE_DTYPES
from kvpager.errors import ArgumentError, SlotError
from kvpager.ops.op import OPS

NAN = math.nan
CODES = {each.name: getattr(torch, each.torch_name) for each in CACHE_DTYPES if each.is_codes}
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
    """(out, lse) of the raw op; with a split plan of `num_parts` and a workspace, which must be left zeroed."""
    out, lse = torch.full(query.shape, 77.0, dtype=query.dtype), torch.full(query.shape[:2], 77.0)
    extra, room = {}, None
    bound = case.block_tables.shape[1] * case.block_size
    if num_parts is not None:
        extra["split_plan"] = ops.make_split_plan(
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
@pytest.mark.parametrize("kind", ["same", *CODES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_equals_float64_attention(emulated, make_case, monkeypatch, seed, kind, dtype, head_dim):
    """Any block size, group, layout, window, cap, sinks, slopes, cut; every unwritten row and scale holds NaN."""
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
        "sinks": sinks, "alibi_slopes": rng.choice((None, torch.rand(case.num_heads, generator=case.generator) - 0.02)),
    }  # fmt: skip
    cut = {"num_parts": rng.choice((None, 1, 2, 7, 40)), "fixed_split": rng.choice((0, 0, 16, 40))}
    cut["workspace"] = cut["num_parts"] is not None and rng.random() < 0.7
    check(case, query, attend(emulated, case, query, caches, scales, **cut, **options), **options)


def cut_case(make_case, lengths, **options):
    """A case for the kernel, bfloat16 of head dim 64, its query, and the options that every call takes."""
    case = make_case(lengths, dtype=torch.bfloat16, head_dim=64, block_size=16, num_kv_heads=1, group=3, **options)
    return case, case.random(len(lengths), 3, 64), (case.key_cache, case.value_cache)


@pytest.mark.parametrize(("window", "slopes"), [(0, False), (50, False), (0, True), (50, True)])
def test_a_fixed_split_knows_neither_batch_nor_cuts(emulated, make_case, monkeypatch, window, slopes):
    """Bit for bit: alone, in a batch, under any split plan and order of blocks."""
    lengths = [130, 5, 0, 97]
    case, query, caches = cut_case(make_case, lengths)
    options = {"scale": 0.2, "window": window, "fixed_split": 32}
    if slopes:
        options["alibi_slopes"] = torch.tensor([0.5, 0.0, -0.01])
    wanted = attend(emulated, case, query, caches, {}, **options)
    check(case, query, wanted, scale=0.2, window=window, alibi_slopes=options.get("alibi_slopes"))
    for seed, num_parts in zip(SEEDS, (1, 4, 40), strict=True):
        monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
        got = attend(emulated, case, query, caches, {}, num_parts=num_parts, workspace=True, **options)
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])
    for row, length in enumerate(lengths):
        alone = torch.empty(1, 3, 64, dtype=torch.bfloat16)
        emulated.paged_attention(
            alone, None, query[row : row + 1], *caches, case.block_tables[row : row + 1],
            torch.tensor([length], dtype=torch.int32), max_seq_len=200, **options,
        )  # fmt: skip
        assert torch.equal(alone[0], wanted[0][row])


@pytest.mark.parametrize("num_parts", [1, 5, 9])
def test_a_split_plan_of_other_lengths_gives_the_same(emulated, make_case, num_parts):
    """What a captured graph meets: lengths move on, the split plan only when it is made anew."""
    case, query, caches = cut_case(make_case, [130, 0, 20, 64])
    moved = torch.tensor([17, 90, 0, 200], dtype=torch.int32)
    split_plan = ops.make_split_plan(moved, block_size=16, num_parts=num_parts)
    out, lse = torch.empty_like(query), torch.empty(4, 3)
    emulated.paged_attention(
        out, lse, query, *caches, case.block_tables, case.seq_lens, scale=0.2, max_seq_len=200, split_plan=split_plan
    )
    check(case, query, (out, lse), scale=0.2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", ["block", "length"])
def test_a_bad_row_is_skipped_whole(emulated, make_case, monkeypatch, seed, fault):
    """Even if only one of its pieces meets the bad value; the workspace is left zeroed for the next call."""
    monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
    case, query, caches = cut_case(make_case, [40, 130, 33])
    if fault == "block":
        case.block_tables[1, 5] = len(case.key_cache)
    else:
        case.seq_lens[1] = 10**6
    got = attend(emulated, case, query, caches, {}, num_parts=6, workspace=True, scale=0.2)
    assert (got[0][1] == 77).all()
    assert (got[1][1] == 77).all()
    check(case, query, got, rows=(0, 2), scale=0.2)
    monkeypatch.setattr(OPS["take_errors"], "call", emulated.take_errors.default)
    error, argument = (SlotError, "block_tables") if fault == "block" else (ArgumentError, "seq_lens")
    with pytest.raises(error, match=f"`{argument}`"):
        ops.check_errors("cpu")
    ops.check_errors("cpu")


@pytest.mark.parametrize("kernels", ["emulated"], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_bad_split_plans_and_workspaces_are_refused(make_case):
    case, query, caches = cut_case(make_case, [40, 9])
    good = ops.make_split_plan(case.seq_lens, block_size=16, num_parts=3)
    out = torch.full_like(query, 77.0)

    def attend(**options):
        ops.paged_attention(query, *caches, case.block_tables, case.seq_lens, out=out, **options)

    for entry, value in {0: 3, 1: 16, 2: 1, 5: -16, 4: 3, 8: 1, 9: 5}.items():
        split_plan = good.clone()
        split_plan[entry] = value
        with pytest.raises(ArgumentError, match="`split_plan`: wanted one that make_split_plan made"):
            attend(split_plan=split_plan)
    for split_plan in (good[:4], good[:-1], good.long()):
        with pytest.raises(ArgumentError, match="`split_plan`"):
            attend(split_plan=split_plan)
    with pytest.raises(ArgumentError, match="`workspace`: wanted at least"):
        attend(split_plan=good, workspace=torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="`workspace`: wanted an address that is a multiple of 16"):
        attend(split_plan=good, workspace=torch.zeros(99999, dtype=torch.uint8)[1:])
    with pytest.raises(ArgumentError, match="`fixed_split`"):
        attend(fixed_split=-1)
    assert (out == 77).all()
    attend(split_plan=good)


def test_which_kernel_takes_a_call(emulated, make_case):
    """The rule of decode.cu. Only the tensor core kernel looks at a split plan's cuts: by a bad one it is known."""

    def taken(*, dtype=torch.bfloat16, head_dim=64, change=lambda query, *caches: (query, *caches)):
        case = make_case([20], dtype=dtype, head_dim=head_dim, block_size=16)
        query, *caches = change(case.random(1, 4, head_dim), case.key_cache, case.value_cache)
        out = torch.empty(query.shape, dtype=dtype)
        bad = torch.tensor([1, 0, 0, 5, 1, 0], dtype=torch.int32)
        emulated.paged_attention(
            out, None, query, *caches, case.block_tables, case.seq_lens, scale=0.2, max_seq_len=20, split_plan=bad
        )
        word = torch.zeros(1, dtype=torch.int64)
        emulated.take_errors(word)
        if int(word) != 0:
            assert ops.device_errors.DEVICE_ERRORS[int(word).bit_length() - 1][0] == "split_plan"
            return True
        wanted, _ = case.oracle(0, query[0], 19, scale=0.2)
        torch.testing.assert_close(out[0].double(), wanted, rtol=0, atol=1.6e-2)
        return False

    def moved(tensor, elements):
        """The same numbers, that many elements past the beginning of their memory."""
        room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
        return room.view_as(tensor).copy_(tensor)

    assert [taken(head_dim=head_dim) for head_dim in (32, 64, 72, 80, 96, 128, 192, 256)] == [
        False, True, False, False, True, True, False, True,
    ]  # fmt: skip
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [taken(dtype=dtype) for dtype in dtypes] == [True, True, False, False]
    assert taken(change=lambda query, key, value: (query, moved(key, 8), moved(value, 8)))
    assert not taken(change=lambda query, key, value: (query, moved(key, 4), value))
    assert not taken(change=lambda query, key, value: (query, key, moved(value, 1)))
    assert taken(change=lambda query, key, value: (moved(query, 2), key, value))
    assert not taken(change=lambda query, key, value: (moved(query, 1), key, value))


@pytest.mark.parametrize("barrier", [0, 3, 5])
def test_a_missing_barrier_is_caught(emulated, make_case, monkeypatch, barrier):
    """Planted faults: no wait for the warps' sums, or for the count of the tokens that have arrived; 0 plants none."""
    monkeypatch.setenv("KVPAGER_EMULATE_SKIP_BARRIER", str(barrier))
    case, query, caches = cut_case(make_case, [300])
    wanted, _ = case.oracle(0, query[0], 299, scale=0.2)
    differ = []
    for seed in range(1, 9):
        monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
        out, _ = attend(emulated, case, query, caches, {}, num_parts=3, scale=0.2)
        differ.append(not torch.allclose(out[0].double(), wanted, rtol=0, atol=TOLERANCE[query.dtype]))
    assert any(differ) == (barrier > 0)
