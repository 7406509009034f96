"""Scheduler worlds: a manager of either implementation, a batch, and a stand-in for the model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import kvpager
from kvpager import reference
from kvpager.scheduler import SampleRows, ScheduledStep, Scheduler, Sequence

IMPLEMENTATIONS = ("rust", "reference")


def numpy_set(rows: int, columns: int, tokens: int) -> dict[str, np.ndarray]:
    return {
        "block_tables": np.zeros((rows, columns), np.int32),
        "seq_lens": np.zeros(rows, np.int32),
        "query_start_loc": np.zeros(rows + 1, np.int32),
        "slot_mapping": np.zeros(tokens, np.int64),
        "changed": np.zeros((rows + columns, 3), np.int32),
    }


@dataclass
class Followed:
    """A follower that keeps what it was told: which sequence is which row."""

    rows: list[int] = field(default_factory=list)

    def add_row(self, sequence: Sequence) -> None:
        self.rows.append(sequence.sequence_id)

    def remove_row(self, sequence: Sequence) -> None:
        assert self.rows[sequence.row] == sequence.sequence_id
        last = self.rows.pop()
        if sequence.row < len(self.rows):
            self.rows[sequence.row] = last


def next_token(token_ids: list[int]) -> int:
    """The stand-in's choice depends on everything before it and on nothing else."""
    return 1 + sum((place + 1) * token for place, token in enumerate(token_ids)) % 97


@dataclass
class World:
    """A scheduler, and a stand-in for the model that checks each step's inputs against what they must be."""

    scheduler: Scheduler
    manager: Any
    followed: Followed
    steps: list[ScheduledStep] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    choose: Callable[[list[int]], int] = next_token

    def sequence(self, number: int, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
        return Sequence(number, list(prompt), max_tokens, **options)

    def add(self, number: int, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
        sequence = self.sequence(number, prompt, max_tokens, **options)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[int, int]:
        """One step; tokens computed, by sequence id."""
        scheduler = self.scheduler
        before = {s.sequence_id: scheduler.num_computed_tokens(s) for s in scheduler.running}
        planned = scheduler.schedule()
        if planned is None:
            return {}
        self.steps.append(planned)
        self.manager.take_copies()
        computed = self.check_step(planned, before)
        due = scheduler.commit(planned)
        self.hand_in(due)
        assert self.followed.rows == [s.sequence_id for s in scheduler.running]
        assert self.manager.check_invariants() == []
        return computed

    def check_step(self, planned: ScheduledStep, before: dict[int, int]) -> dict[int, int]:
        running, size = self.scheduler.running, self.manager.block_size
        counts = [1] * len(running) if planned.counts is None else planned.counts.tolist()
        assert planned.batch_step.num_rows == len(running)
        assert len(planned.input_ids) == planned.batch_step.num_tokens == sum(counts)
        assert sum(counts) <= self.scheduler.max_num_batched_tokens
        starts = [*np.cumsum([0, *counts])]
        assert list(planned.buffers.query_start_loc[: len(running) + 1]) == starts
        for row, sequence in enumerate(running):
            length = self.scheduler.num_computed_tokens(sequence)
            first = length - counts[row]
            if sequence not in planned.admitted:
                assert first == before[sequence.sequence_id]
            assert planned.buffers.seq_lens[row] == length
            assert list(planned.input_ids[starts[row] : starts[row + 1]]) == sequence.token_ids[first:length]
            table = planned.buffers.block_tables[row]
            slots = [int(table[p // size]) * size + p % size for p in range(first, length)]
            assert list(planned.buffers.slot_mapping[starts[row] : starts[row + 1]]) == slots
        return {s.sequence_id: n for s, n in zip(running, counts, strict=True)}

    def hand_in(self, due: SampleRows) -> None:
        running = self.scheduler.running
        rows = range(len(running)) if due.rows is None else due.rows.tolist()
        if due.token_index is not None:
            last = [self.steps[-1].input_ids[index] for index in due.token_index.tolist()]
            assert last == [running[row].token_ids[-1] for row in rows]
        tokens = np.array([self.choose(running[row].token_ids) for row in rows], dtype=np.int64)
        _, ended = self.scheduler.take(due, tokens)
        self.ended += ended

    def run(self, most_steps: int = 10_000) -> int:
        """Steps until nobody is left."""
        num_steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            num_steps += 1
            assert num_steps <= most_steps, "no end in sight"
        assert self.manager.stats.live == 0
        assert self.manager.num_sequences == 0
        return num_steps


def solo(prompt: list[int], max_tokens: int) -> list[int]:
    """What the stand-in generates for a request alone."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def make_world(implementation: str, num_blocks: int, block_size: int, **options: Any) -> World:
    rules = {
        "enable_prefix_caching": options.pop("cached", True),
        "eviction_policy": options.pop("eviction_policy", None),
    }
    options.setdefault("max_num_seqs", 8)
    options.setdefault("max_num_batched_tokens", 64)
    sets = [numpy_set(options["max_num_seqs"], num_blocks, options["max_num_batched_tokens"]) for _ in range(2)]
    if implementation == "rust":
        from kvpager.manager import BatchBuffers, DecodeBatch

        manager: Any = kvpager.KVBlockManager(num_blocks, block_size, **rules)
        batch: Any = DecodeBatch(manager, *(BatchBuffers(**each) for each in sets))
    else:
        manager = reference.KVBlockManager(num_blocks, block_size, **rules)
        batch = reference.DecodeBatch(manager, *(reference.BatchBuffers(**each) for each in sets))
    followed = Followed()
    return World(Scheduler(manager, batch, followers=[followed], **options), manager, followed)


@dataclass(frozen=True)
class Worlds:
    """What the scheduler's tests share; a fixture, as test files import nothing from each other."""

    implementation: str

    def make(self, num_blocks: int, block_size: int, **options: Any) -> World:
        return make_world(self.implementation, num_blocks, block_size, **options)

    def solo(self, prompt: list[int], max_tokens: int) -> list[int]:
        return solo(prompt, max_tokens)

    def next_token(self, token_ids: list[int]) -> int:
        return next_token(token_ids)


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def worlds(request: pytest.FixtureRequest) -> Worlds:
    return Worlds(request.param)
