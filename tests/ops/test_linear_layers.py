"""Linear, RMSNorm and the gated activation against torch's own operations in float64."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kvpager import ops
from kvpager.errors import ArgumentError

BOTH = pytest.mark.parametrize("kernels", ["native", "reference"], indirect=True)
# Of results of order 1.
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inside(*shape, dtype):
    """A matrix of 77s, as a view whose rows lie in wider ones; its base guards what is not to be written."""
    rows, width = shape
    return torch.full((rows + 1, width + 5), 77.0, dtype=dtype)[1:, 2:-3]


def check_guard(view):
    base = view._base
    assert (base[0] == 77).all()
    assert (base[:, :2] == 77).all()
    assert (base[:, -3:] == 77).all()


def check_linear(rows, depth, outputs, dtype, *, bias):
    x = random(rows, depth + 3, dtype=dtype, seed=1)[:, 1:-2]
    weight = random(outputs, depth + 4, dtype=dtype, seed=2, scale=max(depth, 1) ** -0.5)[:, :-4]
    added = random(outputs, dtype=dtype, seed=3) if bias else None
    out = inside(rows, outputs, dtype=dtype)
    assert ops.linear(x, weight, added, out=out) is out
    expected = F.linear(x.double(), weight.double(), added.double() if bias else None)
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    check_guard(out)


@BOTH
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_multiplies(kernels, dtype, bias):
    check_linear(5, 48, 70, dtype, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("isa")
def test_linear_takes_every_shape_on_every_isa(dtype):
    """Rows around every tile, depths around every vector and pair of vectors, outputs around every tile and part."""
    for rows in range(1, 15):
        check_linear(rows, 32, 9, dtype, bias=True)
    for depth in (1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65):
        check_linear(3, depth, 6, dtype, bias=False)
    for outputs in (1, 2, 3, 4, 5, 63, 64, 65, 130):
        check_linear(7, 20, outputs, dtype, bias=True)


@BOTH
@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 8, 0), (3, 0, 4)])
def test_linear_of_nothing(kernels, shape):
    rows, depth, outputs = shape
    out = ops.linear(torch.randn(rows, depth), torch.randn(outputs, depth), torch.ones(outputs))
    assert out.shape == (rows, outputs)
    assert (out == 1).all()  # of no products only the bias is left


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("isa")
def test_a_row_depends_on_nothing_beside_it(dtype):
    """Bit for bit: alone, among others, at any place, with any number of threads."""
    x, weight = random(29, 200, dtype=dtype, seed=1), random(150, 200, dtype=dtype, seed=2)
    residual, scale = random(29, 200, dtype=dtype, seed=3), random(200, dtype=dtype, seed=4)
    threads = torch.get_num_threads()

    def computed(rows):
        stream = residual[rows].clone()
        normed = ops.rms_norm(x[rows], scale, eps=1e-6, residual=stream)
        return ops.linear(x[rows], weight), normed, ops.silu_mul(x[rows], residual[rows])

    together = computed(slice(None))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (slice(0, 1), slice(3, 5), slice(4, 11), slice(10, 29), slice(28, 29)):
                for alone, among in zip(computed(rows), together, strict=True):
                    assert torch.equal(alone, among[rows])
    finally:
        torch.set_num_threads(threads)


@BOTH
@pytest.mark.parametrize("dtype", ROUNDING)
def test_linear_keeps_what_is_no_number_in_its_place(kernels, dtype):
    x, weight = random(4, 20, dtype=dtype), random(6, 20, dtype=dtype, seed=1)
    plain = ops.linear(x, weight)
    x[2, 19], weight[3, 0] = math.nan, math.inf
    out = ops.linear(x, weight)
    assert out[2].isnan().all()
    assert not out[[0, 1, 3], 3].isfinite().any()
    others = torch.ones(4, 6, dtype=torch.bool)
    others[2], others[:, 3] = False, False
    torch.testing.assert_close(out[others], plain[others])


def check_norm(rows, width, dtype, *, added):
    x, weight = random(rows, width + 3, dtype=dtype, seed=1)[:, 1:-2], 1 + random(width, dtype=dtype, seed=2) / 4
    residual, out = inside(rows, width, dtype=dtype), inside(rows, width, dtype=dtype)
    residual.copy_(random(rows, width, dtype=dtype, seed=3))
    stream = residual + x if added else x  # rounded to the dtype, as it is kept
    ops.rms_norm(x, weight, eps=1e-5, residual=residual if added else None, out=out)
    expected = F.rms_norm(stream.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    check_guard(out)
    if added:
        assert torch.equal(residual, stream)
        check_guard(residual)


@BOTH
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("added", [False, True])
def test_norm(kernels, dtype, added):
    check_norm(5, 48, dtype, added=added)


def check_gate(rows, width, dtype):
    gate = random(rows, width + 3, dtype=dtype, seed=1, scale=3)[:, 1:-2]
    up, out = random(rows, width, dtype=dtype, seed=2), inside(rows, width, dtype=dtype)
    ops.silu_mul(gate, up, out=out)
    expected = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    check_guard(out)


@BOTH
@pytest.mark.parametrize("dtype", ROUNDING)
def test_gate(kernels, dtype):
    check_gate(5, 48, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("isa")
def test_norm_and_gate_take_every_width_on_every_isa(dtype):
    for width in (1, 3, 4, 5, 8, 9, 15, 16, 17, 33, 100):
        check_norm(2, width, dtype, added=True)
        check_gate(2, width, dtype)


@BOTH
def test_gate_at_its_ends(kernels):
    """Far to the left nothing is left, far to the right the gate is its input; NaN stays where it is."""
    gate = torch.tensor([[-math.inf, -1e4, -89.0, 0.0, 89.0, 1e4, math.inf, math.nan]])
    out = ops.silu_mul(gate, torch.ones_like(gate))
    assert not out[0, 1:4].abs().gt(1e-30).any()
    assert torch.equal(out[0, 4:7], gate[0, 4:7])
    assert out[0, 7].isnan()


@BOTH
def test_results_may_take_the_place_of_inputs(kernels):
    x, weight = random(3, 20), random(20, seed=1)
    normed = ops.rms_norm(x, weight, eps=1e-6)
    gated = ops.silu_mul(x, normed)
    for taken in (0, 1):
        inputs = [x.clone(), normed.clone()]
        assert torch.equal(ops.silu_mul(*inputs, out=inputs[taken]), gated)
    assert torch.equal(ops.rms_norm(x, weight, eps=1e-6, out=x), normed)


X, W, C = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(8)
BAD = [
    ("x", lambda: ops.linear(torch.zeros(8), W)),
    ("x", lambda: ops.linear(X.int(), W)),
    ("x", lambda: ops.linear(torch.zeros(8, 3).T, W)),
    ("weight", lambda: ops.linear(X, torch.zeros(5, 7))),
    ("weight", lambda: ops.linear(X, W.double())),
    ("weight", lambda: ops.linear(X, torch.zeros(8))),
    ("weight", lambda: ops.linear(X, torch.zeros(8, 5).T)),
    ("bias", lambda: ops.linear(X, W, torch.zeros(4))),
    ("out", lambda: ops.linear(X, W, out=torch.zeros(3, 4))),
    ("out", lambda: ops.linear(X, W, out=torch.zeros(2, 5))),
    ("out", lambda: ops.linear(X, W, out=torch.zeros(5, 3).T)),
    ("weight", lambda: ops.rms_norm(X, torch.zeros(7), eps=0)),
    ("residual", lambda: ops.rms_norm(X, C, eps=0, residual=torch.zeros(2, 8))),
    ("residual", lambda: ops.rms_norm(X, C, eps=0, residual=X.half())),
    ("out", lambda: ops.rms_norm(X, C, eps=0, out=torch.zeros(3, 9))),
    ("eps", lambda: ops.rms_norm(X, C, eps=-1.0)),
    ("gate", lambda: ops.silu_mul(C, C)),
    ("up", lambda: ops.silu_mul(X, torch.zeros(3, 9))),
    ("out", lambda: ops.silu_mul(X, X, out=torch.zeros(4, 8))),
]


@BOTH
@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_does_not_fit_is_refused_by_name(kernels, case):
    argument, call = BAD[case]
    with pytest.raises(ArgumentError, match=f"`{argument}`"):
        call()


@BOTH
def test_nothing_is_written_when_one_is_refused(kernels):
    residual, out = torch.ones(3, 8), torch.ones(3, 9)
    with pytest.raises(ArgumentError, match="`out`"):
        ops.rms_norm(X, C, eps=0.0, residual=residual, out=out)
    assert (residual == 1).all()
    assert (out == 1).all()
