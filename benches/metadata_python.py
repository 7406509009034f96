"""What Python adds to the metadata plane: `python benches/metadata_python.py [--json] [--runs 9]`.

The workloads of `benches/metadata` (256 sequences that append, prompts that are admitted, committed and released, a
decode batch at 8k tokens) through `kvpager.KVBlockManager` and `kvpager.DecodeBatch`, beside the same on the Rust core
alone, which this runs in turns with its own (`cargo bench --bench metadata -- --side core`). Two figures have a bar:

- `a call`, for numpy arrays: what a call adds to the core; at most 1 µs;
- `a tensor`, for torch: what each tensor adds to the same row with arrays; at most 1.2 µs.

Arrays and tensors are made once and used again, as an engine would, with `out=` wherever there is one. Lists, which are
read item by item, are shown for comparison.

`decode_rebuild` copies tables of 512 KB to 512 KB, which is all of a 1 MB L2: each of its three calls finds the
interpreter, the binding and its arguments evicted, and which pages a process got moves the row by half a microsecond.
So both sides get a fresh process in every turn.

How to read it: medians of runs in turns, in microseconds of the thread's CPU time for an operation, loops included.
Compare figures of one table with each other, never with those of another machine.

Longer than 300 lines, because its workloads stand for those of `benches/metadata/workloads.rs`, one for one.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import DecodeBatch, KVBlockManager
from kvpager.manager import BatchBuffers

ROOT = Path(__file__).resolve().parent.parent

# The definitions stand in benches/metadata/workloads.rs; these are the same numbers.
BLOCK_SIZE = 16
BATCH = 256
NUM_STEPS = 1024
APPEND_POOL = 20_000
NUM_PROMPTS, PROMPT_TOKENS, SHARED_TOKENS = 2_000, 2_048, 1_024
HOLDING_POOL, EVICTING_POOL, WINDOW = 140_000, 32_768, 256
MAX_BLOCKS = 512
DECODE_STEPS = 176

Convert = Callable[[np.ndarray], Any]  # an array to the kind of argument that is timed
KINDS: dict[str, Convert] = {"numpy": lambda array: array, "torch": torch.from_numpy, "lists": np.ndarray.tolist}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds an operation, `each_us` a call (numpy) or a tensor (torch)."""

    row: str
    kind: str
    calls: int
    tensors: int
    median_us: float
    fastest_us: float
    slowest_us: float
    core_median_us: float
    added_us: float
    each_us: float | None
    bar_us: float | None
    met: bool | None


def timed(operations: int, work: Callable[[], object]) -> float:
    """CPU time of this thread for one of the operations that `work` does, in microseconds."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / operations / 1e3


def lifecycle(convert: Convert, indexed: bool) -> dict[str, float]:
    """Steps of one token for each sequence, then all are released."""
    manager = KVBlockManager(APPEND_POOL, BLOCK_SIZE, enable_prefix_caching=indexed)
    for sequence_id in range(BATCH):
        manager.create_sequence(sequence_id)
    ids = convert(np.arange(BATCH, dtype=np.int64))
    slots = np.empty(BATCH, dtype=np.int64)
    out = torch.from_numpy(slots) if convert is torch.from_numpy else slots
    length = np.zeros(BATCH, dtype=np.int64)  # filled anew for each step, as on the core's side
    shared = convert(length)
    lengths = [convert(length + step) if isinstance(shared, list) else shared for step in range(1, NUM_STEPS + 1)]
    generated = np.random.default_rng(1).integers(0, 128_000, (NUM_STEPS, BATCH), dtype=np.int32)
    told = [convert(row) for row in generated]

    def append() -> None:
        for _ in range(NUM_STEPS):
            manager.slot_mapping_for_append(ids, out=out)

    def append_indexed() -> None:
        for step, (lent, token_ids) in enumerate(zip(lengths, told, strict=True), 1):
            manager.slot_mapping_for_append(ids, out=out)
            length.fill(step)
            manager.commit_batch(ids, lent, token_ids)

    def release() -> None:
        for sequence_id in range(BATCH):
            manager.release_sequence(sequence_id)

    if indexed:
        return {"append_indexed": timed(NUM_STEPS, append_indexed)}
    times = {"append": timed(NUM_STEPS, append)}
    manager.slot_mapping_for_append(ids, out=out)  # opens the 65th block
    return times | {"release": timed(BATCH, release)}


def steps(convert: Convert, indexed: bool) -> dict[str, float]:
    """The same with a batch that holds its buffers: a step takes no argument, a commit the ids of the tokens."""
    manager = KVBlockManager(APPEND_POOL, BLOCK_SIZE, enable_prefix_caching=indexed)
    for sequence_id in range(BATCH):
        manager.create_sequence(sequence_id)
    batch = batch_of_all(manager)
    generated = np.random.default_rng(1).integers(0, 128_000, (NUM_STEPS, BATCH), dtype=np.int32)
    told = [convert(row) for row in generated]

    def step() -> None:
        for _ in range(NUM_STEPS):
            batch.step()

    def step_indexed() -> None:
        for token_ids in told:
            batch.step()
            batch.commit(None, token_ids)

    return {"step_indexed": timed(NUM_STEPS, step_indexed)} if indexed else {"step": timed(NUM_STEPS, step)}


def batch_of_all(manager: KVBlockManager) -> DecodeBatch[Any]:
    """A batch of all sequences, over arrays."""

    def buffers() -> BatchBuffers[Any]:
        def int32(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int32)

        return BatchBuffers(
            block_tables=int32(BATCH, MAX_BLOCKS),
            seq_lens=int32(BATCH),
            query_start_loc=int32(BATCH + 1),
            slot_mapping=np.zeros(BATCH, dtype=np.int64),
            changed=int32(BATCH + MAX_BLOCKS, 3),
        )

    batch = DecodeBatch(manager, buffers(), buffers())
    for sequence_id in range(BATCH):
        batch.add(sequence_id)
    return batch


def prompts(convert: Convert, evicting: bool) -> dict[str, float]:
    """Prompts of which the first half is shared: admitted, committed, and released at the end or behind a window."""
    draws = np.random.default_rng(2)
    shared = draws.integers(0, 128_000, SHARED_TOKENS, dtype=np.int32)
    rest = draws.integers(0, 128_000, (NUM_PROMPTS, PROMPT_TOKENS - SHARED_TOKENS), dtype=np.int32)
    texts = [convert(np.concatenate([shared, own])) for own in rest]
    manager = KVBlockManager(EVICTING_POOL if evicting else HOLDING_POOL, BLOCK_SIZE, enable_prefix_caching=True)
    slots = np.empty(PROMPT_TOKENS, dtype=np.int64)
    out = torch.from_numpy(slots) if convert is torch.from_numpy else slots
    window = WINDOW if evicting else NUM_PROMPTS

    def serve() -> None:
        for sequence_id, text in enumerate(texts):
            manager.admit(sequence_id, text, out=out)
            manager.commit(sequence_id, PROMPT_TOKENS)
            if sequence_id >= window:
                manager.release_sequence(sequence_id - window)
        for sequence_id in range(NUM_PROMPTS - window, NUM_PROMPTS):
            manager.release_sequence(sequence_id)

    times = {"prompts_evicting" if evicting else "prompts_held": timed(NUM_PROMPTS, serve)}
    hits, wanted = manager.stats.num_hit_tokens, (NUM_PROMPTS - 1) * SHARED_TOKENS
    if hits != wanted:
        raise RuntimeError(f"{hits} tokens found, not {wanted}")
    return times


def at_8k() -> KVBlockManager:
    """256 sequences just below 8,192 tokens, staggered over the block."""
    manager = KVBlockManager(BATCH * (MAX_BLOCKS + 1), BLOCK_SIZE)
    for row in range(BATCH):
        manager.create_sequence(row)
        manager.append_tokens(row, MAX_BLOCKS * BLOCK_SIZE - BLOCK_SIZE - DECODE_STEPS + row % BLOCK_SIZE)
    return manager


def rebuild(convert: Convert) -> dict[str, float]:
    """The arrays of a decode step, all of them anew."""
    manager = at_8k()
    ids = convert(np.arange(BATCH, dtype=np.int64))
    slots = np.empty(BATCH, dtype=np.int64)
    tables, lengths = np.empty((BATCH, MAX_BLOCKS), dtype=np.int32), np.empty(BATCH, dtype=np.int32)
    outs = [torch.from_numpy(a) if convert is torch.from_numpy else a for a in (slots, tables, lengths)]

    def work(manager: KVBlockManager, ids: Any, slots: Any, tables: Any, lengths: Any) -> None:
        for _ in range(DECODE_STEPS):
            manager.slot_mapping_for_append(ids, out=slots)
            manager.get_block_table_tensor(ids, out=tables)
            manager.get_seq_lens_tensor(ids, out=lengths)

    return {"decode_rebuild": timed(DECODE_STEPS, partial(work, manager, ids, *outs))}


def delta() -> dict[str, float]:
    """The arrays of a decode step, what changed alone: the batch holds its buffers, so there is one kind of call."""
    batch = batch_of_all(at_8k())
    batch.step()  # both sets
    batch.step()  # are written whole

    def work() -> None:
        for _ in range(DECODE_STEPS - 2):
            batch.step()

    return {"decode_delta": timed(DECODE_STEPS - 2, work)}


def all_rows(convert: Convert, kind: str) -> dict[str, float]:
    """Every row once."""
    times = lifecycle(convert, indexed=False) | lifecycle(convert, indexed=True)
    times |= steps(convert, indexed=True) | prompts(convert, evicting=False) | prompts(convert, evicting=True)
    times |= rebuild(convert)
    return times | steps(convert, indexed=False) | delta() if kind == "numpy" else times


RUNS_A_TURN = 3  # of each row in one process, after one that warms up; their median counts


def run_side(kind: str) -> None:
    """What a process of its own does for a turn: prints the medians of its runs."""
    gc.disable()
    runs = []
    for _ in range(RUNS_A_TURN + 1):
        runs.append(all_rows(KINDS[kind], kind))
        gc.collect()
    print(json.dumps({row: statistics.median(run[row] for run in runs[1:]) for row in runs[0]}))


def python_turn(kind: str) -> dict[str, float]:
    """The rows through Python, in a process of their own."""
    done = subprocess.run([sys.executable, __file__, "--side", kind], stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def core_turn() -> dict[str, float]:
    """The same rows on the core alone, in a process of its own."""
    command = ["cargo", "bench", "--quiet", "--locked", "--bench", "metadata", "--"]
    command += ["--side", "core", "--runs", str(RUNS_A_TURN), "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {line["row"]: line["core"]["median_us"] for line in json.loads(done.stdout)["rows"]}


# Calls of an operation, and the arrays or tensors that they take together.
CALLS = {
    "append": (1, 2),
    "append_indexed": (2, 5),
    "step": (1, 0),
    "step_indexed": (2, 1),
    "prompts_held": (3, 2),
    "prompts_evicting": (3, 2),
    "decode_delta": (1, 0),
    "decode_rebuild": (3, 6),
    "release": (1, 0),
}
CALL_BAR_US = 1.0  # that a call with arrays may add
TENSOR_BAR_US = 1.2  # that each tensor may add to that


def judge(core: Sequence[dict[str, float]], turns: dict[str, list[dict[str, float]]]) -> list[Row]:
    """One line for each row and kind of argument."""

    def median_of(kind: str, row: str) -> float:
        return statistics.median(turn[row] for turn in turns[kind])

    rows = []
    for row, (calls, tensors) in CALLS.items():
        for kind, of_kind in turns.items():
            times = [turn[row] for turn in of_kind if row in turn]
            if not times or (tensors == 0 and kind != "numpy"):  # takes no array
                continue
            median, alone = statistics.median(times), statistics.median(turn[row] for turn in core)
            each, bar = None, None
            if kind == "numpy":
                each, bar = (median - alone) / calls, CALL_BAR_US
            elif kind == "torch":
                each, bar = (median - median_of("numpy", row)) / tensors, TENSOR_BAR_US
            met = None if each is None or bar is None else each <= bar
            spread = (min(times), max(times))
            rows.append(Row(row, kind, calls, tensors, median, *spread, alone, median - alone, each, bar, met))
    return rows


def table(rows: list[Row]) -> str:
    """For people."""
    lines = [
        f"{'µs an operation':<18}{'arguments':<11}{'calls':>5}{'tensors':>8}{'median':>10}  {'fastest..slowest':<18}"
        f"{'core':>8}{'added':>8}   {'':<10}{'bar':>12}"
    ]
    for row in rows:
        spread = f"{row.fastest_us:.2f}..{row.slowest_us:.2f}"
        each = ""
        if row.each_us is not None:
            per = "a call" if row.kind == "numpy" else "a tensor"
            each = f"   {per:<10}{row.each_us:>6.3f}{row.bar_us:>6.1f}"
        verdict = "  MISSED" if row.met is False else ""
        lines.append(
            f"{row.row:<18}{row.kind:<11}{row.calls:>5}{row.tensors:>8}{row.median_us:>10.3f}  {spread:<18}"
            f"{row.core_median_us:>8.3f}{row.added_us:>8.3f}{each}{verdict}"
        )
    return "\n".join(lines)


def measure(turns: int) -> list[Row]:
    """Core and Python in turns."""
    core_turn()  # builds it, should that be needed
    core: list[dict[str, float]] = []
    of_kinds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(turns):
        core.append(core_turn())
        for kind, times in of_kinds.items():
            if kind == "numpy" or turn % 3 == 0:  # the others are shown for comparison only
                times.append(python_turn(kind))
    return judge(core, of_kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    parser.add_argument("--runs", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--side", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        run_side(arguments.side)
        return
    if arguments.runs < 1:
        parser.error(f"`--runs`: wanted 1 or more, got {arguments.runs}")
    rows = measure(arguments.runs)
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "runs": arguments.runs}
        print(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(__doc__)
        print(table(rows))


if __name__ == "__main__":
    main()
