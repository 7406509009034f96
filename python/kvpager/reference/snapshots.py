"""What a manager tells about itself: frozen values that later calls don't change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    from kvpager.reference.block_manager import KVBlockManager


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence: its id, the tokens that own a slot, and its blocks, logical block 0 first."""

    sequence_id: int
    sequence_length: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts at one moment. `live + cached + fenced + free == num_blocks`."""

    num_blocks: int
    live: int
    cached: int
    fenced: int
    free: int
    num_sequences: int
    num_copies: int
    peak_live: int


class SequenceView(Mapping[int, SequenceState]):
    """All sequences by id, read-only. The view follows the manager; the values it gives don't."""

    def __init__(self, manager: "KVBlockManager") -> None:
        self._manager = manager

    def __getitem__(self, sequence_id: int) -> SequenceState:
        try:
            table = tuple(self._manager.block_table(sequence_id))
        except (ArgumentError, TypeError):  # not even an id
            raise KeyError(sequence_id) from None
        return SequenceState(sequence_id, self._manager.sequence_length(sequence_id), table)

    def __iter__(self) -> Iterator[int]:
        return iter(self._manager.sequence_ids())

    def __len__(self) -> int:
        return self._manager.num_sequences

    def __repr__(self) -> str:
        return repr(dict(self))
