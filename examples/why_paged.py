"""Why a paged cache: one trace of requests through three ways to give them memory.

    python examples/why_paged.py [--requests 200] [--slots 16384] [--max-len 4096] [--seed 0]

* maximum-length reservation: each request owns `max_len` neighbouring slots from its start to its end;
* growing buffer: neighbouring slots that double when they are full, which copies what was there;
* paged: blocks of 16 slots anywhere in the pool, handed out when a request reaches them (`KVBlockManager`).

Slots are token positions of the cache. Bytes are those of Qwen3-8B in bfloat16. All three see the same requests at the
same time; a request that finds no room waits (first come, first served) and counts as refused at each step it waits.
"""

import argparse
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.table import Table

from kvpager import KVBlockManager
from kvpager.errors import OutOfBlocksError

BLOCK_SIZE = 16
QWEN3_8B_BYTES_PER_TOKEN = 2 * 36 * 8 * 128 * 2  # K and V, layers, kv heads, head dim, bytes of bfloat16


class Memory(Protocol):
    """What the three ways have in common. Each answers False where it has no room, and is then unchanged."""

    name: str
    copied_slots: int

    def start(self, request: int, prompt: int) -> bool: ...  # noqa: D102
    def grow(self, request: int) -> bool: ...  # noqa: D102
    def finish(self, request: int) -> None: ...  # noqa: D102
    def reserved_slots(self) -> int: ...  # noqa: D102


class Arena:
    """Neighbouring runs of slots, first fit: what any allocator of contiguous buffers comes down to."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.runs: dict[int, tuple[int, int]] = {}  # request -> [start, stop)

    def take(self, request: int, num_slots: int) -> bool:
        """Takes the first gap of `num_slots` for a request that holds none; O(requests)."""
        start = 0
        for run_start, run_stop in sorted(self.runs.values()):
            if run_start - start >= num_slots:
                break
            start = run_stop
        if start + num_slots > self.num_slots:
            return False
        self.runs[request] = (start, start + num_slots)
        return True

    def reserved_slots(self) -> int:
        """Slots inside of runs."""
        return sum(stop - start for start, stop in self.runs.values())

    def picture(self, letters: dict[int, str]) -> str:
        """One character a slot: the owner's letter, or a dot."""
        cells = ["."] * self.num_slots
        for request, (start, stop) in self.runs.items():
            cells[start:stop] = letters[request] * (stop - start)
        return "".join(cells)


@dataclass
class MaximumReservation:
    """Every request owns `max_len` neighbouring slots."""

    arena: Arena
    max_len: int
    name: str = "maximum-length reservation"
    copied_slots: int = 0

    def start(self, request: int, prompt: int) -> bool:  # noqa: D102
        return self.arena.take(request, self.max_len)

    def grow(self, request: int) -> bool:  # noqa: D102
        return True

    def finish(self, request: int) -> None:  # noqa: D102
        del self.arena.runs[request]

    def reserved_slots(self) -> int:  # noqa: D102
        return self.arena.reserved_slots()


@dataclass
class GrowingBuffer:
    """Neighbouring slots that double when full; the new run is found before the old one is given up."""

    arena: Arena
    name: str = "growing contiguous buffer"
    copied_slots: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    def start(self, request: int, prompt: int) -> bool:  # noqa: D102
        if not self.arena.take(request, prompt):
            return False
        self.lengths[request] = prompt
        return True

    def grow(self, request: int) -> bool:  # noqa: D102
        length, (start, stop) = self.lengths[request], self.arena.runs[request]
        if length == stop - start:
            if not self.arena.take(-1, 2 * length):
                return False
            self.arena.runs[request] = self.arena.runs.pop(-1)
            self.copied_slots += length
        self.lengths[request] = length + 1
        return True

    def finish(self, request: int) -> None:  # noqa: D102
        del self.arena.runs[request], self.lengths[request]

    def reserved_slots(self) -> int:  # noqa: D102
        return self.arena.reserved_slots()


@dataclass
class Paged:
    """Blocks of the pool, wherever they lie."""

    manager: KVBlockManager
    name: str = f"paged, blocks of {BLOCK_SIZE}"
    copied_slots: int = 0

    def start(self, request: int, prompt: int) -> bool:  # noqa: D102
        self.manager.create_sequence(request)
        try:
            self.manager.append_tokens(request, prompt)
        except OutOfBlocksError:
            self.manager.release_sequence(request)
            return False
        return True

    def grow(self, request: int) -> bool:  # noqa: D102
        try:
            self.manager.append_token(request)
        except OutOfBlocksError:
            return False
        return True

    def finish(self, request: int) -> None:  # noqa: D102
        self.manager.release_sequence(request)

    def reserved_slots(self) -> int:  # noqa: D102
        return self.manager.stats.live * self.manager.block_size


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens will follow it (nobody knows that number when it starts)."""

    prompt: int
    new: int


def make_trace(num_requests: int, max_len: int, seed: int) -> list[Request]:
    """Chat-like lengths: many short requests, a few long ones, none over `max_len`."""
    rng = random.Random(seed)
    prompts = [min(max_len // 2, 16 + int(rng.lognormvariate(4.5, 1.0))) for _ in range(num_requests)]
    return [Request(prompt, min(max_len // 2, 8 + int(rng.lognormvariate(4.7, 0.8)))) for prompt in prompts]


@dataclass
class Outcome:
    """What one way made of the trace. Slot counts are sums over steps, so their ratio is an average."""

    steps: int = 0
    used: int = 0
    reserved: int = 0
    running: int = 0
    refusals: int = 0


def run(memory: Memory, trace: list[Request]) -> Outcome:
    """One new token a step for each running request; waiting ones start in order, unless a running one lacks room."""
    outcome, waiting, lengths = Outcome(), deque(enumerate(trace)), dict[int, int]()
    while waiting or lengths:
        stuck = 0
        for request in list(lengths):
            if not memory.grow(request):
                stuck += 1
                continue
            lengths[request] += 1
            if lengths[request] == trace[request].prompt + trace[request].new:
                memory.finish(request)
                del lengths[request]
        if stuck and stuck == len(lengths):  # nobody can go on: the youngest gives its room back and starts over later
            youngest = max(lengths)
            memory.finish(youngest)
            del lengths[youngest]
            waiting.appendleft((youngest, trace[youngest]))
        while waiting and not stuck and memory.start(waiting[0][0], waiting[0][1].prompt):
            request, shape = waiting.popleft()
            lengths[request] = shape.prompt
        outcome.steps += 1
        outcome.refusals += stuck + bool(waiting)
        outcome.running += len(lengths)
        outcome.used += sum(lengths.values())
        outcome.reserved += memory.reserved_slots()
    return outcome


def show_articles_cases(console: Console) -> None:
    """The two cases every article on PagedAttention begins with, computed."""
    length, reserved = 300, 4096
    manager = KVBlockManager(reserved // BLOCK_SIZE, BLOCK_SIZE)
    manager.create_sequence(0)
    manager.append_tokens(0, length)
    held = manager.stats.live * BLOCK_SIZE
    console.print("[bold]One request, 300 tokens long in the end[/bold]")
    console.print(f"  4,096 slots reserved: {length / reserved:.1%} of them used")
    console.print(
        f"  paged: {held} slots held, {length / held:.1%} used ({held - length} unused, all in the last block)\n"
    )

    letters = dict(enumerate("ABCDE"))
    arena, manager = Arena(16), KVBlockManager(16, 1)
    for request, size in enumerate([4, 3, 4, 2]):
        arena.take(request, size)
        manager.create_sequence(request)
        manager.append_tokens(request, size)
    console.print("[bold]A 4, B 3, C 4, D 2; B ends; E needs 5[/bold]   (16 slots, blocks of 1)")
    console.print(f"  before           {arena.picture(letters)}")
    del arena.runs[1]
    manager.release_sequence(1)
    fits = arena.take(4, 5)
    verdict = "fits" if fits else f"is refused: {16 - arena.reserved_slots()} slots free, no 5 side by side"
    console.print(f"  contiguous       {arena.picture(letters)}   E {verdict}")
    manager.create_sequence(4)
    manager.append_tokens(4, 5)
    cells = ["."] * 16
    for state in manager.sequences.values():
        for block in state.block_table:
            cells[block] = letters[state.sequence_id]
    console.print(f"  paged            {''.join(cells)}   E fits in blocks {list(manager.sequences[4].block_table)}\n")


def main() -> None:
    """Prints the articles' cases and the table for one trace."""
    parser = argparse.ArgumentParser(description="One trace of requests through three ways to give them memory.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--slots", type=int, default=16384, help="slots of the whole cache")
    parser.add_argument("--max-len", type=int, default=4096, help="longest request, what a reservation must assume")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if args.requests < 1 or args.max_len < 2:
        parser.error("need --requests of at least 1, and --max-len of at least 2")

    console = Console(highlight=False, width=120)
    show_articles_cases(console)
    trace = make_trace(args.requests, args.max_len, args.seed)
    longest = max(request.prompt + request.new for request in trace)
    if not longest <= args.max_len <= args.slots:
        parser.error(f"need longest request {longest} ≤ --max-len {args.max_len} ≤ --slots {args.slots}")
    ways: list[Memory] = [
        MaximumReservation(Arena(args.slots), args.max_len),
        GrowingBuffer(Arena(args.slots)),
        Paged(KVBlockManager(args.slots // BLOCK_SIZE, BLOCK_SIZE)),
    ]
    table = Table(
        title=f"{args.requests} requests, longest {longest} tokens, {args.slots:,} slots", title_justify="left"
    )
    table.add_column("way")
    for heading in ("steps", "running", "slots reserved", "slots used", "used", "copied", "refusals"):
        table.add_column(heading, justify="right")
    for way in ways:
        outcome = run(way, trace)
        table.add_row(
            way.name,
            f"{outcome.steps:,}",
            f"{outcome.running / outcome.steps:.1f}",
            f"{outcome.reserved / outcome.steps:,.0f}",
            f"{outcome.used / outcome.steps:,.0f}",
            f"{outcome.used / outcome.reserved:.1%}",
            f"{way.copied_slots * QWEN3_8B_BYTES_PER_TOKEN / 1e9:.1f} GB",
            f"{outcome.refusals:,}",
        )
    console.print(table)
    console.print(
        "running, reserved and used are averages over steps; a refusal is one request that had to wait one step"
    )


if __name__ == "__main__":
    main()
