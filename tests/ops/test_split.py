"""Sequences cut over threads: split plans, fixed splits, workspaces, and the moves between caches."""

import math
from pathlib import Path

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError, SlotError

ROOT = Path(__file__).resolve().parents[2]
kernels_on_cpu = pytest.mark.parametrize("kernels", ["native", "reference"], indirect=True)
all_kernels = pytest.mark.parametrize("kernels", ["native", "reference", "emulated"], indirect=True)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def threads():
    """`threads(n)`: lets torch use n threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LENGTHS = [1, 0, 700, 65, 300, 64, 2]


def arguments_of(case):
    query = case.random(len(case.lengths), case.num_heads, case.head_dim)
    return query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens


def check(case, query, out, lse, tolerance, **options):
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -math.inf).all()
            continue
        wanted, wanted_lse = case.oracle(row, query[row], length - 1, scale=0.2, **options)
        torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=tolerance[case.dtype])
        torch.testing.assert_close(lse[row].double(), wanted_lse, rtol=0, atol=1e-5)


@kernels_on_cpu
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 200])
@pytest.mark.parametrize(("window", "slopes"), [(0, False), (100, False), (0, True), (100, True)])
@pytest.mark.parametrize("fixed_split", [0, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_plan_gives_the_same_numbers(
    kernels, make_case, tolerance, threads, num_parts, window, slopes, fixed_split, dtype
):
    threads(2)
    case = make_case(LENGTHS, block_size=8, head_dim=16, group=3, dtype=dtype)
    query, *rest = arguments_of(case)
    sinks = torch.randn(case.num_heads, generator=case.generator)
    split_plan = ops.make_split_plan(
        case.seq_lens, block_size=8, window=window, fixed_split=fixed_split, num_parts=num_parts
    )
    size = ops.workspace_bytes(7, case.num_heads, 16, max_seq_len=700, fixed_split=fixed_split, num_parts=num_parts)
    workspace = torch.zeros(size, dtype=torch.uint8)
    slopes = torch.rand(case.num_heads, generator=case.generator) if slopes else None
    options = {"scale": 0.2, "window": window, "sinks": sinks, "alibi_slopes": slopes, "fixed_split": fixed_split}
    out, lse = ops.paged_attention_lse(query, *rest, **options, split_plan=split_plan, workspace=workspace)
    assert (workspace == 0).all()
    check(case, query, out, lse, tolerance, window=window, sinks=sinks, alibi_slopes=slopes)
    again = ops.paged_attention_lse(query, *rest, **options, split_plan=split_plan)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def test_the_kernel_cuts_as_the_split_plan_does(make_case, threads, tolerance):
    """Big enough for the kernel to cut by itself: same cuts, same bits; and right ones."""
    threads(2)
    case = make_case([1500, 3, 0, 700], num_kv_heads=4, block_size=16, head_dim=64, group=2)
    query, *rest = arguments_of(case)
    bytes_of_kv = 2 * sum(case.lengths) * 4 * 64 * 4
    num_parts = min(8, bytes_of_kv // (256 * 1024))
    assert num_parts > 2
    split_plan = ops.make_split_plan(case.seq_lens, block_size=16, num_parts=num_parts)
    own, lse = ops.paged_attention_lse(query, *rest, scale=0.2)
    assert torch.equal(own, ops.paged_attention(query, *rest, scale=0.2, split_plan=split_plan))
    check(case, query, own, lse, tolerance)


@kernels_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "slopes"), [(0, None), (300, None), (300, torch.tensor([0.5, 0.0, 0.1, -0.01]))])
def test_a_fixed_split_knows_neither_batch_nor_threads(kernels, make_case, threads, dtype, window, slopes):
    """Bit for bit: alone, in a batch, on one thread or two, under any split plan."""
    case = make_case([900, 5, 333, 0, 512], num_kv_heads=2, block_size=16, head_dim=64, group=2, dtype=dtype)
    query, key_cache, value_cache, tables, lengths = arguments_of(case)
    options = {"fixed_split": 128, "window": window, "alibi_slopes": slopes}
    threads(1)
    wanted = ops.paged_attention_lse(query, key_cache, value_cache, tables, lengths, **options)
    for count in (1, 2, 3):
        threads(count)
        for num_parts in (None, 1, 5, 40):
            split_plan = None
            if num_parts is not None:
                split_plan = ops.make_split_plan(
                    lengths, block_size=16, window=window, fixed_split=128, num_parts=num_parts
                )
            got = ops.paged_attention_lse(
                query, key_cache, value_cache, tables, lengths, **options, split_plan=split_plan
            )
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[1], wanted[1])
        for row in range(5):
            one = slice(row, row + 1)
            got = ops.paged_attention_lse(query[one], key_cache, value_cache, tables[one], lengths[one], **options)
            assert torch.equal(got[0], wanted[0][one])
            assert torch.equal(got[1], wanted[1][one])


def test_parts_of_a_split_plan_are_even():
    lengths = ints(7, 1000, 0, 30, 2963)
    split_plan = ops.make_split_plan(lengths, block_size=8, num_parts=4)
    assert split_plan.tolist() == [5, 0, 0, 0, 1, 992, 4, 960, 4, 1960, 5, 0]
    window = ops.make_split_plan(lengths, block_size=8, num_parts=2, window=100)
    assert window.tolist() == [5, 0, 0, 0, 3, 8, 5, 0]
    few = ops.make_split_plan(lengths, block_size=8, num_parts=4, min_part_tokens=int(lengths.sum()) // 2)
    two = ops.make_split_plan(lengths, block_size=8, num_parts=2)
    assert few.tolist() == [*two.tolist(), *[len(lengths), 0] * 2]
    assert ops.make_split_plan(ints(), block_size=8, num_parts=3).tolist() == [0] * 10
    out = torch.empty(12, dtype=torch.int32)
    assert ops.make_split_plan(lengths, block_size=8, num_parts=4, out=out) is out
    for wrong in ({"block_size": 0}, {"block_size": 8, "window": -1}, {"block_size": 8, "num_parts": 0}):
        with pytest.raises(ArgumentError, match="wanted at least"):
            ops.make_split_plan(lengths, **wrong)
    with pytest.raises(ArgumentError, match="`out`"):
        ops.make_split_plan(lengths, block_size=8, num_parts=4, out=out[:4])
    with pytest.raises(ArgumentError, match="`seq_lens`"):
        ops.make_split_plan(lengths.long(), block_size=8)


@kernels_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_split_plans_and_workspaces_are_refused(kernels, make_case, dtype):
    case = make_case([40, 9], block_size=8, dtype=dtype)
    query, *rest = arguments_of(case)
    good = ops.make_split_plan(case.seq_lens, block_size=8, num_parts=3)
    out = torch.full_like(query, 77.0)

    def attend(**options):
        ops.paged_attention(query, *rest, out=out, **options)

    bad = {
        "3 sequences": (0, 3), "splits of 16": (1, 16), "row 1, position 0": (2, 1), "row 0, position 48": (5, 48),
        "row 3, position": (4, 3), "row 0, position -8": (7, -8), "row 2, position 5": (9, 5),
    }  # fmt: skip
    for got, (entry, value) in bad.items():
        split_plan = good.clone()
        split_plan[entry] = value
        with pytest.raises(ArgumentError, match=rf"`split_plan`: wanted one that make_split_plan made .* got .*{got}"):
            attend(split_plan=split_plan)
    for split_plan in (good[:4], good[:-1]):
        with pytest.raises(ArgumentError, match=r"`split_plan`: .* entries"):
            attend(split_plan=split_plan)
    with pytest.raises(ArgumentError, match=r"`split_plan`: wanted \[any\] int32"):
        attend(split_plan=good.long())
    with pytest.raises(ArgumentError, match="`fixed_split`: wanted 0"):
        attend(fixed_split=-1)
    with pytest.raises(ArgumentError, match=r"`workspace`: wanted \[any\] uint8"):
        attend(workspace=torch.zeros(100))
    assert (out == 77).all()
    if kernels.name == "native" and dtype is torch.float32:
        with pytest.raises(ArgumentError, match="`workspace`: wanted at least"):
            attend(split_plan=good, workspace=torch.zeros(16, dtype=torch.uint8))
        assert (out == 77).all()


# --- moves between caches ---------------------------------------------------------------------------------------------


@all_kernels
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_swap_blocks_equals_indexing(kernels, dtype):
    """Contiguous and strided, both ways; gaps of a strided target stay as they are."""
    generator = torch.Generator().manual_seed(1)

    def fresh(*shape):
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    sources = [fresh(5, 2, 4, 8), fresh(5, 4, 3, 6).transpose(1, 2), fresh(5, 4, 6)[:, ::2, 1:3]]
    bases = [fresh(7, 2, 4, 8), fresh(7, 3, 4, 12), fresh(7, 2, 4)]
    views = [bases[0], bases[1][..., ::2], bases[2].transpose(1, 2)[:, :2, :].transpose(1, 2)]
    wanted = [base.clone() for base in bases]
    wanted_views = [wanted[0], wanted[1][..., ::2], wanted[2].transpose(1, 2)[:, :2, :].transpose(1, 2)]
    pairs = [(4, 6), (0, 1), (4, 0)]
    for source, view in zip(sources, wanted_views, strict=True):
        for block, target in pairs:
            view[target] = source[block]
    ops.swap_blocks(sources, views, pairs)
    assert all(torch.equal(*pair) for pair in zip(bases, wanted, strict=True))
    ops.swap_blocks(sources, views, [])
    ops.swap_blocks(sources, views, torch.tensor([[1, 2]]))
    assert torch.equal(views[0][2], sources[0][1])


@all_kernels
def test_bad_swaps_move_nothing(kernels):
    source, target = torch.ones(3, 2, 4), torch.zeros(4, 2, 4)
    for pairs, error, message in [
        ([(3, 0)], SlotError, "wanted source blocks of 0 to 2, got 3 at row 0"),
        ([(0, 0), (1, 4)], SlotError, "wanted destination blocks of 0 to 3, got 4 at row 1"),
        ([(-1, 0)], SlotError, "wanted source blocks"),
        ([(0, 1), (2, 1)], ArgumentError, "wanted destinations named once, got block 1 at row 1"),
    ]:
        with pytest.raises(error, match=message):
            ops.swap_blocks([source], [target], pairs)
    for sources, targets, message in [
        ([], [], "`src`: wanted at least one cache"),
        ([source], [target, target], "`dst`: wanted 1 caches"),
        ([source], [target[:, :1]], "`dst`: wanted blocks of the shape and dtype of `src`"),
        ([source], [target.half()], "`dst`: wanted blocks of the shape and dtype of `src`"),
        ([source, source[:2]], [target, target], "`src`: wanted 3 blocks"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.swap_blocks(sources, targets, [(0, 0)])
    assert (target == 0).all()


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_gather_gives_back_what_was_written(kernels, make_case, dtype, layout):
    case = make_case([0, 5, 17, 4], dtype=dtype, layout=layout)
    caches, tables = (case.key_cache, case.value_cache), case.block_tables
    key, value = ops.gather_kv(*caches, tables, case.seq_lens, layout=layout)
    assert torch.equal(key, torch.cat(case.keys))
    assert torch.equal(value, torch.cat(case.values))
    starts = ints(1, 3, 10, 30, 36)
    key, value = (torch.full((37, 2, 8), 7.0, dtype=dtype) for _ in range(2))
    ops.gather_kv(*caches, tables, case.seq_lens, layout=layout, key=key, value=value, seq_start_loc=starts)
    for row, length in enumerate(case.lengths):
        rows = slice(int(starts[row]), int(starts[row]) + length)
        assert torch.equal(key[rows], case.keys[row])
        key[rows] = 7
    assert (key == 7).all()
    for wrong in (ints(1, 3, 7, 30, 36), ints(-1, 3, 10, 30, 36), ints(1, 3, 10, 30, 38), ints(1, 3, 10, 30, 33)):
        with pytest.raises(ArgumentError, match="seq_start_loc"):
            ops.gather_kv(*caches, tables, case.seq_lens, layout=layout, key=key, value=value, seq_start_loc=wrong)
    with pytest.raises(ArgumentError, match="seq_lens"):
        ops.gather_kv(*caches, tables[:, :2], case.seq_lens, layout=layout, key=key, value=value, seq_start_loc=starts)
    tables[1, 0] = -1
    with pytest.raises(SlotError, match="block_tables"):
        ops.gather_kv(*caches, tables, case.seq_lens, layout=layout)
    assert not kernels.atomic or (key == 7).all()


# --- changes of a table ----------------------------------------------------------------------------------------------


@all_kernels
def test_table_changes_are_written_and_padding_is_not(kernels):
    generator = torch.Generator().manual_seed(0)
    for num_changes in (0, 1, 5, 300):
        memory = torch.arange(40 * 50, dtype=torch.int32).reshape(40, 50)
        table = memory[::2, 1::3]  # [20, 17]
        places = torch.randperm(20 * 17, generator=generator)[:num_changes]
        changed = torch.stack([places // 17, places % 17, torch.arange(num_changes) - 1], 1).int()
        changed[::4, 0] = -1
        changed[::8, 1] = 2**31 - 1
        wanted = memory.clone()
        for row, column, block in changed.tolist():
            if row >= 0:
                wanted[::2, 1::3][row, column] = block
        ops.update_tables(table, changed)
        assert torch.equal(memory, wanted)


@all_kernels
@pytest.mark.parametrize("bad", [(-2, 0), (3, 0), (0, -1), (0, 4)])
def test_a_change_outside_the_table_is_refused(kernels, bad):
    table = torch.full((3, 4), 7, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="`changed`: wanted rows"):
        ops.update_tables(table, torch.tensor([[1, 1, 5], [*bad, 6]], dtype=torch.int32))
    assert (table == 7).sum() == (12 if kernels.atomic else 11)
    for argument, tensors in (
        ("block_tables", (table.long(), torch.zeros(1, 3).int())),
        ("block_tables", (table[0], torch.zeros(1, 3).int())),
        ("changed", (table, torch.zeros(1, 2).int())),
        ("changed", (table, torch.zeros(1, 3).long())),
    ):
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            ops.update_tables(*tensors)


class Properties:
    multi_processor_count = 132


def test_parts_fill_the_device_once(monkeypatch, threads):
    threads(2)
    assert ops.default_num_parts("cpu", 8, 128) == 8
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    assert [ops.default_num_parts("cuda", heads, 128) for heads in (1, 8, 48, 500)] == [396, 49, 8, 1]
    sizes = {"max_seq_len": 100, "device": "cuda", "num_kv_heads": 8}
    free = ops.workspace_bytes(4, 32, 128, **sizes)
    assert free == ops.workspace_bytes(4, 32, 128, max_seq_len=100, num_parts=49)
    assert free >= 4 * (4 * 8 + 2 * 48 * 32 * 130)


def test_f232_a_gpu_runs_fewer_blocks_of_large_heads_at_once(monkeypatch):
    """As `decode_blocks` of csrc/cuda has it: 3 a multiprocessor, 2 for a head dim above 128."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    assert [ops.default_num_parts("cuda", 8, head_dim) for head_dim in (64, 128, 136, 256)] == [49, 49, 33, 33]
    sizes = {"max_seq_len": 100, "device": "cuda", "num_kv_heads": 8}
    assert ops.workspace_bytes(4, 32, 256, **sizes) == ops.workspace_bytes(4, 32, 256, max_seq_len=100, num_parts=33)
    sources = [path.read_text() for path in (ROOT / "csrc" / "cuda").rglob("*.h")]
    assert sum("decode_blocks(int64_t head_dim) { return head_dim > 128 ? 2 : 3; }" in text for text in sources) == 1
