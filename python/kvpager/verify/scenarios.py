"""`run_scenarios`: runs the same requests in many ways and compares each token with transformers' eager attention.

transformers sees each text once, whole and without a cache: it shares neither code nor order of work. A token that
differs is a fault, unless transformers' own scores of the two lie closer than rounding in float32 (`CLOSE`): that is
reported as a close call, and the rest of that text is not compared, as it continues another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpager.config import EngineConfig
from kvpager.engine import LLM, CompletionOutput, Engine
from kvpager.engine.build import runner_over
from kvpager.sampling import SamplingParams
from kvpager.verify.compare import load_transformers, require_float32

CLOSE = 1e-4  # between transformers' two scores
_SHOWN = 5  # likeliest tokens kept of each step


@dataclass(frozen=True)
class Scenario:
    """One way to run the requests.

    Attributes:
        name: in words.
        settings: fields of `EngineConfig` that differ.
        times: how often they are run in the same engine; from the second time on, prompts are found in the cache.
        n: completions of each request, made by fork.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1
    n: int = 1


@dataclass(frozen=True)
class Difference:
    """The first token of a completion that is not transformers'.

    Attributes:
        request, step: where.
        ours, theirs: the two tokens.
        our_scores, their_scores: log-probabilities of (ours, theirs); None where it was not among our likeliest.
    """

    request: int
    step: int
    ours: int
    theirs: int
    our_scores: tuple[float, float | None]
    their_scores: tuple[float, float]

    @property
    def is_close(self) -> bool:
        """Whether rounding explains it."""
        return self.their_scores[1] - self.their_scores[0] < CLOSE


@dataclass(frozen=True)
class Verdict:
    """The result of one scenario.

    Attributes:
        scenario: the one that was run.
        num_tokens: compared tokens.
        num_cached_tokens, num_preemptions: how often the scenario's own means came to use.
        differences: close calls too.
    """

    scenario: Scenario
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    differences: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        """Whether every difference is a close call."""
        return all(difference.is_close for difference in self.differences)


def scenarios_for(prompts: Sequence[Sequence[int]], max_tokens: int, block_size: int) -> tuple[Scenario, ...]:
    """The ways in which these requests are run."""
    longest = max(map(len, prompts)) + max_tokens
    just_enough = -(-longest // block_size) + 2
    return (
        Scenario("one by one, no cache", {"max_num_seqs": 1, "enable_prefix_caching": False}),
        Scenario("together"),
        Scenario("in threes", {"max_num_seqs": 3}),
        Scenario("prompts in chunks", {"max_num_seqs": 4, "max_num_batched_tokens": 7}),
        Scenario("prefix hits", times=2),
        Scenario("preemption", {"num_blocks": just_enough, "watermark_blocks": 0, "enable_prefix_caching": False}),
        Scenario("forks", n=3),
    )


def run_scenarios(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Verdict]:
    """Run all scenarios. Memory: transformers' copy of the weights, and all logits of one text at a time.

    Args:
        llm: the model, in float32; its own pool is not touched.
        prompts: token ids.
        max_tokens: of each completion.

    Raises:
        ConfigError: transformers is not installed, or the engine computes or caches in another dtype.
    """
    require_float32(llm)
    reference = Reference(load_transformers(llm), prompts)
    found = []
    for scenario in scenarios_for(prompts, max_tokens, llm.config.block_size):
        found.append(_run(llm, scenario, prompts, max_tokens, reference))
    return found


class Reference:
    """transformers' scores along our texts, computed once for each text."""

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._prompts = prompts
        self._scores: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def scores(self, request: int, tokens: tuple[int, ...]) -> Tensor:
        """Log-probabilities [len(tokens), V] from which each of these tokens could have been chosen."""
        key = (request, tokens)
        if key not in self._scores:
            prompt = self._prompts[request]
            device = next(self._model.parameters()).device
            text = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
            logits = self._model(text, use_cache=False).logits[0, len(prompt) - 1 :]
            self._scores[key] = logits.float().log_softmax(-1).cpu()
        return self._scores[key]


def _run(
    llm: LLM, scenario: Scenario, prompts: Sequence[Sequence[int]], max_tokens: int, reference: Reference
) -> Verdict:
    engine = _engine(llm, scenario.settings, prompts, max_tokens)
    params = SamplingParams(max_tokens=max_tokens, n=scenario.n, ignore_eos=True, logprobs=_SHOWN)
    differences: list[Difference] = []
    num_tokens = 0
    for _ in range(scenario.times):
        numbers = {engine.add_request(list(prompt), params): number for number, prompt in enumerate(prompts)}
        while engine.has_unfinished_requests():
            for event in engine.step():
                if event.output is None:
                    continue
                for completion in event.output.outputs:
                    difference = _first_difference(numbers[event.request_id], completion, reference)
                    num_tokens += len(completion.token_ids) if difference is None else difference.step + 1
                    differences += [] if difference is None else [difference]
    stats = engine.stats()
    return Verdict(scenario, num_tokens, stats.num_cached_tokens, stats.num_preemptions, tuple(differences))


def _engine(llm: LLM, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int) -> Engine:
    """An engine over the same weights with a pool of its own, by default large enough for all requests three times."""
    each = [-(-(len(prompt) + max_tokens) // llm.config.block_size) for prompt in prompts]
    kept = {name: getattr(llm.config, name) for name in ("device", "block_size", "attention_backend", "enforce_eager")}
    config = EngineConfig(**{"dtype": "float32", "num_blocks": 3 * sum(each) + 1, **kept, **settings})
    return Engine(runner_over(llm.runner.model, config, "float32"), llm.model_config, config)


def _first_difference(request: int, completion: CompletionOutput, reference: Reference) -> Difference | None:
    tokens = completion.token_ids
    scores = reference.scores(request, tokens)
    differs = (scores.argmax(dim=-1) != torch.tensor(tokens)).nonzero()
    if not len(differs):
        return None
    step = int(differs[0])
    ours, theirs = tokens[step], int(scores[step].argmax())
    kept = completion.logprobs[step] if completion.logprobs else {}
    return Difference(
        request=request,
        step=step,
        ours=ours,
        theirs=theirs,
        our_scores=(kept[ours].logprob, kept[theirs].logprob if theirs in kept else None),
        their_scores=(float(scores[step, ours]), float(scores[step, theirs])),
    )


def report(verdicts: Sequence[Verdict], num_prompts: int) -> list[str]:
    """Lines for people."""
    lines = []
    for verdict in verdicts:
        did = [f"{verdict.num_tokens} tokens"]
        did += [f"{verdict.num_cached_tokens} prompt tokens from the cache"] if verdict.num_cached_tokens else []
        did += [f"{verdict.num_preemptions} preemptions"] if verdict.num_preemptions else []
        close = sum(difference.is_close for difference in verdict.differences)
        result = "equal" if verdict.passed else "DIFFERS"
        result += f", {close} close calls" if close else ""
        lines.append(f"{verdict.scenario.name:<22}{result}: {', '.join(did)}")
        lines += [_told(difference) for difference in verdict.differences]
    passed = all(verdict.passed for verdict in verdicts)
    lines.append(f"{num_prompts} requests: {'as transformers, in every scenario' if passed else 'not as transformers'}")
    return lines


def _told(difference: Difference) -> str:
    our_own, our_other = difference.our_scores
    their_other, their_own = difference.their_scores
    other = "-" if our_other is None else f"{our_other:.6f}"
    return (
        f"  request {difference.request}, token {difference.step}: ours {difference.ours}, transformers' "
        f"{difference.theirs}; log-probabilities of these two here {our_own:.6f} and {other}, "
        f"there {their_other:.6f} and {their_own:.6f}"
    )
