"""Values of the wrong kind: what is no tensor, no number, no list of pairs. Each is named, and nothing is written."""

import re

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError

N, K, S, D, H = 4, 2, 4, 8, 4


@pytest.fixture
def caches():
    return torch.zeros(N, K, S, D), torch.zeros(N, K, S, D)


def write(caches, **changes):
    rows = torch.ones(3, K, D)
    arguments = {"key": rows, "value": rows, "slot_mapping": torch.tensor([0, 1, 2]), **changes}
    ops.write_kv(key_cache=caches[0], value_cache=caches[1], **arguments)


def attend(caches, **changes):
    arguments = {
        "query": torch.ones(1, H, D),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": torch.tensor([[0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([6], dtype=torch.int32),
    }
    return ops.paged_attention(**{**arguments, **changes})


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


@pytest.mark.parametrize("argument", ["sinks", "key_scale", "schedule", "workspace", "out", "lse"])
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
        lambda: ops.make_schedule([1, 2], block_size=16),
        lambda: ops.linear(None, None),
        lambda: ops.rms_norm(None, None, eps=1e-6),
        lambda: ops.silu_mul(None, None),
        lambda: ops.merge_attention(None, None, None, None),
        lambda: ops.update_tables(None, None),
    ):
        with pytest.raises(ArgumentError, match="wanted a tensor, got"):
            call()
    with pytest.raises(ArgumentError, match=r"`dtype`: wanted torch.int8 or torch.float8_e4m3fn, got torch.float32"):
        ops.quantise(torch.ones(2, 8), torch.float32)
