"""The next token depends on a row's scores, its own parameters and its own seed, and on nothing else."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpager import SamplingParams
from kvpager.errors import ArgumentError, StateError
from kvpager.sampling import SampledTokens, Sampler, choose, position_logprobs, request_seed
from kvpager.sampling.floors import Scratch, floor_of_mass

SCORES = torch.tensor([1.0, 5.0, 2.0, 4.5])


def sampler_of(*params: SamplingParams, vocab_size: int = 4, prompt: tuple[int, ...] = (0,), seed: int = 0) -> Sampler:
    sampler = Sampler(vocab_size, len(params))
    for number, asked in enumerate(params):
        sampler.add(asked, request_seed(asked, seed, number), prompt, stop_token_ids=asked.stop_token_ids)
    return sampler


def draw(params: SamplingParams, times: int, scores: Tensor = SCORES, **request: int) -> list[int]:
    """The first tokens of one request whose scores never change."""
    sampler = Sampler(len(scores), 1)
    sampler.add(params, request_seed(params, request.get("engine_seed", 0), request.get("number", 0)), [0])
    tokens = []
    for _ in range(times):
        sampled = sampler.sample(scores[None].clone())
        assert sampled.is_ok.all()
        sampler.accept([0], sampled.token_ids)
        tokens.append(int(sampled.token_ids[0]))
    return tokens


def kept(params: SamplingParams, scores: Tensor, times: int = 200) -> set[int]:
    return set(draw(params, times, scores))


def test_temperature_zero_is_the_default_and_greedy() -> None:
    assert SamplingParams() == SamplingParams(max_tokens=16, temperature=0.0, seed=None, ignore_eos=False)
    assert draw(SamplingParams(), 20) == [1] * 20


def test_draws_follow_the_softmax() -> None:
    counts = torch.bincount(torch.tensor(draw(SamplingParams(temperature=1.0, seed=3), 4000)), minlength=4) / 4000
    assert float((counts - SCORES.softmax(-1)).abs().max()) < 0.03
    cold = draw(SamplingParams(temperature=0.5, seed=3), 4000)
    assert abs(cold.count(1) / 4000 - float((SCORES / 0.5).softmax(-1)[1])) < 0.03


def test_draws_follow_the_softmax_over_many_runs_of_the_vocabulary() -> None:
    """The draw finds a run of 256 tokens first, then the token; 1,000 has a tail that fills no run."""
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(1)).double()
    total = 40_000
    sampler = Sampler(1000, total)
    for number in range(total):
        sampler.add(SamplingParams(temperature=1.0), number, [0])
    tokens = torch.from_numpy(sampler.sample(scores.expand(total, -1)).token_ids)
    counts = torch.bincount(tokens, minlength=1000)
    expected = scores.softmax(-1) * total
    chi_square = float(((counts - expected).square() / expected).sum())
    assert abs(chi_square - 999) < 5 * math.sqrt(2 * 999)


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 0.01])
def test_the_smallest_temperature_is_greedy(temperature: float) -> None:
    assert draw(SamplingParams(temperature=temperature, seed=0), 20) == [1] * 20


def test_a_seed_repeats_and_seeds_differ() -> None:
    drawn = {seed: tuple(draw(SamplingParams(temperature=1.0, seed=seed), 30)) for seed in range(8)}
    assert drawn[3] == tuple(draw(SamplingParams(temperature=1.0, seed=3), 30, engine_seed=9, number=5))
    assert len(set(drawn.values())) == 8


def test_without_a_seed_the_engine_and_the_request_decide() -> None:
    params = SamplingParams(temperature=1.0)
    drawn = {(s, n): tuple(draw(params, 30, engine_seed=s, number=n)) for s in range(3) for n in range(3)}
    assert len(set(drawn.values())) == 9
    seeds = [request_seed(SamplingParams(seed=7), 0, 0, completion) for completion in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4


def test_a_request_goes_on_where_it_was_preempted() -> None:
    params = SamplingParams(temperature=1.5, seed=4, frequency_penalty=1.0)
    whole = draw(params, 12)
    for done in (1, 5, 11):
        sampler = Sampler(4, 1)
        sampler.add(params, 4, [0], output_token_ids=whole[:done])
        tokens = whole[:done]
        for _ in range(12 - done):
            tokens.append(int(sampler.sample(SCORES[None].clone()).token_ids[0]))
            sampler.accept([0], tokens[-1:])
        assert tokens == whole


@pytest.mark.parametrize("filters", [{"top_k": k} for k in (0, -1, 3, 4, 99)] + [{"top_p": 1.0}, {"min_p": 0.0}])
def test_b106_disabled_filters(filters: dict[str, Any]) -> None:
    scores = torch.tensor([1.0, 5.0, 2.0])
    assert kept(SamplingParams(temperature=0.01, seed=1, **filters), scores) == {1}
    assert kept(SamplingParams(temperature=0.0, **filters), scores) == {1}
    assert kept(SamplingParams(temperature=100.0, seed=1, **filters), scores) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 1, "top_p": 0.5}, {3}),
        ({"top_p": 0.8}, {3, 2}),
        ({"top_k": 1, "top_p": 0.8, "temperature": 0.01}, {3}),
        ({"top_p": 0.0}, {3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 2, "top_p": 0.5}, {3}),
        ({"top_k": 2, "top_p": 0.9}, {3, 2}),  # .731 of what top_k leaves
        ({"top_k": 2, "top_p": 0.7}, {3}),
        ({"min_p": 0.3}, {3, 2}),  # .237 / .644 = .368
        ({"min_p": 0.4}, {3}),
        ({"min_p": 1.0}, {3}),
        ({"min_p": 0.3, "top_p": 0.72}, {3}),
        ({"min_p": 0.1, "top_k": 3}, {3, 2, 1}),
        ({"top_k": 3}, {3, 2, 1}),
        ({}, {3, 2, 1, 0}),
    ],
)
def test_b109_filter_combinations(filters: dict[str, Any], expected: set[int], dtype: torch.dtype) -> None:
    """p = .032, .087, .237, .644; 10,000 draws never outside the set, and each of its tokens comes."""
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype).expand(10_000, -1)
    sampler = Sampler(4, 10_000)
    for number in range(10_000):
        sampler.add(SamplingParams(**{"temperature": 1.0, **filters}), number, [0])
    assert set(sampler.sample(scores).token_ids.tolist()) == expected


def test_b107_rows_that_are_not_numbers_are_isolated() -> None:
    rows = [[math.nan] * 3, [0.0, 3.0, 1.0], [-math.inf] * 3, [0.0, math.nan, 9.0], [0.0, math.inf, 9.0]]
    for params in (SamplingParams(), SamplingParams(temperature=0.01), SamplingParams(temperature=0.01, top_p=0.9)):
        asked = SamplingParams(**{**vars(params), "logprobs": 1})
        sampled = sampler_of(*[asked] * 5, vocab_size=3).sample(torch.tensor(rows))
        assert sampled.token_ids.tolist() == [-1, 1, -1, -1, -1]
        assert sampled.is_ok.tolist() == [False, True, False, False, False]
        assert list(sampled.logprobs) == [1]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=5, seed=1, logprobs=0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=2.0, min_p=0.05, seed=3, logprobs=5, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=4, min_tokens=3, stop_token_ids=(7, 8), max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, logit_bias={7: 5.0, 3: -100.0}, logprobs=1),
    SamplingParams(temperature=1.0, seed=6, allowed_token_ids=(3, 4, 299)),
    SamplingParams(top_k=3, frequency_penalty=2.0),
]


def run_rows(asked: list[SamplingParams], steps: int, leaves: dict[int, int]) -> dict[int, list[Any]]:
    """Each request's tokens and log-probabilities; request `leaves[step]` goes after that step."""
    V = 300
    sampler, order = Sampler(V, len(asked)), []
    for params in asked:
        assert params.seed is not None or params.is_greedy
        sampler.add(params, params.seed or 0, [1, 2, 3], stop_token_ids=params.stop_token_ids)
        order.append(asked.index(params))
    seen: dict[int, list[Any]] = {number: [] for number in order}
    for step in range(steps):
        keys = [MIXED.index(asked[number]) for number in order]
        rows = [torch.randn(V, generator=torch.Generator().manual_seed(100 * step + key)) * 3 for key in keys]
        sampled = sampler.sample(torch.stack(rows))
        sampler.accept(range(len(order)), sampled.token_ids)
        for place, number in enumerate(order):
            seen[number].append((int(sampled.token_ids[place]), sampled.logprobs.get(place)))
        if step in leaves:
            row = order.index(leaves[step])
            sampler.remove(row)
            order[row] = order[-1]
            order.pop()
    return seen


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 3, 7, 0, 6, 1, 4, 2], [2, 6, 1]])
def test_b108_options_of_a_row_are_its_own(order: list[int]) -> None:
    """Each row of a mixed batch chooses what it chooses alone, wherever it stands; others may leave."""
    asked = [MIXED[number] for number in order]
    together = run_rows(asked, 6, {1: 0, 3: 1})
    for number, params in enumerate(asked):
        alone = run_rows([params], 6, {})[0]
        assert together[number] == alone[: len(together[number])]
    lengths = dict.fromkeys(range(len(order)), 6) | {0: 2, 1: 4}
    assert {number: len(seen) for number, seen in together.items()} == lengths


def test_b108_some_rows_of_a_step() -> None:
    """Rows that are still in their prompt have no scores; the others are named."""
    scores = torch.stack([torch.randn(300, generator=torch.Generator().manual_seed(n)) for n in range(8)])
    sampler = sampler_of(*MIXED, vocab_size=300)
    whole = sampler.sample(scores.clone())
    some = sampler.sample(scores[[6, 1, 3]].clone(), [6, 1, 3])
    assert some.token_ids.tolist() == whole.token_ids[[6, 1, 3]].tolist()
    assert some.logprobs == {place: whole.logprobs[row] for place, row in ((1, 1), (2, 3))}


def reference_set(scores: Tensor, params: SamplingParams) -> set[int]:
    """The filters as they are described, with a sort; ties at the edge stay."""
    probabilities = (scores.double() / params.temperature).softmax(-1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    if 0 < params.top_k < len(scores):
        probabilities[probabilities < probabilities.sort(descending=True).values[params.top_k - 1]] = 0.0
    if params.top_p < 1:
        ordered = (probabilities / probabilities.sum()).sort(descending=True).values
        needed = int((ordered.cumsum(-1) < params.top_p).sum())
        probabilities[probabilities / probabilities.sum() < ordered[needed]] = 0.0
    return set(probabilities.nonzero()[:, 0].tolist())


@example(1, 300, 0, 0.5, 0.0, 0.3, 0.1, True)  # all equal: the floor is the best height itself
@example(1, 300, 257, 1.0, 0.0, 0.3, 0.1, True)
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([3, 64, 300, 2500, 9000]),
    st.sampled_from([0, 1, 2, 63, 64, 65, 255, 256, 257, 1000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5]),
    st.sampled_from([0.3, 1.0, 5.0]),
    st.sampled_from([0.1, 1.0, 6.0]),
    st.booleans(),
)
def test_filters_equal_a_sort(
    seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float, temperature: float, spread: float, ties: bool
) -> None:
    """Few candidates, many, flat rows that need bisection, equal scores: always the described set."""
    V = vocab_size
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = torch.randn(2, V, generator=torch.Generator().manual_seed(seed)).double() * spread
    scores = scores.mul(2).round().div(2) if ties else scores
    best_scores, tokens = choose.best(scores)
    assert tokens.tolist() == scores.argmax(-1).tolist()
    two = torch.ones(2, dtype=torch.float64)
    filters = choose.Filters(two * temperature, two.long() * min(top_k, V), two * top_p, two * min_p, top_k, True, True)
    heights = (scores - best_scores[:, None]) / temperature
    few, few_tokens = choose._highest(heights, 64)
    assert torch.equal(few, heights.sort(descending=True).values[:, :64])
    assert torch.equal(heights.gather(1, few_tokens), few)
    floor = choose._floors(heights, few, filters, Scratch())
    for row in range(2):
        found = set((heights[row] >= floor[row]).nonzero()[:, 0].tolist())
        assert {t for t in found if torch.exp(heights[row, t]) > 0} == reference_set(scores[row], params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [2, 50, None])
def test_a_floor_is_the_height_that_reaches_the_goal(dtype: torch.dtype, levels: int | None) -> None:
    """By mass and by number, on rows that share heights or not; the lowest height where nothing reaches the goal."""
    heights = -torch.rand(6, 700, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 4
    heights = (heights if levels is None else heights.mul(levels / 4).round().div(levels / 4)).to(dtype)
    heights[0] = heights[0, 0]  # all equal
    heights[1, 3:] = -torch.inf
    top = heights.amax(dim=-1)
    ordered = heights.sort(dim=-1, descending=True).values
    for masses in (None, heights.exp()):
        rises = (ordered.exp() if masses is not None else torch.ones_like(ordered)).double().cumsum(dim=-1)
        for part in (0.001, 0.3, 0.9, 0.99999, 1.1):
            goals = rises[:, -1] * part
            found = floor_of_mass(heights, masses, goals, top, Scratch())
            place = (rises < goals[:, None] * (1 - 1e-6)).sum(dim=-1).clamp(max=699)
            after = (rises < goals[:, None] * (1 + 1e-6)).sum(dim=-1).clamp(max=699)
            expected = ordered.gather(1, torch.stack([place, after], dim=1))  # two where rounding decides
            assert ((found[:, None] == expected).any(dim=1)).all()


@pytest.mark.parametrize("asked", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 300}, {"top_p": 0.9999}])
def test_few_and_whole_rows_draw_alike(asked: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw goes along the vocabulary whether it is made from the few likeliest or from the whole row."""
    scores = torch.randn(50, 3000, generator=torch.Generator().manual_seed(2)).double() * 4
    params = [SamplingParams(temperature=1.0, seed=n, **asked) for n in range(50)]  # type: ignore[arg-type]
    sampler = sampler_of(*params, vocab_size=3000)
    usual = sampler.sample(scores)
    monkeypatch.setattr(choose, "_is_settled", lambda few, floor, vocab_size: torch.zeros(len(few), dtype=torch.bool))
    whole = sampler.sample(scores)
    assert usual.token_ids.tolist() == whole.token_ids.tolist()
    assert np.abs(usual.margins - whole.margins).max() < 1e-9


def test_best_is_the_first_of_equals() -> None:
    for V in (5, 256, 700):
        scores = torch.zeros(2, V)
        scores[0, [3, V - 1]] = 2.0
        scores[1, V - 1] = 1.0
        assert choose.best(scores)[1].tolist() == [3, V - 1]


def test_penalties_change_what_was_seen() -> None:
    """Prompt 0, 1; generated 1, 1, 2. Repetition divides above zero and multiplies below; the others subtract."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(5, 1)
    sampler.add(params, 0, [0, 1, 1], output_token_ids=[1, 1])
    sampler.accept([0], [2])
    scores = torch.tensor([[4.0, 4.0, -4.0, 4.0, -1.0]])
    sampler.sample(scores)
    assert scores.tolist() == [[2.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 4.0, -1.0]]


def test_many_distinct_tokens_are_counted() -> None:
    sampler = Sampler(500, 1)
    sampler.add(SamplingParams(frequency_penalty=1.0), 0, [])
    for token in [*range(100), *range(50)]:
        sampler.accept([0], [token])
    scores = torch.zeros(1, 500)
    sampler.sample(scores)
    assert scores[0].tolist() == [-2.0] * 50 + [-1.0] * 50 + [0.0] * 400


def test_bias_and_allowed_tokens() -> None:
    assert draw(SamplingParams(logit_bias={2: 10.0}), 2) == [2, 2]
    assert draw(SamplingParams(allowed_token_ids=(0, 2)), 2) == [2, 2]
    assert kept(SamplingParams(allowed_token_ids=(0, 2), temperature=50.0), SCORES) == {0, 2}
    assert draw(SamplingParams(allowed_token_ids=(0, 2), logit_bias={0: 5.0}), 2) == [0, 0]


def test_min_tokens_keeps_stop_tokens_away() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(1, 3))
    sampler = sampler_of(params)
    tokens = []
    for _ in range(4):
        tokens.append(int(sampler.sample(SCORES[None].clone()).token_ids[0]))
        sampler.accept([0], tokens[-1:])
    assert tokens == [2, 2, 1, 1]


def test_logprobs_are_the_models_own() -> None:
    """Of the token chosen and the likeliest, before penalties, temperature and filters."""
    params = SamplingParams(temperature=3.0, top_k=3, logit_bias={2: 100.0}, logprobs=2)
    sampled = sampler_of(params).sample(SCORES[None].clone())
    logs = SCORES.log_softmax(-1).tolist()
    assert sampled.token_ids.tolist() == [2]
    found = {token: (each.rank, round(each.logprob, 5)) for token, each in sampled.logprobs[0].items()}
    assert found == {2: (3, round(logs[2], 5)), 1: (1, round(logs[1], 5)), 3: (2, round(logs[3], 5))}
    assert list(found) == [2, 1, 3]
    (position,) = position_logprobs(SCORES[None], [1], [99])
    assert list(position) == [1, 3, 2, 0]
    assert position_logprobs(SCORES[:0].reshape(0, 4), [], []) == []


def test_the_margin_is_the_distance_to_another_draw() -> None:
    sampler = Sampler(4, 1)
    sampler.add(SamplingParams(temperature=1.0), 11, [0])
    sampled: SampledTokens = sampler.sample(SCORES[None].double())
    edges = torch.cat((torch.zeros(1, dtype=torch.float64), SCORES.double().softmax(-1).cumsum(-1)))
    u = float(choose_uniform(11, 0))
    expected = float((edges - u).abs().min())
    assert abs(float(sampled.margins[0]) - expected) < 1e-12
    assert math.isnan(sampler_of(SamplingParams()).sample(SCORES[None]).margins[0])


def choose_uniform(seed: int, number: int) -> Any:
    from kvpager.sampling.random import uniforms

    return uniforms(np.array([seed], dtype=np.uint64), np.array([number], dtype=np.uint64))[0]


def test_uniforms_are_uniform_and_unrelated() -> None:
    from kvpager.sampling.random import uniforms

    seeds, draws = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij")
    values = uniforms(seeds.ravel(), draws.ravel()).reshape(200, 200)
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 5 * math.sqrt(2 * 99)
    for axis in (0, 1):
        neighbours = np.moveaxis(values, axis, 0)
        assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.025


def test_rows_are_numbered_as_a_decode_batch_numbers_them() -> None:
    sampler = Sampler(4, 2)
    assert [sampler.add(SamplingParams(), n, [0]) for n in range(2)] == [0, 1]
    with pytest.raises(StateError, match="the sampler is full: 2 rows"):
        sampler.add(SamplingParams(), 0, [0])
    sampler.remove(0)
    assert sampler.add(SamplingParams(), 0, [0]) == 1
    with pytest.raises(ArgumentError, match=r"`row`: wanted 0 … 1, got 2"):
        sampler.remove(2)


@pytest.mark.parametrize(
    ("scores", "rows", "message"),
    [
        (torch.zeros(1, 5), None, "`scores`: wanted shape [R, 4], got [1, 5]"),
        (torch.zeros(1, 4).half(), None, "`scores`: wanted float32 or float64, got torch.float16"),
        (torch.zeros(1, 4), [0, 1], "`rows`: wanted one row for each of 1 scores, got 2 rows"),
        (torch.zeros(1, 4), [1], "`rows`: wanted rows in 0 … 0, got [1]"),
    ],
)
def test_bad_calls_are_named(scores: Tensor, rows: list[int] | None, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        sampler_of(SamplingParams()).sample(scores, rows)
    assert str(caught.value) == message


def test_tokens_of_another_vocabulary_are_refused() -> None:
    for values in ({"logit_bias": {4: 1.0}}, {"allowed_token_ids": [4]}, {"stop_token_ids": [4]}):
        sampler = Sampler(4, 1)
        with pytest.raises(ArgumentError, match=rf"`{next(iter(values))}`: wanted token ids in 0 … 3, got 4"):
            sampler.add(SamplingParams(**values), 0, [0])  # type: ignore[arg-type]
        assert sampler.num_rows == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens`: wanted at least 1, got 0"),
        ({"n": 0}, "`n`: wanted at least 1, got 0"),
        ({"min_tokens": 17}, "`min_tokens`: wanted at most `max_tokens` 16, got 17"),
        ({"temperature": -0.1}, "`temperature`: wanted a finite number of at least 0, got -0.1"),
        ({"temperature": math.nan}, "`temperature`: wanted a finite number of at least 0, got nan"),
        ({"temperature": math.inf}, "`temperature`: wanted a finite number of at least 0, got inf"),
        ({"top_k": -2}, "`top_k`: wanted at least -1, got -2"),
        ({"top_p": 1.1}, "`top_p`: wanted 0 … 1, got 1.1"),
        ({"top_p": math.nan}, "`top_p`: wanted 0 … 1, got nan"),
        ({"min_p": -0.1}, "`min_p`: wanted 0 … 1, got -0.1"),
        ({"repetition_penalty": 0}, "`repetition_penalty`: wanted a finite number above 0, got 0"),
        ({"presence_penalty": 3}, "`presence_penalty`: wanted -2 … 2, got 3"),
        ({"frequency_penalty": -3}, "`frequency_penalty`: wanted -2 … 2, got -3"),
        ({"logit_bias": {1: 101}}, "`logit_bias`: wanted -100 … 100 for each token, got 101 for token 1"),
        ({"logit_bias": {-1: 1}}, "`logit_bias`: wanted token ids of at least 0, got -1"),
        ({"allowed_token_ids": []}, "`allowed_token_ids`: wanted None or at least one token, got none"),
        ({"stop_token_ids": [True]}, "`stop_token_ids`: wanted token ids of at least 0, got True"),
        ({"stop": ["a", ""]}, "`stop`: wanted texts of at least one character, got ['a', '']"),
        ({"logprobs": -1}, "`logprobs`: wanted None or at least 0, got -1"),
        ({"logprobs": 1.5}, "`logprobs`: wanted None or a whole number, got 1.5"),
        ({"max_tokens": 2.5}, "`max_tokens`: wanted a whole number, got 2.5"),
        ({"max_tokens": "3"}, "`max_tokens`: wanted a whole number, got '3'"),
        ({"n": True}, "`n`: wanted a whole number, got True"),
        ({"top_k": None}, "`top_k`: wanted a whole number, got None"),
        ({"seed": 1.5}, "`seed`: wanted None or a whole number, got 1.5"),
        ({"temperature": "0.5"}, "`temperature`: wanted a number, got '0.5'"),
        ({"top_p": None}, "`top_p`: wanted a number, got None"),
        ({"logit_bias": [1, 2]}, "`logit_bias`: wanted None or a mapping, got [1, 2]"),
        ({"logit_bias": {1: "2"}}, "`logit_bias`: wanted -100 … 100 for each token, got 2 for token 1"),
        ({"stop": 5}, "`stop`: wanted None, a text or a list of texts, got 5"),
        ({"stop": [""]}, "`stop`: wanted texts of at least one character, got ['']"),
        ({"stop_token_ids": 5}, "`stop_token_ids`: wanted None or a list of token ids, got 5"),
        ({"allowed_token_ids": 5}, "`allowed_token_ids`: wanted None or a list of token ids, got 5"),
        ({"ignore_eos": "no"}, "`ignore_eos`: wanted True or False, got 'no'"),
        ({"seed": -1}, "`seed`: wanted 0 … 2^64 - 1, got -1"),
        ({"seed": 2**64}, "`seed`: wanted 0 … 2^64 - 1"),
    ],
)
def test_bad_parameters_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_none_is_the_default_wherever_vllm_takes_it() -> None:
    names = ("stop", "stop_token_ids", "seed", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids")
    params = SamplingParams(**dict.fromkeys(names))
    params.check_vocabulary(1)
    assert params.stop_texts == ()
