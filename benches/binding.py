"""What the block manager costs from Python: `python benches/binding.py [--json]`.

What is timed, against what, and why:

- `append_token` against an empty method of the same class and signature. The difference is the work; the rest is what
  Python asks for any call into a compiled module. It is the call of the articles and of every first program.
- `slot_mapping_for_append` for 256 sequences, one step of a decode batch, against the same call of the reference in
  plain Python: with ids in an int64 tensor and a reused `out` (how an engine calls it), and with a list in and a new
  tensor out (how people try it).
- `import kvpager`: how much longer a fresh process takes than `python -c pass`, beside what `-X importtime` adds up for
  the modules that an empty process does not load. torch and numpy must not be among them.

How to read it: each figure is the median, in microseconds, of runs that alternate with the runs of what it is compared
with, so that a busy or slow machine hurts both alike; beside it stand the quickest and the slowest run. Loops are part
of the times. Compare figures of one table with each other, never with those of another machine. What misses its bar is
marked so.
"""

import argparse
import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch

from kvpager import KVBlockManager, reference

NUM_SEQUENCES = 256
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Figure:
    """One line of the table; times in microseconds."""

    name: str
    median_us: float
    fastest_us: float
    slowest_us: float
    against: str
    against_median_us: float
    ratio: float
    bar: str
    met: bool


def measure(*timed: Callable[[], float], runs: int) -> list[list[float]]:
    """Microseconds of each run of each function, taken in turns; the first turn warms up and is not kept."""
    times: list[list[float]] = [[] for _ in timed]
    gc.disable()
    for turn in range(runs + 1):
        for kept, function in zip(times, timed, strict=True):
            elapsed = function()
            if turn:
                kept.append(elapsed)
    gc.enable()
    return times


def seconds_of(call: Callable[[Any], object], argument: object, calls: int) -> float:
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call(argument)
    return time.perf_counter() - start


def figure(
    name: str, times: list[float], against: str, others: list[float], ratio: float, bar: str, met: bool
) -> Figure:
    median = statistics.median(times)
    return Figure(name, median, min(times), max(times), against, statistics.median(others), ratio, bar, met)


def append_token(runs: int) -> Figure:
    calls = 20_000
    manager = KVBlockManager(calls // BLOCK_SIZE + 1, BLOCK_SIZE)

    def append() -> float:
        manager.create_sequence(1)
        elapsed = seconds_of(manager.append_token, 1, calls)
        manager.release_sequence(1)
        return elapsed / calls * 1e6

    def nothing() -> float:
        return seconds_of(manager._empty_call, 1, calls) / calls * 1e6

    times, empty = measure(append, nothing, runs=runs)
    ratio = statistics.median(times) / statistics.median(empty)
    met = statistics.median(times) <= 0.3 and ratio <= 2
    return figure("append_token", times, "empty method", empty, ratio, "<= 0.3 us and <= 2 x", met)


def one_batch(manager_class: Callable[[int, int], Any], call: Callable[[Any], object], steps: int) -> float:
    """Microseconds of one step of a batch of fresh sequences that grow by `steps` tokens."""
    manager = manager_class(NUM_SEQUENCES * (steps // BLOCK_SIZE + 1), BLOCK_SIZE)
    for sequence_id in range(NUM_SEQUENCES):
        manager.create_sequence(sequence_id)
    return seconds_of(call, manager, steps) / steps * 1e6


def slot_mapping(name: str, call: Callable[[Any], object], bar: float, runs: int) -> Figure:
    times, slow = measure(
        lambda: one_batch(KVBlockManager, call, 512),
        lambda: one_batch(reference.KVBlockManager, call, 32),
        runs=runs,
    )
    ratio = statistics.median(slow) / statistics.median(times)
    return figure(name, times, "reference in Python", slow, ratio, f">= {bar:g} x faster", ratio >= bar)


def slot_mappings(runs: int) -> list[Figure]:
    id_list = list(range(NUM_SEQUENCES))
    ids, out = torch.tensor(id_list), torch.empty(NUM_SEQUENCES, dtype=torch.int64)
    return [
        slot_mapping(
            "slot_mapping_for_append, 256, tensor and out=",
            lambda manager: manager.slot_mapping_for_append(ids, out=out),
            30,
            runs,
        ),
        slot_mapping(
            "slot_mapping_for_append, 256, list, new tensor",
            lambda manager: manager.slot_mapping_for_append(id_list),
            10,
            runs,
        ),
    ]


def fresh_process(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start) * 1e6


def import_times(code: str) -> dict[str, int]:
    """Module -> microseconds of its own, as `-X importtime` reports them."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {module: int(own) for own, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \| *(\S+)", report)}


def import_cost(code: str, runs: int) -> Figure:
    """What a fresh process takes longer than an empty one, pair by pair; beside it the sum of what Python reports."""

    def longer() -> float:
        return fresh_process(code) - fresh_process("pass")

    def reported() -> float:
        modules_of_python = import_times("pass")
        return float(sum(own for module, own in import_times(code).items() if module not in modules_of_python))

    times, sums = measure(longer, reported, runs=runs)
    ratio = statistics.median(times) / statistics.median(sums)
    return figure(code, times, "-X importtime", sums, ratio, "<= 50 ms", statistics.median(times) <= 50_000)


def table(figures: list[Figure]) -> str:
    header = ("", "median us", "fastest..slowest us", "against", "median us", "ratio", "bar", "")
    rows = [
        (
            line.name,
            f"{line.median_us:.3f}",
            f"{line.fastest_us:.3f}..{line.slowest_us:.3f}",
            line.against,
            f"{line.against_median_us:.3f}",
            f"{line.ratio:.2f}",
            line.bar,
            "met" if line.met else "MISSED",
        )
        for line in figures
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    parser.add_argument("--runs", type=int, default=15, help="runs of each figure (default 15)")
    arguments = parser.parse_args()
    runs = arguments.runs
    figures = [
        append_token(runs),
        *slot_mappings(runs),
        import_cost("import kvpager", runs),
        import_cost("from kvpager import KVBlockManager", runs),
    ]
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "runs": runs}
        print(json.dumps({**machine, "figures": [asdict(line) for line in figures]}, indent=2))
    else:
        print(__doc__)
        print(table(figures))


if __name__ == "__main__":
    main()
