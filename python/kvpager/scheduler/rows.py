"""State per row of the batch, and who else keeps some.

Rows are numbered as the batch numbers them: a new one is the last, a removed one's place is taken by the last.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

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
