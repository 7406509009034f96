"""What both block managers hand to their callers: the Rust one, and the readable one of `kvpager.reference`.

Nothing here imports the Rust module, or torch before a tensor is made.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_Slots = TypeVar("_Slots")
_Memory = TypeVar("_Memory", bound="torch.Tensor | Buffer")


class Admission(NamedTuple, Generic[_Slots]):
    """What `KVBlockManager.admit` did.

    Attributes:
        num_computed_tokens: prompt tokens whose K/V were found in the cache; they need not be computed.
        slots: `slots [T] int64`, where the K/V of the T tokens after them go; `out` itself if it was given.
    """

    num_computed_tokens: int
    slots: _Slots


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence at one moment: a snapshot that later calls don't change.

    Attributes:
        sequence_id: the id that the caller chose.
        sequence_length: tokens that own a slot; the position of the next append.
        block_table: physical block of each logical block, so ceil(sequence_length / block_size) entries.
    """

    sequence_id: int
    sequence_length: int
    block_table: tuple[int, ...]


class _Manager(Protocol):
    """What a view of the sequences asks their manager."""

    @property
    def num_sequences(self) -> int: ...
    def sequence_ids(self) -> list[int]: ...
    def sequence_state(self, sequence_id: int, /) -> tuple[int, list[int]]: ...


class SequenceView(Mapping[int, SequenceState]):
    """The sequences of a manager as a mapping; nothing is copied until a snapshot is asked for."""

    __slots__ = ("_manager",)

    def __init__(self, manager: _Manager) -> None:
        self._manager = manager

    def __getitem__(self, sequence_id: int) -> SequenceState:
        try:
            length, table = self._manager.sequence_state(sequence_id)
        except (ArgumentError, TypeError):  # not even an id
            raise KeyError(sequence_id) from None
        return SequenceState(operator.index(sequence_id), length, tuple(table))

    def __iter__(self) -> Iterator[int]:
        return iter(self._manager.sequence_ids())

    def __len__(self) -> int:
        return self._manager.num_sequences

    def __repr__(self) -> str:
        return f"<{len(self)} sequences of {self._manager!r}>"


@dataclass(frozen=True, slots=True)
class BatchBuffers(Generic[_Memory]):
    """The memory of one step: tensors on the CPU, or other writable C-contiguous buffers.

    Attributes:
        block_tables: `[B, M] int32`, the blocks of each row, -1 behind them.
        seq_lens: `[B] int32`, tokens of each row, this step's included.
        query_start_loc: `[B+1] int32`, where a row's new tokens begin among all new tokens; the total behind the last.
        slot_mapping: `[T] int64`, where the new tokens' K/V go, -1 behind them.
        changed: `[C, 3] int32`, (row, column, block): the table entries that differ from the previous step.
    """

    block_tables: _Memory
    seq_lens: _Memory
    query_start_loc: _Memory
    slot_mapping: _Memory
    changed: _Memory


def new_buffers(
    max_rows: int, max_blocks: int, max_tokens: int | None, max_changes: int | None, *, pin_memory: bool
) -> "BatchBuffers[torch.Tensor]":
    """New tensors for one set of a batch; the sizes and their defaults are those of `DecodeBatch.with_capacity`."""
    import torch

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=pin_memory)

    return BatchBuffers(
        block_tables=make(max_rows, max_blocks),
        seq_lens=make(max_rows),
        query_start_loc=make(max_rows + 1),
        slot_mapping=make(max_rows if max_tokens is None else max_tokens, dtype=torch.int64),
        changed=make(max_rows + max_blocks if max_changes is None else max_changes, 3).fill_(-1),
    )
