"""The compiled half of kvpager: the block manager in Rust. `kvpager.KVBlockManager` builds on it.

Arguments are checked before the state is looked at: an integer out of range is an `ArgumentError` that names the
parameter, what is no integer a `TypeError`. Every call is all-or-nothing; costs stand in the docstrings.
"""

from collections.abc import Iterable
from typing import ClassVar, Final, Protocol, Self, SupportsIndex, TypeAlias, final, overload, type_check_only

import torch
from typing_extensions import Buffer, TypeVar, disjoint_base

from kvpager.manager import Admission

__all__ = ["BatchStep", "BlockInfo", "DecodeBatch", "KVBlockManager", "PoolStats", "__version__"]

@type_check_only
class _LendsNumpy(Protocol):
    """What lends its memory through numpy: a tensor on the CPU."""

    def numpy(self) -> object: ...

@type_check_only
class _Array(Protocol):
    """A numpy array, which is a `Buffer` to type checkers from Python 3.12 on."""

    @property
    def __array_interface__(self) -> object: ...

# Read: int32 or int64 in one dimension, or any iterable of ints, read once. Written: contiguous and writable.
_Integers: TypeAlias = Buffer | _LendsNumpy | Iterable[SupportsIndex]
_Memory: TypeAlias = Buffer | _Array | _LendsNumpy
_Out = TypeVar("_Out", bound=_Memory)
_OutOrNew = TypeVar("_OutOrNew", bound=_Memory, default=torch.Tensor)
_Device: TypeAlias = torch.device | str | int
# Media items of a prompt: (start, stop, key), sorted and disjoint.
_Items: TypeAlias = Iterable[tuple[SupportsIndex, SupportsIndex, str]]

__version__: Final[str]

@disjoint_base
class KVBlockManager:
    """The block manager in Rust: maps the tokens of many sequences to the blocks of one pool."""

    eviction_policies: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        num_physical_blocks: SupportsIndex,
        block_size: SupportsIndex,
        *,
        enable_prefix_caching: bool = False,
        watermark_blocks: SupportsIndex | None = None,
        fences: bool = False,
        eviction_policy: str | None = None,
        hash_seed: SupportsIndex | None = None,
        max_pinned_blocks: SupportsIndex | None = None,
        max_sequence_length: SupportsIndex | None = None,
        _equal_hashes: bool = False,
    ) -> Self: ...

    # sequences
    def create_sequence(self, sequence_id: SupportsIndex) -> None: ...
    def append_token(self, sequence_id: SupportsIndex, token_id: SupportsIndex | None = None) -> int: ...
    def append_tokens(self, sequence_id: SupportsIndex, n: SupportsIndex | _Integers) -> list[int]: ...
    def commit(self, sequence_id: SupportsIndex, n: SupportsIndex, token_ids: _Integers | None = None) -> None: ...
    def num_computed_tokens(self, sequence_id: SupportsIndex) -> int: ...
    def release_sequence(self, sequence_id: SupportsIndex) -> None: ...
    def truncate_sequence(self, sequence_id: SupportsIndex, n: SupportsIndex) -> None: ...
    def fork_sequence(
        self, parent: SupportsIndex, child: SupportsIndex, num_tokens: SupportsIndex | None = None
    ) -> None: ...
    def take_copies(self) -> list[tuple[int, int]]: ...
    def locate(self, sequence_id: SupportsIndex, position: SupportsIndex) -> tuple[int, int]: ...
    def slots(self, sequence_id: SupportsIndex, start: SupportsIndex, stop: SupportsIndex) -> list[int]: ...
    def sequence_length(self, sequence_id: SupportsIndex) -> int: ...
    def block_table(self, sequence_id: SupportsIndex) -> list[int]: ...
    def sequence_state(self, sequence_id: SupportsIndex) -> tuple[int, list[int]]: ...
    def sequence_ids(self) -> list[int]: ...

    # cached prefixes
    def admit(
        self,
        sequence_id: SupportsIndex,
        token_ids: _Integers,
        *,
        num_new_tokens: SupportsIndex | None = None,
        reserve_blocks: SupportsIndex | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        items: _Items | None = None,
        resumed: bool = False,
        out: _OutOrNew | None = None,
    ) -> Admission[_OutOrNew]: ...
    def can_admit(
        self,
        sequence_id: SupportsIndex,
        token_ids: _Integers,
        *,
        num_new_tokens: SupportsIndex | None = None,
        reserve_blocks: SupportsIndex | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        items: _Items | None = None,
        resumed: bool = False,
    ) -> bool: ...
    def match_prefix(
        self, token_ids: _Integers, *, salt: str | None = None, adapter: str | None = None, items: _Items | None = None
    ) -> int: ...
    def pin_prefix(
        self, token_ids: _Integers, *, salt: str | None = None, adapter: str | None = None, items: _Items | None = None
    ) -> int: ...
    def unpin(self, pin: SupportsIndex) -> None: ...
    def advance_epoch(self) -> int: ...
    def retire(self, epoch: SupportsIndex) -> None: ...
    def reset_prefix_cache(self) -> None: ...

    # batches
    @overload
    def slot_mapping_for_append(
        self,
        ids: _Integers,
        counts: _Integers | None = None,
        token_ids: _Integers | None = None,
        *,
        device: _Device | None = None,
        out: None = None,
    ) -> torch.Tensor: ...
    @overload
    def slot_mapping_for_append(
        self,
        ids: _Integers,
        counts: _Integers | None = None,
        token_ids: _Integers | None = None,
        *,
        device: None = None,
        out: _Out,
    ) -> _Out: ...
    def commit_batch(self, ids: _Integers, ns: _Integers, token_ids: _Integers | None = None) -> None: ...
    @overload
    def get_block_table_tensor(
        self,
        ids: _Integers,
        max_blocks: SupportsIndex | None = None,
        *,
        device: _Device | None = None,
        out: None = None,
    ) -> torch.Tensor: ...
    @overload
    def get_block_table_tensor(
        self, ids: _Integers, max_blocks: SupportsIndex | None = None, *, device: None = None, out: _Out
    ) -> _Out: ...
    @overload
    def get_seq_lens_tensor(
        self, ids: _Integers, *, device: _Device | None = None, out: None = None
    ) -> torch.Tensor: ...
    @overload
    def get_seq_lens_tensor(self, ids: _Integers, *, device: None = None, out: _Out) -> _Out: ...

    # blocks held by the caller
    def allocate_block(self) -> int: ...
    def free_block(self, block_id: SupportsIndex) -> None: ...
    def ref_count(self, block_id: SupportsIndex) -> int: ...

    # figures
    num_blocks: Final[int]
    block_size: Final[int]
    num_free_blocks: Final[int]
    usage: Final[float]
    num_sequences: Final[int]
    free_blocks: Final[list[int]]
    stats: Final[PoolStats]
    def internal_fragmentation_tokens(self, sequence_id: SupportsIndex | None = None) -> int: ...
    def block_info(self, block_id: SupportsIndex) -> BlockInfo: ...
    def block_states(self) -> list[str]: ...
    def check_invariants(self) -> list[str]: ...
    def invariants_ok(self) -> bool: ...
    def _empty_call(self, sequence_id: SupportsIndex) -> int: ...

@final
class PoolStats:
    """Counts at one moment; `live + cached + fenced + free == num_blocks`."""

    num_blocks: Final[int]
    live: Final[int]
    cached: Final[int]
    fenced: Final[int]
    free: Final[int]
    num_sequences: Final[int]
    num_copies: Final[int]
    peak_live: Final[int]
    indexed: Final[int]
    pinned: Final[int]
    num_hit_tokens: Final[int]
    num_queried_tokens: Final[int]
    num_resumed_tokens: Final[int]
    num_evictions: Final[int]
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class BlockInfo:
    """One block at one moment, for people and plots."""

    block_id: Final[int]
    state: Final[str]
    ref_count: Final[int]
    owners: Final[tuple[int, ...]]
    num_pins: Final[int]
    is_held: Final[bool]
    is_indexed: Final[bool]
    num_filled: Final[int]
    eviction_rank: Final[int | None]
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@type_check_only
class _BatchBuffers(Protocol):
    """The memory of one step of a batch; each buffer is as for `_Memory`, checked when it is opened."""

    @property
    def block_tables(self) -> object: ...
    @property
    def seq_lens(self) -> object: ...
    @property
    def query_start_loc(self) -> object: ...
    @property
    def slot_mapping(self) -> object: ...
    @property
    def changed(self) -> object: ...

@disjoint_base
class DecodeBatch:
    """Rows of sequences that step together, shown in two caller-owned buffer sets that take turns."""

    def __new__(cls, manager: KVBlockManager, first: _BatchBuffers, second: _BatchBuffers) -> Self: ...
    def add(self, sequence_id: SupportsIndex) -> int: ...
    def remove(self, sequence_id: SupportsIndex) -> tuple[int, int | None]: ...
    def step(self, counts: _Integers | None = None, token_ids: _Integers | None = None) -> BatchStep: ...
    def commit(self, ns: _Integers | None = None, token_ids: _Integers | None = None) -> None: ...
    def invalidate(self) -> None: ...
    num_rows: Final[int]
    sequence_ids: Final[list[int]]
    max_rows: Final[int]
    max_blocks: Final[int]
    max_tokens: Final[int]
    max_changes: Final[int]

@final
class BatchStep:
    """What a step wrote, and where; `upload_table`: the changes don't tell it all, upload the whole table."""

    buffer_set: Final[int]
    num_rows: Final[int]
    num_tokens: Final[int]
    num_changes: Final[int]
    upload_table: Final[bool]
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
