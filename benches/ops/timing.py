"""Turns of several calls, and their table."""

import statistics
from collections.abc import Callable

from ops.machine import Machine


def alternate(
    machine: Machine, calls: dict[str, Callable[[], object]], threads: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, taken in turns; a first turn is not kept."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            elapsed = machine.clock(call, threads) * 1e3
            if turn:
                times[name].append(elapsed)
    return times


def print_times(title: str, times: dict[str, list[float]]) -> dict[str, float]:
    """The medians, after printing them with the quickest and slowest."""
    print(f"\n{title}")
    medians = {name: statistics.median(runs) for name, runs in times.items()}
    for name, runs in times.items():
        print(f"  {name:44} {medians[name]:10.3f} ms   ({min(runs):.3f} to {max(runs):.3f})", flush=True)
    return medians
