"""Rounds of the engines in turns, and what a round is made of."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neighbours import Neighbours
from torch import nn

from engine.engines import Generate
from engine.linear import linear_seconds
from engine.models import make_prompts
from kvpager import LLM


class Shares:
    """Seconds that our engine spends in the parts that it is told to watch, and its steps."""

    def __init__(self, llm: LLM) -> None:
        model: Any = llm.runner.model
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self.restart()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = self._timed(layer.forward, "linear")
        model.logits = self._timed(model.logits, "linear", "forward")
        model.forward = self._timed(model.forward, "forward")
        llm.runner.cache.attend = self._timed(llm.runner.cache.attend, "attention")  # type: ignore[method-assign]
        llm.engine.step = self._timed(llm.engine.step, "steps")  # type: ignore[method-assign]

    def restart(self) -> None:
        self.seconds = dict.fromkeys(("linear", "attention", "forward", "steps"), 0.0)
        self.num_steps = 0

    def _timed(self, call: Callable[..., Any], *names: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            elapsed = time.perf_counter() - started
            for name in names:
                self.seconds[name] += elapsed
            self.num_steps += "steps" in names
            return result

        return timed


@dataclass
class Row:
    """One batch size: seconds of each round, and the shares of ours.

    Attributes:
        batch: prompts.
        num_new: new tokens of each.
        seconds: of each engine, by name.
        torch_linear: of torch's products alone.
        linear: of our linear layers in our rounds.
        attention: of `PagedKVCache.attend` in our rounds.
        host: of everything but the model's forward pass in our rounds.
        num_steps: of one of our rounds.
        neighbours: cores that other processes used during each run.
        same: for each engine the requests whose tokens are all those of transformers.
    """

    batch: int
    num_new: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    torch_linear: list[float] = field(default_factory=list)
    linear: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    num_steps: int = 0
    neighbours: list[float] = field(default_factory=list)
    same: dict[str, int] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name])

    @property
    def figures(self) -> dict[str, float]:
        """What the table shows, by name."""
        ours, torch_linear = self.median("kvpager"), statistics.median(self.torch_linear)
        rates = {name: self.batch * self.num_new / self.median(name) for name in self.seconds}  # prefill included
        return {
            **rates,
            "ratio": self.median("transformers") / ours,
            "ceiling": self.median("transformers") / torch_linear,
            "of_ceiling": torch_linear / ours,
            "ms_a_step": ours / self.num_steps * 1e3,
            "linear_share": statistics.median(self.linear) / ours,
            "attention_share": statistics.median(self.attention) / ours,
            "host_share": statistics.median(self.host) / ours,
            "spread": max(self.seconds["kvpager"]) / min(self.seconds["kvpager"]) - 1,
        }


def warm_up(engines: dict[str, Generate], batch: int, vocab_size: int) -> None:
    """Short prompts through every engine, so that no round pays for what is made once."""
    prompts = [prompt[:16] for prompt in make_prompts(batch, vocab_size)]
    for generate in engines.values():
        generate(prompts, 2)


def measure(
    llm: LLM, watch: Shares, model: Any, engines: dict[str, Generate], row: Row, rounds: int, our_processes: list[int]
) -> None:
    """Fills `row`: in each round every engine generates once, then the products are timed alone."""
    prompts = make_prompts(row.batch, llm.model_config.vocab_size)
    for _ in range(rounds):
        watch.restart()
        tokens = {}
        for name, generate in engines.items():
            with Neighbours(*our_processes) as neighbours:
                seconds, tokens[name] = generate(prompts, row.num_new)
            row.seconds.setdefault(name, []).append(seconds)
            row.neighbours.append(neighbours.cores)
        row.linear.append(watch.seconds["linear"])
        row.attention.append(watch.seconds["attention"])
        row.num_steps = watch.num_steps
        row.host.append(row.seconds["kvpager"][-1] - watch.seconds["forward"])
        row.torch_linear.append(linear_seconds(model, prompts, row.num_new, 2048))
        for name, made in tokens.items():
            row.same[name] = sum(ours == theirs for ours, theirs in zip(made, tokens["transformers"], strict=True))
