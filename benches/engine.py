"""The engine against transformers' `generate`, and what the prefix cache is worth.

    python benches/engine.py [--model small|0.6B] [--batches 1,8,32] [--new 64] [--rounds 3] [--json FILE]

Throughput: the same random Qwen3 (float32), the same prompts as token ids, greedy, a fixed number of new tokens;
output tokens per second of wall clock, prefill included. The two run alternately, and the best round of each counts,
for on a shared machine the others measure the neighbours. `generate` pads prompts to the longest and attends with sdpa.

What torch allows (`ceiling`) is the time of transformers divided by that of torch's linear layers alone at our shapes,
measured in the same run: no engine that uses torch's matrix products can be faster. Ours are `kvpager.ops.linear`, so
on a CPU more than all of it can be reached. `linear` (torch's, where ours are faster a share above 1), `attention` and
`host` are shares of our time: products alone; `PagedKVCache.attend`; everything but the model's forward pass.

Prefix cache: 64 prompts of 1,024 shared and 32 own tokens, all there at once; mean time to the first token.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import nn

from kvpager import LLM, SamplingParams

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def make_prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Lengths from 16 to 192, spread evenly; 96 for one."""
    generator = torch.Generator().manual_seed(0)
    lengths = [96] if batch == 1 else [16 + 176 * n // (batch - 1) for n in range(batch)]
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@torch.inference_mode()
def generate_with_transformers(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0
    )
    assert out.shape[1] == longest + num_new


@torch.inference_mode()
def linear_seconds(model: nn.Module, prompts: Sequence[Sequence[int]], num_new: int, max_tokens: int) -> float:
    """The matrix products of our steps and nothing else: prompts in chunks, then decodes; the head for due rows."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.model.embed_tokens.weight  # type: ignore[union-attr]
    left, steps = sum(map(len, prompts)), []
    while left:
        steps.append(min(left, max_tokens))
        left -= steps[-1]
    inputs = {
        (rows, weight.shape[1]): torch.randn(rows, weight.shape[1])
        for rows in {*steps, len(prompts)}
        for weight in weights
    }

    def products(rows: int) -> None:
        for weight in weights:
            F.linear(inputs[rows, weight.shape[1]], weight)
        F.linear(inputs[len(prompts), head.shape[1]], head)

    products(len(prompts))
    total = sum(seconds_of(lambda rows=rows: products(rows)) for rows in steps)  # type: ignore[misc]
    one = min(seconds_of(lambda: products(len(prompts))) for _ in range(5))
    return total + (num_new - 1) * one


class Shares:
    """Times the parts of the engine that it is told to watch."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = {"attention": 0.0, "forward": 0.0}
        llm.runner.cache.attend = self._timed("attention", llm.runner.cache.attend)  # type: ignore[method-assign]
        llm.runner.model.forward = self._timed("forward", llm.runner.model.forward)  # type: ignore[method-assign]
        llm.runner.model.logits = self._timed("forward", llm.runner.model.logits)  # type: ignore[method-assign]

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started
            return result

        return timed


def measure_batch(llm: LLM, watch: Shares, theirs: Any, batch: int, num_new: int, rounds: int) -> dict[str, float]:
    prompts: Any = make_prompts(batch, llm.model_config.vocab_size)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    ours_best, theirs_best, linear = float("inf"), float("inf"), float("inf")
    shares: dict[str, float] = {}
    for _ in range(rounds):
        llm.block_manager.reset_prefix_cache()
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        seconds = seconds_of(lambda: llm.generate(prompts, params))
        if seconds < ours_best:
            ours_best, shares = seconds, {**watch.seconds}
        theirs_best = min(theirs_best, seconds_of(lambda: generate_with_transformers(theirs, prompts, num_new)))
        linear = min(linear, linear_seconds(llm.runner.model, prompts, num_new, 2048))
    tokens = batch * num_new
    return {
        "batch": batch,
        "kvpager": tokens / ours_best,
        "transformers": tokens / theirs_best,
        "ratio": theirs_best / ours_best,
        "ceiling": theirs_best / linear,
        "of_ceiling": linear / ours_best,
        "linear": linear / ours_best,
        "attention": shares["attention"] / ours_best,
        "host": 1 - shares["forward"] / ours_best,
    }


def measure_prefix_cache(folder: Path) -> dict[str, float]:
    """Mean seconds to the first token, without and with the cache."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 2048, (1024,), generator=generator).tolist()
    prompts: Any = [shared + torch.randint(3, 2048, (32,), generator=generator).tolist() for _ in range(64)]
    means = {}
    for caching in (False, True):
        llm = LLM(folder, dtype="float32", enable_prefix_caching=caching, num_blocks=5000)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        firsts = [output.metrics.time_to_first_token_seconds for output in outputs if output.metrics is not None]
        means["with" if caching else "without"] = sum(each or 0.0 for each in firsts) / len(firsts)
        del llm
        gc.collect()
    return {**means, "ratio": means["without"] / means["with"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPES[arguments.model], tie_word_embeddings=True, max_position_embeddings=4096)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    theirs.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder)
        llm = LLM(folder, dtype="float32", num_blocks=1024)
        watch = Shares(llm)
        print(f"{arguments.model}, float32, {torch.get_num_threads()} threads, output tokens/s, prefill included")
        print("batch   kvpager  transformers  ratio  ceiling  of it | linear  attention   host")
        rows = []
        for batch in map(int, arguments.batches.split(",")):
            row = measure_batch(llm, watch, theirs, batch, arguments.new, arguments.rounds)
            rows.append(row)
            rates = f"{row['kvpager']:9.1f} {row['transformers']:13.1f} {row['ratio']:6.2f} {row['ceiling']:8.2f}"
            shares = f"{row['linear']:6.0%} {row['attention']:10.0%} {row['host']:6.0%}"
            print(f"{batch:5d} {rates} {row['of_ceiling']:6.0%} | {shares}")
        del llm, watch, theirs
        gc.collect()
        cached = measure_prefix_cache(folder)
        print("mean seconds to first token, 64 prompts of 1,024 shared + 32 own tokens: ", end="")
        print(f"{cached['without']:.2f} without, {cached['with']:.2f} with the cache: {cached['ratio']:.1f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps({"throughput": rows, "prefix_cache": cached}, indent=1) + "\n")


if __name__ == "__main__":
    main()
