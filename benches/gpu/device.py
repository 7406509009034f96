"""Timing on a CUDA device: rounds of captured calls between events, and the bandwidth of a copy in the same rounds."""

import statistics
from collections.abc import Callable

import torch

from gpu.figures import copy_gbs

COPY_BYTES = 2 << 30
Call = Callable[[], object]


class Captured:
    """Calls made one after the other by one graph launch; eagerly where they can't be captured.

    Args:
        calls: each is timed as one; they go round over caches, so that none finds its data in the GPU's cache.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # the first calls allocate and compile
            for call in calls:
                call()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(self.graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            print(f"not captured, timed eagerly: {str(error).splitlines()[0]}")
            self.graph = None
            torch.cuda.synchronize()

    def run(self) -> None:
        """All calls, on the current stream."""
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()


def seconds(run: Call, repeats: int = 1) -> float:
    """Device time of one of `repeats` runs."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


class CopyBuffer:
    """Two buffers of a gigabyte each, for the bandwidth of a copy."""

    def __init__(self) -> None:
        self.halves = torch.zeros(2, COPY_BYTES // 2, dtype=torch.uint8, device="cuda")

    def gbs(self) -> float:
        """10⁹ bytes read and written in a second."""
        return copy_gbs(COPY_BYTES // 2, seconds(lambda: self.halves[1].copy_(self.halves[0]), 3))


def medians(sides: dict[str, Captured], copies: CopyBuffer, rounds: int) -> tuple[dict[str, float], float]:
    """Microseconds of one call of each side, and the copy's GB/s: all in every round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    bandwidths = []
    for _ in range(rounds):
        bandwidths.append(copies.gbs())
        for name, side in sides.items():
            side.run()  # clocks and caches are warm
            times[name].append(seconds(side.run, 3) / len(side.calls) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}, statistics.median(bandwidths)
