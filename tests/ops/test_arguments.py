"""Values of the wrong kind: what is no tensor, no number, no list of pairs. Each is named, and nothing is written."""

import re

import pytest
import torch

from kvpager import AttentionMetadata, DecodeBatch, KVBlockManager, PagedKVCache, ops
from kvpager.errors import ArgumentError

N, K, S, D, H = 4, 2, 4, 8, 4


@pytest.fixture
def caches():
    return torch.zeros(N, K, S, D), torch.zeros(N, K, S, D)


def write(caches, **changes):
    rows = torch.ones(3, K, D)
    arguments = {"key": rows, "value": rows, "slot_mapping": torch.tensor([0, 1, 2]), **changes}
    ops.write_kv(key_cache=caches[0], value_cache=caches[1], **arguments)


def one_query(caches):
    return {
        "query": torch.ones(1, H, D),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": torch.tensor([[0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([6], dtype=torch.int32),
    }


def attend(caches, **changes):
    return ops.paged_attention(**{**one_query(caches), **changes})


@pytest.mark.parametrize("value", [None, 5, [0, 1, 2], "x"])
@pytest.mark.parametrize("argument", ["key", "value", "slot_mapping"])
def test_what_is_no_tensor_is_not_written(caches, argument, value):
    with pytest.raises(ArgumentError, match=rf"`{argument}`: wanted a tensor, got {type(value).__name__}"):
        write(caches, **{argument: value})
    assert not caches[0].any()
    assert not caches[1].any()


@pytest.mark.parametrize("value", [None, 5, [0, 1, 2]])
@pytest.mark.parametrize("argument", ["query", "key_cache", "value_cache", "block_tables", "seq_lens"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_attention_wants_tensors(caches, argument, value, layout):
    views = {"key_cache": caches[0], "value_cache": caches[1]}
    if layout == "NHD":
        views = {name: cache.transpose(1, 2) for name, cache in views.items()}
    with pytest.raises(ArgumentError, match=rf"`{argument}`: wanted a tensor, got {type(value).__name__}"):
        attend(caches, **{**views, "layout": layout, argument: value})


@pytest.mark.parametrize("argument", ["sinks", "alibi_slopes", "key_scale", "split_plan", "workspace", "out", "lse"])
def test_optional_tensors_are_tensors(caches, argument):
    with pytest.raises(ArgumentError, match=rf"`{argument}`: wanted a tensor or None, got int"):
        attend(caches, **{argument: 5})


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("window", 1.5, "a whole number of 64 bits, got 1.5 (float)"),
        ("window", None, "a whole number of 64 bits, got None (NoneType)"),
        ("max_seq_len", "6", "a whole number of 64 bits, got '6' (str)"),
        ("fixed_split", 2**70, f"a whole number of 64 bits, got {2**70} (int)"),
        ("scale", "x", "a number, got 'x' (str)"),
        ("softcap", None, "a number, got None (NoneType)"),
    ],
)
def test_options_are_numbers(caches, argument, value, text):
    with pytest.raises(ArgumentError, match=re.escape(f"`{argument}`: wanted {text}")):
        attend(caches, **{argument: value})


@pytest.mark.parametrize(
    "pairs", [None, 5, [(0, 1.5)], [("a", 1)], [0, 1], [(0, 1, 2)], [(0,)], [(0, 2**70)], [(0, None)]]
)
def test_pairs_are_pairs_of_ints(caches, pairs):
    source = torch.ones(N, K, S, D)
    with pytest.raises(ArgumentError, match="`pairs`: wanted"):
        ops.copy_blocks([source, caches[0]], pairs)
    with pytest.raises(ArgumentError, match="`pairs`: wanted"):
        ops.swap_blocks([source], [caches[0]], pairs)
    assert not caches[0].any()


def test_one_cache_is_no_list_of_caches(caches):
    """A tensor can be gone through as a list can, and then each block would be taken for a cache."""
    caches[0][:, 0] = 1
    for call in (
        lambda: ops.copy_blocks(caches[0], [(0, 1)]),
        lambda: ops.swap_blocks(caches[0], caches[1], [(0, 1)]),
    ):
        with pytest.raises(ArgumentError, match="wanted a list of caches, got Tensor"):
            call()
    assert not caches[0][:, 1].any()
    assert not caches[1].any()


def test_what_is_read_before_the_op_is_called():
    for call in (
        lambda: ops.gather_kv(None, None, None, None),
        lambda: ops.shared_prefix_attention(None, None, None, None, None, 0),
        lambda: ops.make_split_plan([1, 2], block_size=16),
        lambda: ops.linear(None, None),
        lambda: ops.rms_norm(None, None, eps=1e-6),
        lambda: ops.silu_mul(None, None),
        lambda: ops.rank_tokens(None, None),
        lambda: ops.merge_attention(None, None, None, None),
        lambda: ops.update_tables(None, None),
    ):
        with pytest.raises(ArgumentError, match="wanted a tensor, got"):
            call()
    wanted = "torch.int8, torch.float8_e4m3fn or torch.float8_e5m2"
    with pytest.raises(ArgumentError, match=f"`dtype`: wanted {wanted}, got torch.float32"):
        ops.quantise(torch.ones(2, 8), torch.float32)


def test_an_option_that_no_op_has_is_refused(caches):
    """As Python refuses a keyword, in the words of the function that was called."""
    tables = {name: one_query(caches)[name] for name in ("block_tables", "seq_lens")}
    query = torch.ones(1, H, D)
    cache = PagedKVCache(1, N, K, S, D)
    for call in (
        lambda: attend(caches, windwo=3),
        lambda: ops.paged_attention_lse(query, *caches, **tables, windwo=3),
        lambda: cache.attend(0, query, step(), windwo=3),
    ):
        with pytest.raises(TypeError, match=r"paged_attention\(\) got an unexpected keyword argument 'windwo'"):
            call()
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"paged_prefill\(\) got an unexpected keyword argument 'fixed_split'"):
        ops.paged_prefill(query, *caches, query_start_loc=starts, **tables, fixed_split=16)
    with pytest.raises(TypeError, match="windwo"):
        attend(caches, backend="reference", windwo=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("argument", ["scale", "softcap"])
def test_factors_of_scores_are_finite(kernels, caches, argument, value):
    """Also when they are used, in float32: 1e39 would be inf there."""
    out = torch.full((1, H, D), 7.0)
    with pytest.raises(ArgumentError, match=rf"`{argument}`: wanted .*finite.*, got {re.escape(str(value))}"):
        attend(caches, out=out, **{argument: value})
    with pytest.raises(ArgumentError, match=rf"`{argument}`: wanted .*finite.*, got {re.escape(str(value))}"):
        ops.paged_prefill(
            torch.ones(1, H, D), *caches, torch.tensor([[0, 1]], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([6], dtype=torch.int32),
            out=out, **{argument: value},
        )  # fmt: skip
    assert out.eq(7).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_factors_are_finite_for_every_backend(backend):
    cache = PagedKVCache(1, N, K, S, D, attention_backend=backend)
    with pytest.raises(ArgumentError, match="`scale`: wanted a finite number, got nan"):
        cache.attend(0, torch.ones(1, H, D), step(), scale=float("nan"))


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e30])
def test_any_finite_scale_is_used(kernels, caches, scale):
    assert not attend(caches, scale=scale).any()


def test_factors_of_scores_are_finite_without_a_wrapper():
    """The kernels refuse them too, in their own words."""
    tables, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    query, cache = torch.ones(1, H, D), torch.zeros(N, K, S, D)
    with pytest.raises((RuntimeError, ArgumentError), match="`scale`: wanted a finite number, got nan"):
        torch.ops.kvpager.paged_attention(
            torch.empty_like(query), None, query, cache, cache, tables, lengths, scale=float("nan"), max_seq_len=8
        )


def step(**changes):
    good = {
        "slot_mapping": torch.tensor([5]),
        "block_tables": torch.tensor([[0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([6], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "max_query_len": 1,
        "max_seq_len": 6,
    }
    return AttentionMetadata(**{**good, **changes})


@pytest.mark.parametrize(
    ("query", "metadata", "text"),
    [
        (torch.ones(1, H, D), None, "`metadata`: wanted an `AttentionMetadata`, got NoneType"),
        (torch.ones(1, H, D), {"seq_lens": None}, "`metadata`: wanted an `AttentionMetadata`, got dict"),
        (None, step(), "`query`: wanted a tensor, got NoneType"),
        (5, step(max_query_len=2), "`query`: wanted a tensor, got int"),
        (torch.tensor(1.0), step(), "`query`: wanted [T, H, D], got [] float32"),
        (torch.ones(1, H, D), step(seq_lens=None), "`seq_lens`: wanted a tensor, got NoneType"),
        (torch.ones(1, H, D), step(seq_lens=[6]), "`seq_lens`: wanted a tensor, got list"),
        (torch.ones(1, H, D), step(seq_lens=torch.tensor(6)), "`seq_lens`: wanted [B] int32, got [] int64"),
        (torch.ones(1, H, D), step(seq_lens=[6], max_query_len=2), "`seq_lens`: wanted a tensor, got list"),
        (torch.ones(1, H, D), step(block_tables=None), "`block_tables`: wanted a tensor, got NoneType"),
        (torch.ones(1, H, D), step(query_start_loc=None, max_query_len=2), "`query_start_loc`: wanted a tensor"),
    ],
)
def test_a_cache_attends_to_a_step(query, metadata, text):
    for backend in ("auto", "reference"):
        cache = PagedKVCache(1, N, K, S, D, attention_backend=backend)
        with pytest.raises(ArgumentError, match=re.escape(text)):
            cache.attend(0, query, metadata)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.dequantise(None, None), "`codes`: wanted a tensor, got NoneType"),
        (lambda: ops.dequantise(torch.ones(3, 8), 0.5), "`scales`: wanted a tensor, got float"),
        (lambda: ops.dequantise(torch.ones(3, 8), torch.ones(2)), "`scales`: wanted [3] or [1], got [2] float32"),
        (lambda: ops.dequantise(torch.tensor(1.0), torch.ones(1)), "`codes`: wanted [..., D], got []"),
        (lambda: ops.quantise(None, torch.int8), "`rows`: wanted a tensor, got NoneType"),
        (lambda: ops.default_num_parts(None, 1, 128), '`device`: wanted "cpu" or a GPU of this machine, got None'),
        (lambda: ops.default_num_parts("x", 1, 128), "`device`: wanted \"cpu\" or a GPU of this machine, got 'x'"),
        (lambda: ops.default_num_parts("cuda:99", 1, 128), "got 'cuda:99'"),
        (lambda: ops.default_num_parts("cpu", 0, 128), "`num_kv_heads`: wanted at least 1, got 0"),
        (lambda: ops.default_num_parts("cpu", 1, 0), "`head_dim`: wanted at least 1, got 0"),
        (
            lambda: ops.workspace_bytes(None, 4, 8, max_seq_len=6),
            "`num_sequences`: wanted a whole number of at most 63 bits",
        ),
        (lambda: ops.workspace_bytes(2, 4, 1.5, max_seq_len=6), "`head_dim`: wanted a whole number of at most 63 bits"),
        (
            lambda: ops.workspace_bytes(2, 4, 8, max_seq_len="6"),
            "`max_seq_len`: wanted a whole number of at most 63 bits",
        ),
        (lambda: ops.workspace_bytes(2, 4, 8, max_seq_len=6, num_parts=0), "`num_parts`: wanted at least 1, got 0"),
        (lambda: ops.workspace_bytes(2, 4, 8, max_seq_len=6, device=None), "`device`: wanted"),
        (
            lambda: ops.make_split_plan(torch.zeros(1, dtype=torch.int32), block_size=4, num_parts=1.5),
            "`num_parts`: wanted a whole number of at most 63 bits, got 1.5",
        ),
    ],
)
def test_helpers_name_what_does_not_fit(call, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("query", torch.ones(2, 2), "[T, H, D], got [2, 2] float32"),
        ("key_cache", torch.ones(2, 2), "[N, K, S, D] float32"),
        ("value_cache", torch.ones(2), "the shape, dtype and device of `key_cache`, got [2]"),
        ("block_tables", torch.ones(2), "[B, M], got [2] float32"),
        ("seq_lens", torch.ones(2, 2), "[B], got [2, 2] float32"),
        ("prefix_len", None, "a multiple of the block size 4, at most 8 (2 columns of `block_tables`), got None"),
        ("prefix_len", 4.0, "a multiple of the block size 4, at most 8 (2 columns of `block_tables`), got 4.0"),
        ("query_start_loc", 5, "a tensor, got int"),
        ("query_start_loc", torch.tensor([0, 1]), "[B + 1] int32 on cpu, got [2] int64"),
        ("key_scale", 5, "a tensor or None, got int"),
    ],
)
def test_a_shared_prefix_names_what_does_not_fit(caches, argument, value, text):
    arguments = {**one_query(caches), "prefix_len": 4}
    ops.shared_prefix_attention(**arguments)
    with pytest.raises(ArgumentError, match=re.escape(f"`{argument}`: wanted {text}")):
        ops.shared_prefix_attention(**{**arguments, argument: value})


def test_memory_is_pinned_where_there_is_a_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for value, text in ((1, "True or False, got 1"), (True, "False on a machine without a CUDA driver, got True")):
        with pytest.raises(ArgumentError, match=f"`pin_memory`: wanted {text}"):
            DecodeBatch.with_capacity(KVBlockManager(8, 4), 2, 3, pin_memory=value)
