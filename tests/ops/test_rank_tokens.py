"""The log-sum-exp of rows and the ranks of tokens against torch's own in float64."""

import math

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError

BOTH = pytest.mark.parametrize("kernels", ["native", "reference"], indirect=True)
INF = math.inf


def random(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def tokens(*ids):
    return torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("isa")
def test_every_width_on_every_isa(dtype):
    """Widths around every vector and chunk, with ties in 16 bits; scores far from 0 on either side."""
    rtol = 1e-14 if dtype is torch.float64 else 2e-7
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 255, 256, 257, 511, 513, 1023, 1025, 5000):
        for shift in (-500.0, 0.0, 500.0):
            scores = (random(3, width + 5, dtype=torch.float64, seed=width, scale=4) + shift).to(dtype)[:, 2:-3]
            chosen = tokens(0, width // 2, width - 1)
            lse, ranks = ops.rank_tokens(scores, chosen)
            torch.testing.assert_close(lse.double(), scores.double().logsumexp(1), rtol=rtol, atol=2e-6)
            assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            assert torch.equal(ranks, (scores > scores.gather(1, chosen[:, None])).sum(1) + 1)


@pytest.mark.usefixtures("isa")
def test_a_wide_row():
    """As many terms as a vocabulary has: sums and counts in floats alone would stop growing at 2^24."""
    scores = torch.zeros(1, 300_000)
    lse, ranks = ops.rank_tokens(scores, tokens(7))
    assert lse.tolist() == pytest.approx([math.log(300_000)], rel=1e-7)
    assert ranks.tolist() == [1]  # nobody is above it
    scores[0, 7] = -1
    assert ops.rank_tokens(scores, tokens(7))[1].tolist() == [300_000]


@BOTH
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [3, 40])
def test_infinities_and_nan(kernels, width):
    rows = torch.zeros(5, width)
    rows[0] = -INF  # no token at all
    rows[1, 1:] = -INF  # one token alone
    rows[2, width - 1] = INF
    rows[3, width // 2] = math.nan
    rows[4, 0], rows[4, width - 1] = INF, math.nan
    lse, ranks = ops.rank_tokens(rows, tokens(1, 1, 1, 1, 1) % width)
    assert lse[:3].tolist() == [-INF, 0.0, INF]
    assert lse[3:].isnan().all()
    assert ranks[:3].tolist() == [1, 2, 2]


@BOTH
def test_of_no_rows(kernels):
    lse, ranks = ops.rank_tokens(torch.zeros(0, 8), tokens())
    assert lse.shape == ranks.shape == (0,)


def test_a_row_depends_on_nothing_beside_it():
    scores, chosen = random(9, 700, dtype=torch.float32, scale=3), torch.arange(9)
    together = ops.rank_tokens(scores, chosen)
    for row in range(9):
        alone = ops.rank_tokens(scores[row : row + 1], chosen[row : row + 1])
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@BOTH
@pytest.mark.parametrize(
    ("argument", "scores", "token_ids"),
    [
        ("scores", torch.zeros(3), tokens(0, 0, 0)),
        ("scores", torch.zeros(3, 4, dtype=torch.int64), tokens(0, 0, 0)),
        ("scores", torch.zeros(4, 3).T, tokens(0, 0, 0)),
        ("scores", None, tokens(0)),
        ("token_ids", torch.zeros(3, 4), tokens(0, 0)),
        ("token_ids", torch.zeros(3, 4), tokens(0, 0, 0).int()),
        ("token_ids", torch.zeros(3, 4), tokens(0, 4, 0)),
        ("token_ids", torch.zeros(3, 4), tokens(0, 0, -1)),
        ("token_ids", torch.zeros(3, 4), [0, 0, 0]),
    ],
)
def test_bad_arguments_are_named(kernels, argument, scores, token_ids):
    with pytest.raises(ArgumentError, match=f"`{argument}`: wanted"):
        ops.rank_tokens(scores, token_ids)
