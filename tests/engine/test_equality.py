"""Whatever the schedule, each request gets the tokens of its solo run: exactly, in float64 on the readable operations.

The solo runs go through `forward_eager` with a manager that has no index: no batch, no scheduler, no cached prefix,
one sequence. The scenarios draw everything that may not matter: arrivals, priorities, pool, block size, budgets,
caching, forks, seeds; and some fail on purpose.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpager import KVBlockManager, PagedKVCache, SamplingParams
from kvpager.config import CacheConfig, EngineConfig, ModelConfig
from kvpager.engine import Engine, RequestOutput
from kvpager.errors import OutOfBlocksError, StateError
from kvpager.models import DecoderForCausalLM
from kvpager.runner import ModelRunner
from kvpager.sampling import Sampler, request_seed
from kvpager.verify import forward_eager

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_ids=(7,),
)
MOST_TOKENS = 12
NUM_GROUPS, GROUP = 30, 10  # scenarios: 300 with no fault, and as many groups of 3 with faults


class BoomError(Exception):
    pass


def make_model() -> DecoderForCausalLM:
    """Weights wide enough that scores are far from flat, and norms that are not all one."""
    generator = torch.Generator().manual_seed(3)
    model = DecoderForCausalLM(CONFIG).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 2 * CONFIG.hidden_size**-0.5 * noise)
    return model


def make_prompts() -> list[tuple[int, ...]]:
    """Three stems, and prompts that follow them for a while: prefixes of all lengths are shared."""
    rng = random.Random(11)
    stems = [[rng.randrange(8, 61) for _ in range(16)] for _ in range(3)]
    prompts = []
    for _ in range(18):
        stem, kept = rng.choice(stems), rng.randint(0, 14)
        prompts.append((*stem[:kept], *(rng.randrange(8, 61) for _ in range(rng.randint(1, 5)))))
    return prompts


PROMPTS = make_prompts()


@dataclass(frozen=True)
class Arrival:
    prompt: int
    params: SamplingParams
    step: int  # of its arrival
    priority: int = 0


@dataclass(eq=False)
class Lab:
    """The model, and solo runs by prompt and arrivals, each made once."""

    model: DecoderForCausalLM

    def runner(self, num_blocks: int, block_size: int, *, caching: bool) -> ModelRunner:
        cache = PagedKVCache.from_config(
            CONFIG, CacheConfig(block_size=block_size, num_blocks=num_blocks), dtype=torch.float64
        )
        cache.storage.fill_(float("nan"))
        return ModelRunner(self.model, cache, KVBlockManager(num_blocks, block_size, enable_prefix_caching=caching))

    def engine(self, config: EngineConfig) -> Engine:
        assert config.num_blocks is not None
        runner = self.runner(config.num_blocks, config.block_size, caching=config.enable_prefix_caching)
        return Engine(runner, CONFIG, config)

    @functools.cache  # noqa: B019  (one per session)
    def greedy(self, prompt: int) -> tuple[int, ...]:
        return self.solo(prompt, SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True), 0)

    def solo(self, prompt: int, params: SamplingParams, seed: int) -> tuple[int, ...]:
        runner = self.runner(8, 8, caching=False)
        runner.block_manager.create_sequence(0)
        sampler = Sampler(CONFIG.vocab_size, 1)
        sampler.add(params, seed, PROMPTS[prompt])
        tokens: list[int] = []
        while len(tokens) < params.max_tokens:
            scores = forward_eager(runner, [0], [tokens[-1:] or PROMPTS[prompt]])
            chosen = sampler.sample(scores)
            assert chosen.margins[0] != chosen.margins[0] or chosen.margins[0] > 1e-9, "too close to call"
            sampler.accept([0], chosen.token_ids)
            tokens.append(int(chosen.token_ids[0]))
            if tokens[-1] in CONFIG.eos_token_ids and not params.ignore_eos:
                break
        return tuple(tokens)

    def expected(self, arrival: Arrival, completion: int) -> tuple[int, ...]:
        params = arrival.params
        if params.temperature:
            return self.solo(arrival.prompt, params, request_seed(params, 0, 0, completion))
        tokens = self.greedy(arrival.prompt)[: params.max_tokens]
        if 7 in tokens and not params.ignore_eos:
            tokens = tokens[: tokens.index(7) + 1]
        return tokens


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab(make_model())


def draw_config(rng: random.Random, longest: int) -> EngineConfig:
    block_size = rng.choice([1, 2, 3, 4, 8])
    least = -(-longest // block_size)
    num_blocks = least + rng.choice([0, 1, 2, least, 6 * least])
    rows = rng.randint(2, 6)
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice([0, 1, 3, 40]),
        enable_prefix_caching=rng.random() < 0.75,
        watermark_blocks=rng.choice([None, 0, 1, 2]),
    )


def draw_arrivals(rng: random.Random, *, seeded: bool) -> list[Arrival]:
    arrivals = []
    for _ in range(rng.randint(2, 7)):
        drawn = seeded and rng.random() < 0.3
        params = SamplingParams(
            max_tokens=rng.randint(1, 4 if drawn else MOST_TOKENS),
            ignore_eos=rng.random() < 0.5,
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.7, 1.5]) if drawn else 0.0,
            top_k=rng.choice([0, 5]) if drawn else 0,
            seed=rng.randrange(5),
        )
        arrivals.append(
            Arrival(rng.randrange(len(PROMPTS)), params, rng.choice([0, 0, rng.randint(1, 15)]), rng.choice([0, 0, 1]))
        )
    return sorted(arrivals, key=lambda arrival: arrival.step)


def run(
    engine: Engine,
    arrivals: list[Arrival],
    *,
    before_step: Callable[[int], None] = lambda _: None,
    forgiven: tuple[type[BaseException], ...] = (),
) -> tuple[dict[str, Arrival], dict[str, RequestOutput]]:
    """Everything to its end; arrivals and outputs by request."""
    asked: dict[str, Arrival] = {}
    outputs: dict[str, RequestOutput] = {}
    left, step = list(arrivals), 0
    while left or engine.has_unfinished_requests():
        while left and left[0].step <= step:
            arrival = left.pop(0)
            name = engine.add_request(PROMPTS[arrival.prompt], arrival.params, priority=arrival.priority)
            asked[name] = arrival
        before_step(step)
        try:
            events = engine.step()
        except forgiven:
            events = []
        for event in events:
            if event.output is not None:
                assert event.request_id not in outputs, "one last event for each request"
                outputs[event.request_id] = event.output
        step += 1
        assert step < 3000
        if step % 8 == 0:
            assert engine.block_manager.check_invariants() == []
    assert outputs.keys() == asked.keys()
    return asked, outputs


def assert_as_solo(lab: Lab, asked: dict[str, Arrival], outputs: dict[str, RequestOutput]) -> int:
    """Tokens compared. A request that was aborted has a beginning of its solo tokens."""
    compared = 0
    for name, output in outputs.items():
        for completion in output.outputs:
            expected = lab.expected(asked[name], completion.index)
            if completion.finish_reason == "abort":
                expected = expected[: len(completion.token_ids)]
            assert completion.token_ids == expected, (name, asked[name])
            compared += len(expected)
    return compared


def assert_nothing_left(engine: Engine) -> None:
    manager = engine.block_manager
    assert manager.stats.live == 0
    assert manager.num_sequences == 0
    assert manager.check_invariants() == []
    assert engine.sampler.num_rows == 0
    assert not engine._rows.completions
    assert not engine._requests


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_b104_tokens_are_those_of_the_solo_run(lab: Lab, group: int) -> None:
    """300 scenarios in 30 groups."""
    compared = preempted = found = 0
    for scenario in range(GROUP):
        rng = random.Random(1000 * group + scenario)
        arrivals = draw_arrivals(rng, seeded=scenario % 3 == 0)
        longest = max(len(PROMPTS[arrival.prompt]) + arrival.params.max_tokens for arrival in arrivals)
        engine = lab.engine(draw_config(rng, longest))
        asked, outputs = run(engine, arrivals)
        compared += assert_as_solo(lab, asked, outputs)
        assert_nothing_left(engine)
        preempted += engine.stats().num_preemptions
        found += engine.stats().num_cached_tokens
    assert compared > 100, "the scenarios must say something"
    assert preempted + found > 0


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_after_any_fault_nothing_is_lost(lab: Lab, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in model, sampler and allocator, clients that go away: blocks come back, others get their tokens."""
    for scenario in range(3):
        rng = random.Random(77_000 + 1000 * group + scenario)
        arrivals = draw_arrivals(rng, seeded=False)
        longest = max(len(PROMPTS[arrival.prompt]) + arrival.params.max_tokens for arrival in arrivals)
        engine = lab.engine(draw_config(rng, longest))
        with monkeypatch.context() as patched:
            inject(patched, engine, rng)
            asked, outputs = run(
                engine, arrivals, before_step=leaving_clients(engine, rng), forgiven=(BoomError, StateError)
            )
        assert_as_solo(lab, asked, outputs)
        assert_nothing_left(engine)


def inject(patched: pytest.MonkeyPatch, engine: Engine, rng: random.Random) -> None:
    """Makes calls fail now and then: before they do anything, as all-or-nothing calls do, or after."""

    def flaky(function: Callable[..., Any], error: Exception, *, after: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fails = rng.random() < 0.15
            if fails and not after:
                raise error
            result = function(*args, **kwargs)
            if fails:
                raise error
            return result

        return call

    for owner, name, after in (
        (engine.runner.cache, "attend", False),
        (engine.runner, "run", True),
        (engine.runner, "logits", False),
        (engine.sampler, "sample", False),
    ):
        if rng.random() < 0.5:
            patched.setattr(owner, name, flaky(getattr(owner, name), BoomError(name), after=after))
    if rng.random() < 0.5:
        patched.setattr(engine.scheduler, "batch", FlakyBatch(engine.scheduler.batch, rng))


@dataclass
class FlakyBatch:
    """A batch whose pool seems to be empty now and then."""

    batch: Any
    rng: random.Random

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)

    def step(self, *args: Any) -> Any:
        if self.rng.random() < 0.15:
            raise OutOfBlocksError(1, 0, 0, 1, 0)
        return self.batch.step(*args)


def leaving_clients(engine: Engine, rng: random.Random) -> Callable[[int], None]:
    def leave(_step: int) -> None:
        if engine._requests and rng.random() < 0.05:
            name = rng.choice(list(engine._requests))
            aborted = engine.abort(name)
            assert aborted is not None
            assert aborted.finished
            assert engine.abort(name) is None

    return leave


def test_b104_one_request_among_any_neighbours(lab: Lab) -> None:
    """X alone, and with seven others that arrive at steps 0 … 6: with room for all, then with far too little."""
    x = Arrival(5, SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True), 0)
    preempted = {100: 0, 9: 0}
    for seed in range(20):
        rng = random.Random(seed)
        others = [
            Arrival(rng.randrange(len(PROMPTS)), SamplingParams(max_tokens=rng.randint(1, MOST_TOKENS)), n)
            for n in range(7)
        ]
        for caching in (False, True):
            for num_blocks in (100, 9):
                engine = lab.engine(
                    EngineConfig(block_size=4, num_blocks=num_blocks, max_num_seqs=8, enable_prefix_caching=caching)
                )
                asked, outputs = run(engine, [x, *others])
                assert_as_solo(lab, asked, outputs)
                preempted[num_blocks] += engine.stats().num_preemptions
    assert preempted[100] == 0
    assert preempted[9] > 0


def test_a_row_of_nan_ends_its_own_request_only(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """b107 through the engine: the request ends with an error, its neighbours with their tokens."""
    engine = lab.engine(EngineConfig(block_size=4, num_blocks=60))
    logits = engine.runner.logits

    def poisoned(hidden: torch.Tensor, token_index: Any = None) -> torch.Tensor:
        scores = logits(hidden, token_index).clone()
        if len(scores) == 3:
            scores[1] = float("nan")
        return scores

    monkeypatch.setattr(engine.runner, "logits", poisoned)
    arrivals = [Arrival(n, SamplingParams(max_tokens=6, ignore_eos=True), 0) for n in range(3)]
    asked, outputs = run(engine, arrivals)
    first, second, third = (outputs[name] for name in sorted(outputs, key=int))
    assert (second.outputs[0].finish_reason, second.outputs[0].token_ids) == ("error", ())
    for output in (first, third):
        assert output.outputs[0].token_ids == lab.expected(asked[output.request_id], 0)
    assert_nothing_left(engine)
