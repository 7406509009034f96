"""Why each step was as it was: one JSON object a line, and the same as a line for people.

A record says who computed what, who came, who was held back by which budget, who had to give its blocks back and why,
who ended, and what the pool looked like afterwards, in blocks and in tokens. A trace is a help and no part of the
answer: where a record can't be written, the trace ends with one warning, and the engine goes on.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from kvpager.engine.outputs import RequestOutput
from kvpager.engine.stats import EngineStats
from kvpager.errors import ConfigError
from kvpager.scheduler import ScheduledStep, Scheduler, Sequence

# What `held_back` and `preempted` name, in words.
_BUDGETS = {
    "sequences": "no row free: `max_num_seqs`",
    "tokens": "no token left in the step: `max_num_batched_tokens`",
    "blocks": "not enough blocks",
}


class StepTrace:
    """Writes one record per step.

    Args:
        path: the file; it is written anew.

    Raises:
        ConfigError: it can't be written.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise ConfigError(f"can't write `{path}`: {error.strerror or error}") from error
        self._path = path
        self._record: dict[str, Any] = {}
        self._ended: dict[str, list[str | None]] = {}

    def note_step(self, step: ScheduledStep, scheduler: Scheduler, name: Callable[[Sequence], str]) -> None:
        """Begins the record of a step, before it is committed. O(rows)."""
        if self._file is None:
            return
        counts = [1] * len(scheduler.running) if step.counts is None else step.counts.tolist()
        prefill = {}
        for sequence, num_tokens in zip(scheduler.running, counts, strict=True):
            stop = scheduler.num_computed_tokens(sequence)
            if scheduler.is_prefilling(sequence):
                prefill[name(sequence)] = [stop - num_tokens, stop]
        self._record = {
            "step": scheduler.counts.num_steps,
            "num_tokens": len(step.input_ids),
            "num_decode_tokens": len(counts) - len(prefill),
            "prefill": prefill,
            "admitted": {name(each): each.num_found_tokens for each in step.admitted},
            "preempted": {name(each): "blocks" for each in step.preempted},
            "held_back": step.held_back,
        }

    def note_end(self, output: RequestOutput) -> None:
        """Says that a request has ended."""
        if self._file is not None:
            self._ended[output.request_id] = [each.finish_reason for each in output.outputs]

    def write(self, seconds: float, stats: EngineStats) -> None:
        """Writes the record: how long the step took, who ended, and what the engine looks like now.

        Does nothing once the trace is closed. A file that can't be written closes it, with a warning.
        """
        if self._file is None:
            return
        record = {
            **self._record,
            "finished": self._ended,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "live_blocks": stats.live_blocks,
            "evictable_blocks": stats.evictable_blocks,
            "free_blocks": stats.free_blocks,
            "num_blocks": stats.num_blocks,
            "num_tokens_held": stats.num_tokens,
            "token_usage": round(stats.token_usage, 4),
            "milliseconds": round(1000 * seconds, 3),
        }
        self._ended = {}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            logging.getLogger("kvpager").warning("the trace `%s` ends here: %s; the engine goes on", self._path, reason)
            self.close()

    def close(self) -> None:
        """Closes the file; steps that come later are not recorded."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries again to write what could not be written
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def as_line(record: Mapping[str, Any]) -> str:
    """One record, as read back from the file, in words."""
    parts = [f"step {record['step']}: {record['num_decode_tokens']} decode"]
    for name, (start, stop) in record["prefill"].items():
        parts.append(f"{name} computes {start}…{stop - 1}")
    parts += [f"{name} admitted ({cached} tokens cached)" for name, cached in record["admitted"].items()]
    parts += [f"{name} preempted ({_BUDGETS[why]})" for name, why in record["preempted"].items()]
    parts += [f"{name} ended ({', '.join(map(str, reasons))})" for name, reasons in record["finished"].items()]
    parts.append(f"{record['num_running']} running")
    waiting = f"{record['num_waiting']} waiting"
    parts.append(f"{waiting} ({_BUDGETS[record['held_back']]})" if record["held_back"] else waiting)
    parts.append(
        f"{record['live_blocks']} of {record['num_blocks']} blocks live, {record['evictable_blocks']} evictable, "
        f"{record['num_tokens_held']} tokens held ({100 * record['token_usage']:.0f} %)"
    )
    return ", ".join(parts)
