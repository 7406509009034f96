"""How much of the machine others used while something was measured: a figure taken beside a busy neighbour is his."""

import os
import time
from pathlib import Path
from types import TracebackType

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Times a block; afterwards `cores` is what all processes but ours used of the machine meanwhile.

    Args:
        ours: ids of our other processes, comparators for example.

    Attributes:
        cores: busy processors on average, ours left out; 0 on systems without /proc, and a tick more or less is noise.
    """

    def __init__(self, *ours: int) -> None:
        self._ours = (os.getpid(), *ours)
        self.cores = 0.0

    def __enter__(self) -> "Neighbours":
        self._started, self._foreign = time.perf_counter(), self._foreign_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed = time.perf_counter() - self._started
        self.cores = max(0.0, (self._foreign_seconds() - self._foreign) / elapsed)

    def _foreign_seconds(self) -> float:
        whole = Path("/proc/stat")
        if not whole.exists():
            return 0.0
        user, nice, system, _idle, _wait, irq, soft, *_ = map(int, whole.read_text().split("\n", 1)[0].split()[1:])
        busy = user + nice + system + irq + soft
        for process in self._ours:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            busy -= int(fields[11]) + int(fields[12])  # utime, stime
        return busy / TICKS_A_SECOND
