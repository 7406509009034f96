"""How fast decode attention is over a paged cache: `python benches/ops.py [--only …] [--quick] [--json] [--plot PNG]`.

What is timed, against what, and why (each is a table, `--only` names them):

- overhead: a call of the raw op with nothing to do, over an op of the same signature that does nothing.
- roofline: decode over a pool of 1 GB or more with shuffled tables, as fraction of what the machine could do at best,
  the slower of reading the bytes of K and V once and of multiplying and adding what has to be. Both limits are measured
  in the same rounds, with the same threads, over a buffer of the pool's size in pages of the same kind.
- beside: the same cases beside torch's attention over contiguous K and V with packed heads (it has no pages to follow)
  and, with `--vllm-python`, vLLM's op over the same pages in a process of its own; all three in turns.
- shapes: the same tokens as one long sequence, a few, many, and mixed lengths: cutting by tokens must make them equal.
- ladder: from the lesson to the product, and torch's ways of doing the same: gather + SDPA, SDPA over contiguous K and
  V, flex attention over contiguous K and V and over pages (`--flex`; it compiles first).
- block_sizes: 1 … 256 over the whole pool: waste, table bytes, appends and decode speed: why 16 is the default.

How to read it: medians of rounds; beside a fraction stand its smallest and largest. On a busy machine the limits and
the kernel suffer alike, so trust fractions before times, and a narrow spread before both.
The cores that other processes used during a table stand under it; above a tenth of one it says more about them.
`--clock cpu` counts processor time in place of wall time, on every line alike (not for another process's).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from kvpager import native

sys.path.insert(0, str(Path(__file__).parent))

from neighbours import Neighbours
from ops.beside import beside
from ops.decode import DTYPES
from ops.ladder import ladder, shapes
from ops.machine import Machine, cpu_seconds, wall_seconds
from ops.roofline import plot, roofline
from ops.sweep import sweep
from ops.timing import alternate
from peers.process import Peer, vllm_peer

TABLES = ("overhead", "roofline", "beside", "shapes", "ladder", "block_sizes")


def overhead(machine: Machine, rounds: int) -> dict[str, float]:
    """Microseconds of a raw call over one sequence of one token, above an op of the same signature without a body."""
    torch.set_num_threads(1)
    cache = torch.zeros(2, 1, 16, 16)
    query, out = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = (out, None, query, cache, cache, table, lengths)
    calls = 20_000

    def run(op: Callable[..., None]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(calls):
                op(*arguments, scale=1.0, max_seq_len=16)

        return loop

    empty = torch.ops.kvpager_bench.nothing.default
    ours = torch.ops.kvpager.paged_attention.default
    times = alternate(machine, {"nothing": run(empty), "paged_attention": run(ours)}, 1, rounds)
    micros = {name: statistics.median(runs) / calls * 1e3 for name, runs in times.items()}
    difference = micros["paged_attention"] - micros["nothing"]
    print(f"\noverhead: empty op {micros['nothing']:.2f} us, paged_attention {micros['paged_attention']:.2f} us: "
          f"{difference:+.2f} us (bar: 3)")  # fmt: skip
    return {**micros, "difference": difference}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES), help="tables, comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of `roofline` and `beside`, comma-separated")
    parser.add_argument("--threads", default="1,2", help="comma-separated thread counts (default 1,2)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="pool and buffer; above the last-level cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="3 rounds over 0.25 GB: a look, not a measurement")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: others use this machine, too")
    parser.add_argument("--isa", help="instruction set of the kernels; the best of this CPU if not given")
    parser.add_argument("--flex", action="store_true", help="add flex attention to the ladder")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write the roofline here, as PNG (needs matplotlib)")
    options = parser.parse_args()
    options.only, options.dtypes = options.only.split(","), options.dtypes.split(",")
    for name, known in (("only", TABLES), ("dtypes", tuple(DTYPES))):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    options.threads = [int(count) for count in options.threads.split(",")]
    if options.quick:
        options.rounds, options.gigabytes = 3, 0.25
    return options


def run_table(table: str, machine: Machine, options: argparse.Namespace, vllm: Peer | None) -> object:
    """Measures and prints one table; what it returns is for machines."""
    num_bytes, threads, rounds = int(options.gigabytes * 1e9), options.threads, options.rounds
    if table == "overhead":
        return overhead(machine, rounds)
    if table == "roofline":
        figures = roofline(machine, num_bytes, options.dtypes, threads, rounds)
        if options.plot:
            plot(figures, options.plot)
        return [asdict(figure) for figure in figures]
    if table == "beside":
        return [asdict(case) for case in beside(machine, num_bytes, options.dtypes, threads, rounds, vllm)]
    if table == "shapes":
        return shapes(machine, num_bytes, max(threads), rounds)
    if table == "ladder":
        return ladder(machine, max(threads), rounds, options.flex)
    return [asdict(row) for row in sweep(machine, num_bytes, max(threads), rounds)]


def main() -> int:
    options = read_options()
    if options.isa:
        native.select_cpu_isa(options.isa)
    machine = Machine(int(options.gigabytes * 1e9), cpu_seconds if options.clock == "cpu" else wall_seconds)
    results: dict[str, object] = {
        "isa": native.active_cpu_isa(), "gigabytes": options.gigabytes, "clock": options.clock,
    }  # fmt: skip
    peer = vllm_peer(options.vllm_python, "vllm_attention.py") if "beside" in options.only else None
    with peer or nullcontext() as vllm:
        for table in options.only:
            with Neighbours(*([] if vllm is None else [vllm.pid])) as neighbours:
                results[table] = run_table(table, machine, options, vllm)
            print(f"  (others used {neighbours.cores:.2f} cores meanwhile)", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
