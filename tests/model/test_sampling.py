"""The next token depends on a row's logits and its own seed, and on nothing else."""

import pytest
import torch

from kvpager import SamplingParams
from kvpager.errors import ArgumentError
from kvpager.sampling import make_generator, sample

LOGITS = torch.tensor([1.0, 5.0, 2.0, 4.5])


def draw(params: SamplingParams, times: int, *, engine_seed: int = 0, number: int = 0) -> list[int]:
    generator = make_generator(params, engine_seed, number)
    return [sample(LOGITS[None], [params], [generator])[0] for _ in range(times)]


def test_temperature_zero_is_the_default_and_greedy() -> None:
    assert SamplingParams() == SamplingParams(max_tokens=16, temperature=0.0, seed=None, ignore_eos=False)
    assert draw(SamplingParams(), 20) == [1] * 20


def test_draws_follow_the_softmax() -> None:
    counts = torch.bincount(torch.tensor(draw(SamplingParams(temperature=1.0, seed=3), 4000)), minlength=4) / 4000
    assert float((counts - LOGITS.softmax(-1)).abs().max()) < 0.03
    cold = draw(SamplingParams(temperature=0.5, seed=3), 4000)
    assert abs(cold.count(1) / 4000 - float((LOGITS / 0.5).softmax(-1)[1])) < 0.03


def test_the_smallest_temperature_is_greedy() -> None:
    assert draw(SamplingParams(temperature=1e-300, seed=0), 20) == [1] * 20


def test_a_seed_repeats_and_seeds_differ() -> None:
    drawn = {seed: tuple(draw(SamplingParams(temperature=1.0, seed=seed), 30)) for seed in range(8)}
    assert drawn[3] == tuple(draw(SamplingParams(temperature=1.0, seed=3), 30, engine_seed=9, number=5))
    assert len(set(drawn.values())) == 8


def test_without_a_seed_the_engine_and_the_request_decide() -> None:
    params = SamplingParams(temperature=1.0)
    drawn = {(seed, n): tuple(draw(params, 30, engine_seed=seed, number=n)) for seed in range(3) for n in range(3)}
    assert len(set(drawn.values())) == 9
    assert drawn[2, 1] == tuple(draw(params, 30, engine_seed=2, number=1))


def test_rows_do_not_touch_each_other() -> None:
    """Each row of a mixed batch draws what it draws alone, wherever it stands."""
    wishes = [SamplingParams(temperature=t, seed=s) for t, s in ((0.0, 1), (1.0, 2), (2.0, 3), (0.7, 2))]
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    alone = [sample(rows[n : n + 1], [wishes[n]], [make_generator(wishes[n], 0, n)])[0] for n in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3]):
        generators = [make_generator(wishes[n], 0, n) for n in order]
        assert sample(rows[order], [wishes[n] for n in order], generators) == [alone[n] for n in order]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens`: wanted at least 1, got 0"),
        ({"temperature": -0.1}, "`temperature`: wanted a finite number of at least 0, got -0.1"),
        ({"temperature": float("nan")}, "`temperature`: wanted a finite number of at least 0, got nan"),
        ({"temperature": float("inf")}, "`temperature`: wanted a finite number of at least 0, got inf"),
        ({"seed": -1}, "`seed`: wanted 0 … 2^64 - 1, got -1"),
        ({"seed": 2**64}, "`seed`: wanted 0 … 2^64 - 1"),
    ],
)
def test_bad_wishes_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert message in str(caught.value)
