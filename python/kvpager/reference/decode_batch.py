"""The metadata of a running batch: what the kernels of one step need to know about its rows.

From one decode step to the next almost nothing changes: every row is one token longer, and one in `block_size` rows has
a new block. So the batch persists, and a step tells what differs. Its answers lie in one of two *buffer sets* that take
turns: while a device still reads the set of step n, step n + 1 is prepared in the other.

    block_tables    [B, M]  int32   a row's blocks, -1 behind them
    seq_lens        [B]     int32   tokens of each row, this step's included
    query_start_loc [B+1]   int32   where a row's new tokens begin among all new tokens
    slot_mapping    [T]     int64   where the new tokens' keys and values go, -1 behind them
    changed         [C, 3]  int32   (row, column, block): how the tables differ from those of the step before

`changed` is the difference to the previous *step*, which used the other set: who keeps one table on a device applies
each step's changes to it and never uploads a table again. Here every set is simply written anew when its turn comes.
The Rust version writes what its set has missed, which comes to the same.
"""

import ctypes
import weakref
from dataclasses import fields
from itertools import pairwise
from typing import Any, Self

from kvpager.errors import ArgumentError, SequenceTooLongError, StateError
from kvpager.records import BatchBuffers, new_buffers
from kvpager.reference.appending import MAX_UINT64, Run, split_runs
from kvpager.reference.arguments import (
    COUNT,
    ID,
    INT32_FORMATS,
    INT64_FORMATS,
    as_buffer,
    describe,
    read_natural,
    read_naturals,
    read_token_ids,
)
from kvpager.reference.block_manager import KVBlockManager
from kvpager.reference.buffers import fill_front
from kvpager.reference.snapshots import BatchStep

MAX_INT32 = 2**31 - 1
_SHAPES = {
    "block_tables": "int32 buffer [B, M]",
    "seq_lens": "int32 buffer [B]",
    "query_start_loc": "int32 buffer [B+1]",
    "slot_mapping": "int64 buffer [T]",
    "changed": "int32 buffer [C, 3]",
}


class DecodeBatch:
    """Sequences that step together. Each is a row of one batch at most, and can't be released meanwhile."""

    def __init__(self, manager: KVBlockManager, first: BatchBuffers[Any], second: BatchBuffers[Any]) -> None:
        """Take two sets of writable buffers of equal shapes, and write "no rows" into both."""
        if not isinstance(manager, KVBlockManager):
            raise TypeError(f"`manager`: wanted a KVBlockManager, got {type(manager).__name__}")
        self._manager = manager
        self._buffers = (first, second)
        self._views = (_open_set("first", first), _open_set("second", second))
        _compare_sets(*self._views)
        _refuse_shared_memory(self._views)
        self.max_rows, self.max_blocks = (int(size) for size in self._views[0]["block_tables"].shape or ())
        self.max_tokens = self._views[0]["slot_mapping"].nbytes // 8
        self.max_changes = self._views[0]["changed"].nbytes // 12
        self._ids: list[int] = []  # by row
        self._turn = 0
        # What the previous step showed, row by row without padding, and the rows that have come or moved since.
        self._shown: list[list[int]] = [[] for _ in range(self.max_rows)]
        self._new_rows: set[int] = set()
        self._invalid = False
        for turn in (0, 1):
            self._write(turn, [], [], [0], [])
        weakref.finalize(self, _free_rows, self._ids, manager._batch_rows)

    @classmethod
    def with_capacity(
        cls,
        manager: KVBlockManager,
        max_rows: int,
        max_blocks: int,
        *,
        max_tokens: int | None = None,
        max_changes: int | None = None,
        pin_memory: bool = False,
    ) -> Self:
        """A batch over new torch tensors."""
        capacity = (max_rows, max_blocks, max_tokens, max_changes)
        return cls(manager, *(new_buffers(*capacity, pin_memory=pin_memory) for _ in range(2)))

    @property
    def buffers(self) -> tuple[BatchBuffers[Any], BatchBuffers[Any]]:
        """The two sets."""
        return self._buffers

    @property
    def num_rows(self) -> int:
        """Rows in use: 0 to `num_rows` - 1."""
        return len(self._ids)

    @property
    def sequence_ids(self) -> list[int]:
        """The sequence of each row."""
        return list(self._ids)

    # Who is in the batch ----------------------------------------------------------------------------------------------

    def add(self, sequence_id: int) -> int:
        """Make a sequence the last row; which one that is. O(blocks of the row)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        sequence = self._manager._find(sequence_id)
        rows = self._manager._batch_rows
        if sequence_id in rows:
            raise StateError(f"sequence {sequence_id} is row {rows[sequence_id]} of a batch already")
        if self.num_rows == self.max_rows:
            raise StateError(f"the batch is full: {self.max_rows} rows")
        self._check_fits(sequence_id, sequence.length)
        row = self.num_rows
        self._ids.append(sequence_id)
        rows[sequence_id] = row
        self._new_rows.add(row)
        return row

    def remove(self, sequence_id: int) -> tuple[int, int | None]:
        """Take a sequence out; the last row moves into the hole. (the hole, the sequence that is there now, if any)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        self._manager._find(sequence_id)
        if sequence_id not in self._ids:
            raise StateError(f"sequence {sequence_id} is no row of this batch")
        rows = self._manager._batch_rows
        row = rows.pop(sequence_id)
        last = self._ids.pop()
        self._new_rows.discard(len(self._ids))
        if last == sequence_id:
            return row, None
        self._ids[row] = last
        rows[last] = row
        self._new_rows.add(row)
        return row, last

    def invalidate(self) -> None:
        """Somebody wrote over the sets or the device's table: nothing is known about what they show."""
        self._new_rows.update(range(self.num_rows))
        self._invalid = True

    # The step ---------------------------------------------------------------------------------------------------------

    def step(self, counts: Any = None, token_ids: Any = None) -> BatchStep:
        """Append one token, or `counts[row]` (0, a chunk, drafts), to every row; write the set whose turn it is.

        All rows or none; a step that is refused writes nothing and does not change the turn.
        """
        runs = self._read_step(counts, token_ids)
        for run in runs:
            self._check_fits(run.sequence_id, self._manager._sequences[run.sequence_id].length + run.count)
        self._manager._check_runs(runs, "token_ids", batched=True)

        slots = self._manager._append_runs(runs)
        sequences = [self._manager._sequences[sequence_id] for sequence_id in self._ids]
        tables = [list(sequence.table) for sequence in sequences]
        starts = [0]
        for run in runs:
            starts.append(starts[-1] + run.count)
        changes = self._changes(tables)
        upload = self._invalid or len(changes) > self.max_changes
        turn = self._turn
        self._write(turn, tables, [sequence.length for sequence in sequences], starts, slots)
        if len(changes) <= self.max_changes:
            fill_front(self._views[turn]["changed"], [number for change in changes for number in change])
        self._shown = tables + [[] for _ in range(self.max_rows - len(tables))]
        self._new_rows.clear()
        self._invalid = False
        self._turn = 1 - turn
        return BatchStep(turn, self.num_rows, len(slots), len(changes), upload)

    def commit(self, ns: Any = None, token_ids: Any = None) -> None:
        """`commit_batch` by row: the first `ns[row]` tokens (default: all) of each row's sequence are written."""
        if ns is None:
            lengths = [self._manager._sequences[sequence_id].length for sequence_id in self._ids]
        else:
            lengths = read_naturals("ns", ns, COUNT)
        told = None if token_ids is None else read_token_ids(token_ids)
        if len(lengths) != self.num_rows:
            raise ArgumentError("ns", f"one length for each of {self.num_rows} rows", f"{len(lengths)} lengths")
        self._manager._commit_rows(list(zip(self._ids, lengths, strict=True)), told, "ns")

    def _read_step(self, counts: Any, token_ids: Any) -> list[Run]:
        numbers = [1] * self.num_rows if counts is None else read_naturals("counts", counts, COUNT)
        told = None if token_ids is None else read_token_ids(token_ids)
        if len(numbers) != self.num_rows:
            raise ArgumentError("counts", f"one count for each of {self.num_rows} rows", f"{len(numbers)} counts")
        if sum(numbers) > self.max_tokens:
            wanted = f"at most {self.max_tokens} tokens, the room in `slot_mapping`"
            raise ArgumentError("counts", wanted, f"{min(sum(numbers), MAX_UINT64)} tokens")
        return split_runs(self._ids, numbers, told)

    def _check_fits(self, sequence_id: int, length: int) -> None:
        needed = self._manager._blocks_for(length)
        if needed > self.max_blocks:
            shape = f"{needed} blocks of {self._manager.block_size} tokens"
            lacks = f"`block_tables` has {self.max_blocks} columns"
            raise SequenceTooLongError(f"sequence {sequence_id}: {length} tokens need {shape}, {lacks}")
        if length > MAX_INT32:
            raise SequenceTooLongError(f"sequence {sequence_id}: {length} tokens don't fit the int32 `seq_lens`")

    def _changes(self, tables: list[list[int]]) -> list[tuple[int, int, int]]:
        """The entries that differ from what the previous step showed; of rows that came or moved, all of them."""
        changes = []
        for row, shown in enumerate(self._shown):
            table = tables[row] if row < len(tables) else []
            for column in range(max(len(table), len(shown))):
                now = table[column] if column < len(table) else -1
                before = shown[column] if column < len(shown) else -1
                if now != before or (row in self._new_rows and now != -1):
                    changes.append((row, column, now))
        return changes

    def _write(
        self, turn: int, tables: list[list[int]], lengths: list[int], starts: list[int], slots: list[int]
    ) -> None:
        views, num_rows = self._views[turn], self.max_rows
        padded = [table + [-1] * (self.max_blocks - len(table)) for table in tables]
        padded += [[-1] * self.max_blocks] * (num_rows - len(tables))
        fill_front(views["block_tables"], [block for row in padded for block in row])
        fill_front(views["seq_lens"], lengths + [0] * (num_rows - len(lengths)))
        fill_front(views["query_start_loc"], starts + [starts[-1]] * (num_rows + 1 - len(starts)))
        fill_front(views["slot_mapping"], slots + [-1] * (self.max_tokens - len(slots)))


def _open_set(argument: str, buffers: BatchBuffers[Any]) -> dict[str, memoryview]:
    """Views of the five buffers of the set that came as `argument`, checked."""
    for field in fields(BatchBuffers):
        if not hasattr(buffers, field.name):
            came = type(buffers).__name__
            raise TypeError(f"`{argument}`: wanted a BatchBuffers, with `{field.name}`, got {came}")
    views = {}
    num_rows = 0
    for field in fields(BatchBuffers):
        name, value = field.name, getattr(buffers, field.name)
        view = as_buffer(name, value)
        formats = INT64_FORMATS if name == "slot_mapping" else INT32_FORMATS
        wanted = f"a writable, contiguous {_SHAPES[name]} on the CPU"
        if view is None or view.readonly or not view.c_contiguous or view.format not in formats:
            raise ArgumentError(name, wanted, describe(value if view is None else view))
        shape = list(view.shape or ())
        if name == "block_tables" and len(shape) == 2:
            num_rows = shape[0]
        fits = {
            "block_tables": len(shape) == 2,
            "seq_lens": shape == [num_rows],
            "query_start_loc": shape == [num_rows + 1],
            "slot_mapping": len(shape) == 1,
            "changed": len(shape) == 2 and shape[1] == 3,
        }
        if not fits[name]:
            raise ArgumentError(name, wanted, describe(view))
        views[name] = view
    return views


def _compare_sets(first: dict[str, memoryview], second: dict[str, memoryview]) -> None:
    for name, view in first.items():
        wanted, came = list(view.shape or ()), list(second[name].shape or ())
        if came != wanted:
            raise ArgumentError(name, f"shape {wanted}, as in the first set", came)


def _refuse_shared_memory(sets: tuple[dict[str, memoryview], ...]) -> None:
    spans = []
    for views in sets:
        for view in views.values():
            if view.nbytes:
                start = ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
                spans.append((start, start + view.nbytes))
    spans.sort()
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise ArgumentError("second", "buffers that share no memory", "overlapping ones")


def _free_rows(sequence_ids: list[int], rows: dict[int, int]) -> None:
    for sequence_id in sequence_ids:
        rows.pop(sequence_id, None)
