"""Appending: the hot path. Count first what a call takes, refuse it whole or then do it; nothing fails half-way.

An append at a block boundary takes a block. An append into a partly filled tail writes into a block that may have other
readers: other sequences, or a request that finds it through the index tomorrow. **A shared or indexed block is never
written.** So the tail is copied first: a new block replaces it in the table, and the copy of its bytes is owed
(`take_copies`). Only an indexed tail that nobody else holds and that nothing continues is not worth a copy: its node is
dropped and it is written where it is.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from kvpager.errors import ArgumentError
from kvpager.reference.arguments import (
    COUNT,
    ID,
    MAX_TOKEN_ID,
    TOKEN_ID,
    read_count_or_ids,
    read_natural,
    read_naturals,
    read_token_ids,
)
from kvpager.reference.state import ManagerState, Sequence

MAX_UINT64 = 2**64 - 1


@dataclass(slots=True)
class Run:
    """Tokens to append to one sequence; `token_ids` is None if they aren't known yet."""

    sequence_id: int
    count: int
    token_ids: list[int] | None = None


class Appending(ManagerState):
    """`append_token`, `append_tokens`, and what the batched calls share with them."""

    def append_token(self, sequence_id: int, token_id: int | None = None) -> int:
        """Give the next position of a sequence its slot. O(1)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        ids = None if token_id is None else [read_natural("token_id", token_id, TOKEN_ID, MAX_TOKEN_ID)]
        runs = [Run(sequence_id, 1, ids)]
        self._check_runs(runs, "token_id")
        return self._append_runs(runs)[0]

    def append_tokens(self, sequence_id: int, n: int | Iterable[int]) -> list[int]:
        """Give the next positions their slots: `n` of them, or one for each token id in `n`. O(tokens)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        count_or_ids = read_count_or_ids(n)
        if isinstance(count_or_ids, int):
            runs = [Run(sequence_id, count_or_ids)]
        else:
            runs = [Run(sequence_id, len(count_or_ids), count_or_ids)]
        self._check_runs(runs, "token_ids")
        return self._append_runs(runs)

    def _read_runs(self, ids: object, counts: object, token_ids: object) -> list[Run]:
        """The arguments of a batched append."""
        rows = read_naturals("ids", ids, ID)
        numbers = [1] * len(rows) if counts is None else read_naturals("counts", counts, COUNT)
        told = None if token_ids is None else read_token_ids(token_ids)
        if len(numbers) != len(rows):
            raise ArgumentError("counts", f"one count for each of {len(rows)} ids", f"{len(numbers)} counts")
        return split_runs(rows, numbers, told)

    # Count ------------------------------------------------------------------------------------------------------------

    def _check_runs(self, runs: Rows[Run], argument: str, *, batched: bool = False) -> None:
        """Refuse the call if any of it can't be done: unknown sequences, other ids than the prompt's, no room."""
        for run in runs:
            self._find(run.sequence_id)
        lengths: dict[int, int] = {}  # the rows are played through: an id named twice goes on from its new length
        for run in runs:
            start = lengths.get(run.sequence_id, self._sequences[run.sequence_id].length)
            self._check_prompt_ids(run, start, argument)
            lengths[run.sequence_id] = start + run.count
        lengths.clear()
        for run in runs:
            length = lengths.get(run.sequence_id, self._sequences[run.sequence_id].length) + run.count
            if run.count:
                self._check_max_length(length, f"sequence {run.sequence_id}: ")
            lengths[run.sequence_id] = length
        needed, lacking = self._demand(runs)
        self._pool.require(needed, lacking if batched else None)

    def _check_prompt_ids(self, run: Run, start: int, argument: str) -> None:
        sequence = self._sequences[run.sequence_id]
        for position, token_id in enumerate(run.token_ids or (), start):
            known = sequence.known_id(position)
            if known is not None and known != token_id:
                wanted = f"{known}, the prompt's id at position {position} of sequence {run.sequence_id}"
                raise ArgumentError(argument, wanted, token_id)

    def _demand(self, runs: Rows[Run]) -> tuple[int, int | None]:
        """Count the blocks these appends take, and name the first row for which the pool has too few.

        The rows are played through on paper, for an earlier row changes what a later one needs: a sequence named twice
        goes on from its new length, and of r sequences that share a tail only r - 1 need a copy, as the last one then
        has the tail to itself (unless the index continues it: then it is copied r times).
        """
        lengths: dict[int, int] = {}  # of sequences that an earlier row appended to; their tails are their own
        holders: dict[int, int] = {}  # of tails that rows append to
        needed, lacking = 0, None
        for row, run in enumerate(runs):
            if run.count == 0:
                continue
            sequence = self._sequences[run.sequence_id]
            length = lengths.get(run.sequence_id, sequence.length)
            if length % self.block_size != 0 and run.sequence_id not in lengths:
                tail = sequence.table[-1]
                if holders.setdefault(tail, self._pool.ref_counts[tail]) > 1 or self._index.has_children(tail):
                    holders[tail] -= 1
                    needed += 1
            needed += self._blocks_for(length + run.count) - self._blocks_for(length)
            lengths[run.sequence_id] = length + run.count
            if lacking is None and needed > self._pool.num_available:
                lacking = row
        return needed, lacking

    # Do ---------------------------------------------------------------------------------------------------------------

    def _append_runs(self, runs: Rows[Run]) -> list[int]:
        """Append all runs, in order; the slots of all of them."""
        # The demand was counted with the index as it is now. A block taken below may evict what continues a tail; that
        # tail is copied all the same.
        tails = [table[-1] for run in runs if (table := self._sequences[run.sequence_id].table)]
        continued = {tail for tail in tails if self._index.has_children(tail)}
        slots = []
        for run in runs:
            sequence = self._sequences[run.sequence_id]
            for nth in range(run.count):
                if run.token_ids is not None:
                    sequence.learn_id(sequence.length, run.token_ids[nth])
                slots.append(self._append_one(sequence, continued))
        return slots

    def _append_one(self, sequence: Sequence, continued: set[int]) -> int:
        offset = sequence.length % self.block_size
        if offset == 0:  # a block boundary: the first token of a new block
            sequence.table.append(self._pool.take())
        else:
            tail = sequence.table[-1]
            if self._pool.ref_counts[tail] > 1 or tail in continued:  # the entry is replaced, the table not grown
                sequence.table[-1] = self._pool.copy_on_write(tail)
                sequence.owed_from = sequence.length
            elif tail in self._index:
                self._pool.forget_content(tail)
        sequence.length += 1
        return sequence.table[-1] * self.block_size + offset


def split_runs(ids: list[int], counts: list[int], token_ids: list[int] | None) -> list[Run]:
    """One run for each id, each with its share of the token ids, which come one after the other."""
    if token_ids is None:
        return [Run(sequence_id, count) for sequence_id, count in zip(ids, counts, strict=True)]
    if len(token_ids) != sum(counts):
        wanted = min(sum(counts), MAX_UINT64)  # the Rust version can't say more
        raise ArgumentError("token_ids", f"{wanted} ids, one for each new token", f"{len(token_ids)} ids")
    runs, start = [], 0
    for sequence_id, count in zip(ids, counts, strict=True):
        runs.append(Run(sequence_id, count, token_ids[start : start + count]))
        start += count
    return runs
