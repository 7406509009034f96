"""How the next token is chosen: `SamplingParams` says it, `Sampler` does it for a batch at once."""

from kvpager.sampling.logprobs import (
    Logprob,
    PositionLogprobs,
    position_logprobs,
    positions_per_piece,
    prompt_logprob_bytes,
    with_texts,
)
from kvpager.sampling.params import SamplingParams
from kvpager.sampling.random import request_seed
from kvpager.sampling.sampler import SampledTokens, Sampler

__all__ = [
    "Logprob",
    "PositionLogprobs",
    "SampledTokens",
    "Sampler",
    "SamplingParams",
    "position_logprobs",
    "positions_per_piece",
    "prompt_logprob_bytes",
    "request_seed",
    "with_texts",
]
