"""What the prefix cache is worth to whoever waits for a first token."""

import gc
import statistics
from pathlib import Path
from typing import Any

from engine.models import make_shared_prompts
from kvpager import LLM, SamplingParams

NUM_PROMPTS, NUM_SHARED, NUM_OWN = 64, 1024, 32


def mean_seconds_to_first_token(checkpoint: Path, dtype: str, caching: bool) -> float:
    """Over 64 prompts of 1,024 shared and 32 own tokens, all there at once; an engine of its own."""
    llm = LLM(checkpoint, dtype=dtype, enable_prefix_caching=caching, num_blocks=5000)
    prompts: Any = make_shared_prompts(NUM_PROMPTS, NUM_SHARED, NUM_OWN, llm.model_config.vocab_size)
    llm.generate([[3] * 64], SamplingParams(max_tokens=2, ignore_eos=True))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    firsts = [output.metrics.time_to_first_token_seconds for output in outputs if output.metrics is not None]
    return statistics.fmean(first for first in firsts if first is not None)


def measure_prefix_cache(checkpoint: Path, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Seconds without and with the cache, in turns."""
    means: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        for name, runs in means.items():
            runs.append(mean_seconds_to_first_token(checkpoint, dtype, caching=name == "with"))
            gc.collect()  # the pool goes before the next one comes
    return means
