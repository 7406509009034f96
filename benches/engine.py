"""The engine against transformers' `generate` and vLLM's `LLM`, and what the prefix cache is worth.

    python benches/engine.py [--model small|0.6B] [--dtype float32|bfloat16] [--batches 1,8,32] [--new 64] [--rounds 3]
                             [--only throughput,prefix_cache] [--vllm-python PATH] [--weights FOLDER] [--json FILE]

Throughput: the same random Qwen3 (its weights are made here, from a seed), the same prompts as token ids, greedy, a
fixed number of new tokens; output tokens per second of wall clock, prefill included. The engines run in turns, medians
of the rounds count. `generate` pads prompts to the longest and attends with sdpa. vLLM is its build for CPUs, eager, in
a process of its own with the same threads; without `--vllm-python` it is left out.

What torch allows (`ceiling`) is the time of transformers divided by that of torch's linear layers alone at our shapes,
measured in the same rounds: no engine that uses torch's matrix products can be faster. Ours are `kvpager.ops.linear`,
so on a CPU more than all of it can be reached; `of it` is how much we do. `linear`, `attention` and `host` are shares
of our time: our linear layers with the head, `PagedKVCache.attend`, everything but the model's forward pass; `ms/step`
is our time by the steps it took. `same` counts requests that end with the very tokens of transformers: rounding may
flip the choice between scores as close as random weights give them, in 16 bits soon.

`others used` is what other processes took of the processors during a run, at worst: above a tenth of a core a run says
more about them.

Prefix cache: 64 prompts of 1,024 shared and 32 own tokens, all there at once; mean time to the first token.

`--wait` loads and warms up, then waits for a line on the input before it measures: time to stop what else is running.
`--weights` keeps the checkpoints for the next run.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from kvpager import LLM

sys.path.insert(0, str(Path(__file__).parent))

from engine.engines import Generate, with_kvpager, with_transformers, with_vllm
from engine.models import SHAPES, load_transformers, make_weights
from engine.prefix_cache import measure_prefix_cache
from engine.throughput import Row, Shares, measure, warm_up
from peers.process import vllm_peer

VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # GB; the engine in the same process


def throughput(checkpoint: Path, options: argparse.Namespace, stack: ExitStack) -> list[Row]:
    threads, batches = torch.get_num_threads(), list(map(int, options.batches.split(",")))
    peer = vllm_peer(options.vllm_python, "vllm_engine.py", **VLLM)
    llm = LLM(checkpoint, dtype=options.dtype, num_blocks=1024)
    watch, theirs = Shares(llm), load_transformers(checkpoint, options.dtype)
    engines: dict[str, Generate] = {"kvpager": with_kvpager(llm), "transformers": with_transformers(theirs)}
    if peer is not None:
        stack.enter_context(peer)
        engines["vLLM"] = with_vllm(peer, checkpoint, options.dtype, threads)
    for batch in batches:
        warm_up(engines, batch, llm.model_config.vocab_size)
    wait(options)
    print(f"{options.model}, {options.dtype}, {threads} threads, {options.new} new tokens a request; output tokens/s")
    print(
        "batch "
        + "".join(f"{name:>14}" for name in engines)
        + "   ratio  ceiling  of it | ms/step  linear  attention   host   same"
    )
    rows = []
    for batch in batches:
        rows.append(Row(batch, options.new))
        measure(llm, watch, theirs, engines, rows[-1], options.rounds, [] if peer is None else [peer.pid])
        print_row(rows[-1])
    return rows


def print_row(row: Row) -> None:
    figures = row.figures
    rates = "".join(f"{figures[name]:14.1f}" for name in row.seconds)
    same = ", ".join(f"{name} {count}" for name, count in row.same.items() if name != "transformers")
    print(
        f"{row.batch:5} {rates} {figures['ratio']:7.2f} {figures['ceiling']:8.2f} {figures['of_ceiling']:6.0%} | "
        f"{figures['ms_a_step']:7.2f} {figures['linear_share']:7.0%} {figures['attention_share']:10.0%} "
        f"{figures['host_share']:6.1%}   {same}",
        flush=True,
    )
    spreads = (f"{name} {min(runs):.2f} to {max(runs):.2f}" for name, runs in row.seconds.items())
    print(f"      seconds: {', '.join(spreads)}; torch's linear layers {median(row.torch_linear):.2f}; ", end="")
    print(f"others used up to {max(row.neighbours):.2f} cores", flush=True)


def prefix_cache(checkpoint: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    means = measure_prefix_cache(checkpoint, options.dtype, options.rounds)
    without, cached = median(means["without"]), median(means["with"])
    print("mean seconds to first token, 64 prompts of 1,024 shared + 32 own tokens: ", end="")
    print(f"{without:.3f} without, {cached:.3f} with the cache: {without / cached:.1f} x (bar: 5)")
    return means


def wait(options: argparse.Namespace) -> None:
    if options.wait:
        print("ready", flush=True)
        sys.stdin.readline()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="throughput,prefix_cache", help="tables, comma-separated")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--weights", type=Path, help="keep the checkpoints in this folder")
    parser.add_argument("--wait", action="store_true", help="wait for a line on the input before measuring")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - {"throughput", "prefix_cache"}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of throughput, prefix_cache")
    return options


def main() -> None:
    options = read_options()
    results: dict[str, object] = {"model": options.model, "dtype": options.dtype, "threads": torch.get_num_threads()}
    with ExitStack() as stack:
        folder = options.weights or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = make_weights(folder, options.model, options.dtype)
        if "throughput" in options.only:
            rows = throughput(checkpoint, options, stack)
            results["throughput"] = [{**asdict(row), **row.figures} for row in rows]
        if "prefix_cache" in options.only:
            results["prefix_cache_seconds"] = prefix_cache(checkpoint, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
