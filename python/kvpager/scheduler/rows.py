"""State per row of the batch, and who else keeps some.

Rows are numbered as the batch numbers them: a new one is the last, a removed one's place is taken by the last.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpager.scheduler.sequence import Sequence
from kvpager.scheduler.step import Integers


class RowFollower(Protocol):
    """Someone with state per row. Rows are added at the end; a removed row's place is taken by the last one."""

    def add_row(self, sequence: Sequence) -> None:
        """`sequence` is the new last row."""

    def remove_row(self, sequence: Sequence) -> None:
        """`sequence`, which holds its row and blocks still, is about to leave; the last row takes its place."""


@dataclass(slots=True)
class Rows:
    """Numbers of each row, by row: computed or being computed tokens, the next input, tokens left to generate."""

    length: Integers
    next_input: Integers
    left: Integers
    sequences: list[Sequence] = field(default_factory=list)

    @classmethod
    def make(cls, max_rows: int) -> "Rows":
        """No rows yet, and room for `max_rows`."""
        length, next_input, left = np.zeros((3, max_rows), dtype=np.int64)
        return cls(length, next_input, left)

    def append(self, sequence: Sequence, length: int) -> None:
        """Make a sequence the last row. O(1)."""
        row = sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        self.length[row] = length
        self.next_input[row] = sequence.token_ids[-1]
        self.left[row] = sequence.max_tokens - sequence.num_generated_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; the last row moves into its place. O(1)."""
        row, last = sequence.row, self.sequences.pop()
        sequence.row = -1
        if last is not sequence:
            self.sequences[row] = last
            last.row = row
            for column in (self.length, self.next_input, self.left):
                column[row] = column[len(self.sequences)]

    def share_out(self, prefilling: list[Sequence], max_num_tokens: int) -> Integers:
        """Tokens of each row in a step: one for those who decode, what is left for prefills, best rank first."""
        counts = np.ones(len(self.sequences), dtype=np.int64)
        budget = max_num_tokens - (len(counts) - len(prefilling))
        for sequence in sorted(prefilling, key=lambda each: each.rank):
            uncomputed = len(sequence.token_ids) - int(self.length[sequence.row])
            counts[sequence.row] = min(budget, uncomputed)
            budget -= int(counts[sequence.row])
        return counts

    def inputs(self, counts: Integers, prefilling: Iterable[Sequence], out: Integers) -> Integers:
        """The tokens that `counts` says to compute, row after row, in the front of `out`."""
        starts = np.cumsum(counts) - counts
        input_ids = out[: int(counts.sum())]
        decodes = np.ones(len(counts), dtype=np.bool_)
        for sequence in prefilling:
            row = sequence.row
            decodes[row] = False
            first, num, start = int(self.length[row]), int(counts[row]), int(starts[row])
            input_ids[start : start + num] = sequence.token_ids[first : first + num]
        input_ids[starts[decodes]] = self.next_input[: len(counts)][decodes]
        return input_ids


class StopTable:
    """Which tokens end anyone: a look-up for a whole batch, so that only suspects are asked one by one."""

    def __init__(self) -> None:
        self._is_stop = np.zeros(1, dtype=np.bool_)  # by token; the last element stands for all beyond, False

    def learn(self, token_ids: Collection[int]) -> None:
        """Add tokens. They stay: a suspect that ends nobody costs a look."""
        known, most = self._is_stop, max(token_ids, default=-1)
        if most + 1 >= len(known):
            self._is_stop = np.zeros(most + 2, dtype=np.bool_)
            self._is_stop[: len(known)] = known
        for token in token_ids:
            self._is_stop[token] = True

    def may_stop(self, token_ids: Integers) -> NDArray[np.bool_]:
        """For each token [R] whether it ends somebody."""
        return self._is_stop[np.minimum(token_ids, len(self._is_stop) - 1)]
