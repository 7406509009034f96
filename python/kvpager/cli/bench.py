"""`kvpager bench`: throughput of many requests, latency of one batch; random token ids, so any model can be measured.

Times are of the whole call: scheduling, model, sampling, text. The first run of each kind warms up and is not counted.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kvpager.engine import LLM, Prompt
from kvpager.errors import ArgumentError, ConfigError
from kvpager.sampling import SamplingParams


def random_prompts(llm: LLM, num_prompts: int, input_len: int, seed: int) -> list[Prompt]:
    """Prompts of token ids [num_prompts][input_len], no two with a common beginning but by chance.

    Raises:
        ArgumentError: no prompts, or empty ones.
    """
    for name, value in (("num_prompts", num_prompts), ("input_len", input_len)):
        if value < 1:
            raise ArgumentError(name, "at least 1", value)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, llm.model_config.vocab_size, (num_prompts, input_len), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def throughput(llm: LLM, *, num_prompts: int, input_len: int, output_len: int, seed: int = 0) -> dict[str, Any]:
    """All requests at once, as fast as they go.

    Returns:
        Figures: seconds, requests and tokens per second, prompt tokens per second included and not.
    """
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    llm.generate(random_prompts(llm, 1, input_len, seed + 1), SamplingParams(max_tokens=1))
    prompts = random_prompts(llm, num_prompts, input_len, seed)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "seconds": seconds,
        "requests_per_second": num_prompts / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_output + num_prompts * input_len) / seconds,
    }


def latency(
    llm: LLM, *, batch_size: int, input_len: int, output_len: int, num_iters: int, seed: int = 0
) -> dict[str, Any]:
    """One batch from its prompts to its last token, again and again.

    Returns:
        Figures in milliseconds: of the batch, to the first token, between tokens; medians, and the slowest batch.
    """
    if num_iters < 1:
        raise ArgumentError("num_iters", "at least 1", num_iters)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    totals, firsts, gaps = list[float](), list[float](), list[float]()
    for iteration in range(num_iters + 1):
        prompts = random_prompts(llm, batch_size, input_len, seed + iteration)
        started = time.perf_counter()
        moments = {0: list[float]()}
        for event in llm.stream(prompts, params):
            moments.setdefault(event.index, []).append(time.perf_counter() - started)
        if iteration == 0:
            continue
        totals.append(max(times[-1] for times in moments.values()))
        firsts += [times[0] for times in moments.values()]
        gaps += [(times[-1] - times[0]) / (len(times) - 1) for times in moments.values() if len(times) > 1]
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "num_iters": num_iters,
        "latency_ms": 1e3 * statistics.median(totals),
        "slowest_ms": 1e3 * max(totals),
        "first_token_ms": 1e3 * statistics.median(firsts),
        "between_tokens_ms": 1e3 * statistics.median(gaps) if gaps else None,
    }


def lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures for people: name and value."""
    shown = []
    for name, value in figures.items():
        text = "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        shown.append((name.replace("_", " "), text))
    return shown


def save(figures: dict[str, Any], path: Path | None) -> None:
    """Writes the figures as JSON, where a path is given."""
    if path is not None:
        try:
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"can't write `{path}`: {error.strerror}") from None
