"""The fused front end of a step against torch's own operations in float64, step by step."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError, SlotError

BOTH = pytest.mark.parametrize("kernels", ["native", "reference", "emulated"], indirect=True)
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}  # of numbers to 8


def step(dtype, *, num_tokens=5, num_heads=6, num_kv_heads=2, head_dim=16, layout="HND"):
    """A step's arguments; qkv and query_out are views of wider tensors, and the caches hold 77."""
    T, H, K, D, S, N = num_tokens, num_heads, num_kv_heads, head_dim, 4, 4
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    shape = (N, K, S, D) if layout == "HND" else (N, S, K, D)
    angles = torch.rand(20, D // 2, generator=generator, dtype=torch.float64) * 7
    return {
        "qkv": torch.randn(T, (H + 2 * K) * D + 5, generator=generator).to(dtype)[:, 3:-2],
        "q_weight": (1 + 0.3 * torch.randn(D, generator=generator)).to(dtype),
        "k_weight": (1 + 0.3 * torch.randn(D, generator=generator)).to(dtype),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1).to(wide),
        "positions": torch.randint(0, 20, (T,), generator=generator),
        "key_cache": torch.full(shape, 77.0, dtype=dtype),
        "value_cache": torch.full(shape, 77.0, dtype=dtype),
        "slot_mapping": torch.randperm(N * S, generator=generator)[:T],
        "eps": 1e-5,
        "query_out": torch.full((T, H + 1, D + 4), 77.0, dtype=dtype)[:, 1:, :D],
        "layout": layout,
    }


def expected(arguments):
    """Query [T, H, D], key and value [T, K, D] in float64, by complex numbers: no code shared with the reference."""
    T, H, D = arguments["query_out"].shape
    rows = arguments["qkv"][: len(arguments["slot_mapping"])].double().reshape(T, -1, D)
    K = (rows.shape[1] - H) // 2

    def normed(x, weight):
        if weight is None:
            return x
        return torch.nn.functional.rms_norm(x, (D,), weight.double(), arguments["eps"])

    def turned(x):
        table = arguments["cos_sin"][arguments["positions"][:T]].double()
        angles = torch.complex(*table.chunk(2, 1)).unsqueeze(1)
        pairs = torch.complex(*x.contiguous().chunk(2, 2)) * angles
        return torch.cat([pairs.real, pairs.imag], 2)

    query, key, value = rows.split([H, K, K], 1)
    return (
        turned(normed(query, arguments["q_weight"])),
        turned(normed(key, arguments["k_weight"])),
        value,
    )


def slots_of(cache, layout):
    """A cache as [N · S, K, D]."""
    by_token = cache if layout == "NHD" else cache.transpose(1, 2)
    return by_token.reshape(-1, *by_token.shape[2:])


def check(arguments):
    guard = arguments["query_out"]._base if arguments["query_out"]._base is not None else None
    out = ops.qk_norm_rope_write(**arguments)
    dtype = out.dtype
    query, key, value = expected(arguments)
    torch.testing.assert_close(out.double(), query, rtol=0, atol=ROUNDING[dtype])
    slots, layout = arguments["slot_mapping"], arguments["layout"]
    keys, values = (slots_of(arguments[name], layout) for name in ("key_cache", "value_cache"))
    written = slots >= 0
    torch.testing.assert_close(keys[slots[written]].double(), key[written], rtol=0, atol=ROUNDING[dtype])
    assert torch.equal(values[slots[written]].double(), value[written])  # values keep their bits
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots[written]] = False
    assert (keys[untouched] == 77).all()
    assert (values[untouched] == 77).all()
    if guard is not None:
        assert (guard[:, 0] == 77).all()
        assert (guard[:, :, -4:] == 77).all()


@BOTH
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_equals_qk_norm_rope_write(kernels, dtype, layout):
    check(step(dtype, layout=layout))


@pytest.mark.parametrize("head_dim", [2, 6, 20, 34, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("isa")
def test_every_head_dim_on_every_isa(dtype, head_dim):
    check(step(dtype, head_dim=head_dim, num_heads=3, num_kv_heads=1))


@BOTH
@pytest.mark.parametrize("without", [("q_weight",), ("k_weight",), ("q_weight", "k_weight")])
def test_without_norm(kernels, without):
    check({**step(torch.float32), **dict.fromkeys(without)})


@BOTH
def test_b056_slot_minus_one_writes_nothing(kernels):
    """The query of such a row is computed all the same: padding rows of a graph have one."""
    arguments = step(torch.float32)
    arguments["slot_mapping"][[1, 4]] = -1
    check(arguments)


@BOTH
def test_b062_rows_come_from_the_slots(kernels):
    """Rows past the slots, NaN here, are neither read nor written."""
    arguments = step(torch.float32, num_tokens=8)
    arguments["qkv"][5:] = math.nan
    arguments["positions"][5:] = 10**9
    arguments["slot_mapping"] = arguments["slot_mapping"][:5]
    out = arguments["query_out"]
    ops.qk_norm_rope_write(**arguments)
    assert (out[5:] == 77).all()
    assert not torch.cat([arguments["key_cache"], arguments["value_cache"]]).isnan().any()
    check({**arguments, "query_out": out[:5]})


@BOTH
def test_allocates_the_query(kernels):
    arguments = step(torch.float32)
    given = ops.qk_norm_rope_write(**arguments)
    made = ops.qk_norm_rope_write(**{**arguments, "query_out": None})
    assert made.is_contiguous()
    assert torch.equal(made, given)


BAD = [
    ("slot_mapping", torch.tensor([0, 1, 2, 3, 16]), SlotError, "-1 or a slot below 16, got 16 at token 4"),
    ("slot_mapping", torch.tensor([0, 1, 2, 3, -2]), SlotError, "-1 or a slot below 16, got -2 at token 4"),
    ("slot_mapping", torch.zeros(5, dtype=torch.int32), ArgumentError, r"\[T\] int64"),
    ("slot_mapping", torch.zeros(6, dtype=torch.int64), ArgumentError, None),
    ("positions", torch.tensor([0, 1, 2, 3, 20]), ArgumentError, "0 to 19 .rows of `cos_sin`., got 20 at token 4"),
    ("positions", torch.tensor([0, 1, -1, 3, 2]), ArgumentError, "0 to 19 .rows of `cos_sin`., got -1 at token 2"),
    ("positions", torch.zeros(5), ArgumentError, r"\[T\] int64"),
    ("qkv", torch.zeros(5, 161), ArgumentError, r"\[any, 160\] float32"),
    ("qkv", torch.zeros(5, 160).half(), ArgumentError, "float32 on cpu"),
    ("qkv", torch.zeros(160, 5).T, ArgumentError, "contiguous last dimension"),
    ("q_weight", torch.zeros(15), ArgumentError, r"\[16\] float32"),
    ("k_weight", torch.zeros(16, dtype=torch.float64), ArgumentError, r"\[16\] float32"),
    ("cos_sin", torch.zeros(20, 8), ArgumentError, r"\[any, 16\] float32"),
    ("query_out", torch.zeros(5, 5, 16), ArgumentError, "multiple of the 2 kv heads, got 5 heads"),
    ("query_out", torch.zeros(4, 6, 16), ArgumentError, "at least 5 rows, one for each slot, got 4 rows"),
    ("eps", -1.0, ArgumentError, "0 or a positive number"),
    ("layout", "DHN", ArgumentError, '"HND" or "NHD"'),
]


@BOTH
@pytest.mark.parametrize(("argument", "bad", "error", "wanted"), BAD)
def test_bad_arguments_are_named_and_write_nothing(kernels, argument, bad, error, wanted):
    arguments = step(torch.float32)
    on_device = kernels.name == "emulated" and "at token" in (wanted or "")
    if on_device:
        wanted = ", got others on the device; their rows were skipped"
    pattern = wanted if wanted is None else f"`{argument}`: wanted .*{wanted}"
    with pytest.raises(error, match=pattern):
        ops.qk_norm_rope_write(**{**arguments, argument: bad})
    if on_device:  # the other tokens are written
        return
    for name in ("key_cache", "value_cache", "query_out"):
        assert (arguments[name] == 77).all()


def test_shapes_that_give_no_query_are_named():
    arguments = {**step(torch.float32), "query_out": None}
    with pytest.raises(ArgumentError, match=r"`qkv`: wanted \[T, \(H \+ 4\) · 16\]"):
        ops.qk_norm_rope_write(**{**arguments, "qkv": torch.zeros(5, 48)})
    with pytest.raises(ArgumentError, match="`key_cache`"):
        ops.qk_norm_rope_write(**{**arguments, "key_cache": torch.zeros(3)})
    odd = torch.zeros(4, 2, 4, 15)
    with pytest.raises(ArgumentError, match="`key_cache`: wanted an even head dim"):
        ops.qk_norm_rope_write(
            **{**arguments, "key_cache": odd, "value_cache": odd.clone(), "qkv": torch.zeros(5, 150)}
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_as_a_full_graph():
    torch._dynamo.reset()
    arguments = step(torch.float32)
    wanted = ops.qk_norm_rope_write(**{**arguments, "query_out": None})
    caches = {name: torch.full_like(arguments[name], 77.0) for name in ("key_cache", "value_cache")}
    compiled = torch.compile(ops.qk_norm_rope_write, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**{**arguments, **caches, "query_out": None}), wanted)
    assert torch.equal(caches["key_cache"], arguments["key_cache"])
