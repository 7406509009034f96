"""What choosing the next tokens costs, against `logits.argmax`, the least that any sampler does.

Why it matters: sampling is host time between two steps. A sampler that sorts the vocabulary of every row can cost as
much as the model. Scores are as peaked as a trained model's: the best token of a row has about half the probability.
Read the last column: how many times `logits.argmax(-1)` of the same scores, same threads, in alternating runs.

    python benches/sampling.py [--threads 2] [--batch 32] [--vocab 32768] [--json out.json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvpager.sampling import Sampler, SamplingParams

PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top-p 0.9, temperature 3 (flat)": {"temperature": 3.0, "top_p": 0.9},
    "greedy, penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
}


def peaked_scores(batch: int, vocab_size: int) -> torch.Tensor:
    """[batch, vocab_size] float32: a Zipf-like fall: few tokens, anywhere, hold most of the probability."""
    generator = torch.Generator().manual_seed(0)
    fall = -2.0 * torch.arange(1, vocab_size + 1).float().log()
    rows = [fall[torch.randperm(vocab_size, generator=generator)] for _ in range(batch)]
    return torch.stack(rows) + 0.3 * torch.randn(batch, vocab_size, generator=generator)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    scores = peaked_scores(options.batch, options.vocab)
    rows = []
    for name, values in PARAMETERS.items():
        sampler = Sampler(options.vocab, options.batch)
        prompt = torch.randint(0, options.vocab, (options.batch, 512), generator=torch.Generator().manual_seed(1))
        for number in range(options.batch):
            sampler.add(SamplingParams(**values), number, prompt[number].tolist())  # type: ignore[arg-type]
        ours, argmax = [], []
        for _ in range(options.rounds):
            fresh = scores.clone()
            argmax.append(seconds(lambda fresh=fresh: fresh.argmax(-1)))
            ours.append(seconds(lambda sampler=sampler, fresh=fresh: sampler.sample(fresh)))
        ours_us, argmax_us = 1e6 * statistics.median(ours), 1e6 * statistics.median(argmax)
        spread = 1e6 * (statistics.quantiles(ours, n=4)[2] - statistics.quantiles(ours, n=4)[0])
        rows.append(
            {"params": name, "us": ours_us, "iqr_us": spread, "argmax_us": argmax_us, "ratio": ours_us / argmax_us}
        )
    print(f"batch {options.batch}, vocabulary {options.vocab:,}, float32, {options.threads} threads; medians")
    print(f"{'params':<32}{'µs':>9}{'± IQR':>9}{'argmax µs':>11}{'of argmax':>10}")
    for row in rows:
        print(
            f"{row['params']:<32}{row['us']:>9,.0f}{row['iqr_us']:>9,.0f}{row['argmax_us']:>11,.0f}{row['ratio']:>10.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
