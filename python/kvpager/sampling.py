"""How the next token is chosen: `SamplingParams` says it, `sample` does it.

Each request has a generator of its own, so what is drawn for one depends on its logits and seed only, never on who
shares the batch. Cost: O(rows · vocabulary).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpager.errors import ArgumentError

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Wishes of one request.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token every time (the default: results can be compared and repeated);
            above 0 draws from softmax(logits / temperature).
        seed: of the request's generator, 0 … 2⁶⁴ − 1; None: made from the engine's seed and the request's number.
        ignore_eos: generate on past the end-of-text token.

    Raises:
        ArgumentError: a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ArgumentError("max_tokens", "at least 1", self.max_tokens)
        if not 0.0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", "a finite number of at least 0", self.temperature)
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise ArgumentError("seed", "0 … 2^64 - 1", self.seed)


def make_generator(params: SamplingParams, engine_seed: int, request_number: int) -> torch.Generator | None:
    """The generator of one request; None where nothing is drawn. On the CPU, so a seed means the same everywhere."""
    if params.temperature == 0.0:
        return None
    seed = params.seed
    if seed is None:
        seed = (engine_seed * 0x9E3779B97F4A7C15 + request_number + 1) & _MAX_SEED
    return torch.Generator().manual_seed(seed)


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> list[int]:
    """The next token of every row.

    Args:
        logits: [B, V] float32, any device.
        params: B of them.
        generators: B of them, from `make_generator`; those of drawn rows advance.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (wishes, generator) in enumerate(zip(params, generators, strict=True)):
        if generator is not None:
            # float64: dividing by a small temperature must not overflow to inf - inf
            scaled = logits[row].cpu().double() / wishes.temperature
            tokens[row] = int(torch.multinomial((scaled - scaled.max()).softmax(dim=-1), 1, generator=generator))
    return tokens
