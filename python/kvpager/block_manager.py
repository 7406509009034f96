"""`KVBlockManager`: the Rust allocator with the calls that speak torch.

The class is a thin subclass: what needs no tensor is the Rust method itself, so nothing stands between a caller and
`append_token`. What is added here lends the memory of tensors to Rust, which reads ids from it and writes answers into
it; nothing is decided here. torch is imported inside the calls that make a tensor, never before.

The file is long by its signatures: each call with an `out` stands three times, for the type of what it returns.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

from kvpager import _core
from kvpager.buffers import check_room, fill_new, lend, num_values, read_width, refuse_device, sum_values
from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from kvpager.buffers import Device, Integers, Memory


_Out = TypeVar("_Out", bound="Memory")
_Slots = TypeVar("_Slots")

# A medium in a prompt: (start, stop, key). The placeholder tokens at positions start to stop - 1 stand for what `key`
# names, an image for example; a digest of its content makes a good key.
PrefixItem: TypeAlias = tuple[int, int, str]


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


class KVBlockManager(_core.KVBlockManager):
    """Who owns which block of a paged key/value cache: pool, block tables, copy-on-write, prefix cache.

    Works on integers alone: the keys and values lie in the caller's tensors, at the slots that are handed out here
    (slot = block id * block_size + offset). All calls may be made from any thread; each does all of its work or, when
    it raises, nothing. `kvpager.reference.KVBlockManager` is the same contract in plain Python, made to be read.

    Args:
        num_physical_blocks: N, blocks in the pool, 1 to 2^31 - 1.
        block_size: S, token positions in a block, at least 1; N * S must fit int64.
        enable_prefix_caching: keep an index of full, committed blocks, so that `admit` finds what was computed before.
            Token ids must be told then, at admission, append or commit.
        watermark_blocks: blocks that `admit` leaves free, so that running sequences can grow; waived while no block is
            live.
        fences: what is let go becomes reusable only when its epoch is retired. For work that runs late, as on a GPU.
        eviction_policy: `"lru"`, or `"slru"`, which prompts that never come back don't sweep (Karedla, Love, Wherry
            1994).
        hash_seed: of the hash chain that names blocks, 0 to 2^64 - 1. It changes no answer.
        max_pinned_blocks: blocks that `pin_prefix` may hold in all; None: no limit.
        max_sequence_length: tokens that a sequence may have; None: what the pool holds.

    Raises:
        ConfigError: a value above is out of range.

    Example:
        >>> manager = KVBlockManager(num_physical_blocks=64, block_size=4)
        >>> manager.create_sequence(7)
        >>> manager.append_tokens(7, 6)
        [0, 1, 2, 3, 4, 5]
        >>> manager.sequences[7]
        SequenceState(sequence_id=7, sequence_length=6, block_table=(0, 1))
    """

    __slots__ = ()

    @overload
    def slot_mapping_for_append(
        self,
        ids: "Integers",
        counts: "Integers | None" = None,
        token_ids: "Integers | None" = None,
        *,
        device: "Device | None" = None,
        out: None = None,
    ) -> "torch.Tensor": ...
    @overload
    def slot_mapping_for_append(
        self,
        ids: "Integers",
        counts: "Integers | None" = None,
        token_ids: "Integers | None" = None,
        *,
        device: None = None,
        out: _Out,
    ) -> _Out: ...
    def slot_mapping_for_append(
        self,
        ids: "Integers",
        counts: "Integers | None" = None,
        token_ids: "Integers | None" = None,
        *,
        device: "Device | None" = None,
        out: "Memory | None" = None,
    ) -> object:
        """Append to a batch of sequences, in the order of `ids`, and return where the new tokens' K/V go.

        All or nothing: the demand of the whole batch is settled before anything changes. An id named twice appends
        twice. Appending into a shared tail block owes a copy: run `take_copies` before the slots are written.
        Fastest with `ids` (and `counts`) in an int64 tensor on the CPU and a reused `out`.

        Args:
            ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or a sequence of ints.
            counts: `counts [B]`, tokens to append to each (0 allowed), of the same kinds; None appends one to each.
            token_ids: `token_ids [T]`, ids of the new tokens, row after row, of the same kinds; None: told later, with
                `commit`, or known from the prompt.
            device: device of the new tensor; the CPU if None. Not together with `out`.
            out: writable C-contiguous int64 buffer of exactly T elements (CPU tensor, numpy array, `array`,
                memoryview); filled and returned itself.

        Returns:
            `slot_mapping [T] int64`, T = sum of `counts`: the rows' slots one after the other; `out` if it was given.

        Raises:
            UnknownSequenceError: an id names no sequence.
            OutOfBlocksError: the pool has fewer free blocks than the batch takes; `row` is the first that lacks one.
            SequenceTooLongError: a sequence would have more tokens than `max_sequence_length`.
            ArgumentError: a bad id, count, token id (another than the prompt's, for example), `out` or `device`.

        Cost: O(B + T); a crossing into Rust and no work in Python per row.
        """
        if out is not None:
            if device is not None:
                refuse_device(device)
            self.slot_mapping_into(ids, counts, out, token_ids)
            return out
        return self._append_to_new(ids, counts, token_ids, device)

    def _append_to_new(self, ids: Any, counts: Any, token_ids: Any, device: "Device | None") -> object:
        ids = lend("ids", ids)
        counts = None if counts is None else lend("counts", counts)
        num_tokens = num_values(ids) if counts is None else sum_values(counts)
        if num_tokens > self.num_blocks * self.block_size:  # will be refused: no memory for it
            num_tokens = 0
        return fill_new(
            (num_tokens,), "int64", device, lambda slots: self.slot_mapping_into(ids, counts, slots, token_ids)
        )

    @overload
    def get_block_table_tensor(
        self, ids: "Integers", max_blocks: int | None = None, *, device: "Device | None" = None, out: None = None
    ) -> "torch.Tensor": ...
    @overload
    def get_block_table_tensor(
        self, ids: "Integers", max_blocks: int | None = None, *, device: None = None, out: _Out
    ) -> _Out: ...
    def get_block_table_tensor(
        self,
        ids: "Integers",
        max_blocks: int | None = None,
        *,
        device: "Device | None" = None,
        out: "Memory | None" = None,
    ) -> object:
        """Export block tables, a snapshot: logical block -> physical block, one row for each id.

        Args:
            ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or a sequence of ints.
            max_blocks: M, entries in a row. None: what `out` has room for, else the longest table.
            device: device of the new tensor; the CPU if None. Not together with `out`.
            out: writable C-contiguous int32 buffer of exactly B * M elements; filled and returned itself.

        Returns:
            `block_tables [B, M] int32`, rows padded with -1; an empty batch has shape [0, 0]. `out` if it was given.

        Raises:
            UnknownSequenceError: an id names no sequence.
            ArgumentError: `max_blocks` is below the longest table; a bad id, `out` or `device`.

        Cost: O(B * M).
        """
        if out is None:
            return self._tables_in_new(ids, max_blocks, device)
        if device is not None:
            refuse_device(device)
        if max_blocks is not None:
            ids = lend("ids", ids)
            check_room(lend("out", out), num_values(ids), read_width(max_blocks, self.longest_table(ids)))
        self.block_tables_into(ids, out)
        return out

    def _tables_in_new(self, ids: Any, max_blocks: int | None, device: "Device | None") -> object:
        ids = lend("ids", ids)
        while True:
            longest = self.longest_table(ids)
            width = longest if max_blocks is None else read_width(max_blocks, longest)
            num_rows = num_values(ids)
            shape = (num_rows, width) if num_rows else (0, 0)
            try:
                return fill_new(shape, "int32", device, lambda tables: self.block_tables_into(ids, tables))
            except ArgumentError:
                if max_blocks is not None or self.longest_table(ids) <= width:
                    raise  # otherwise another thread made a table longer in between: measure again

    @overload
    def get_seq_lens_tensor(
        self, ids: "Integers", *, device: "Device | None" = None, out: None = None
    ) -> "torch.Tensor": ...
    @overload
    def get_seq_lens_tensor(self, ids: "Integers", *, device: None = None, out: _Out) -> _Out: ...
    def get_seq_lens_tensor(
        self, ids: "Integers", *, device: "Device | None" = None, out: "Memory | None" = None
    ) -> object:
        """Export sequence lengths, a snapshot: tokens that own a slot.

        Args:
            ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or a sequence of ints.
            device: device of the new tensor; the CPU if None. Not together with `out`.
            out: writable C-contiguous int32 buffer of exactly B elements; filled and returned itself.

        Returns:
            `seq_lens [B] int32`; `out` if it was given.

        Raises:
            UnknownSequenceError: an id names no sequence.
            ArgumentError: a bad id, `out` or `device`.

        Cost: O(B).
        """
        if out is None:
            return self._lengths_in_new(ids, device)
        if device is not None:
            refuse_device(device)
        self.seq_lens_into(ids, out)
        return out

    def _lengths_in_new(self, ids: Any, device: "Device | None") -> object:
        ids = lend("ids", ids)
        return fill_new((num_values(ids),), "int32", device, lambda lengths: self.seq_lens_into(ids, lengths))

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """All sequences by id, ids ascending: a read-only view that gives frozen snapshots.

        Cost: a snapshot O(blocks of the sequence), a walk over ids O(sequences log sequences).
        """
        return _SequenceView(self)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"KVBlockManager({stats.num_blocks} blocks of {self.block_size} tokens: {stats.live} live, "
            f"{stats.cached} cached, {stats.fenced} fenced, {stats.free} free; {stats.num_sequences} sequences)"
        )


class _SequenceView(Mapping[int, SequenceState]):
    """The sequences of a manager as a mapping; nothing is copied until a snapshot is asked for."""

    __slots__ = ("_manager",)

    def __init__(self, manager: KVBlockManager) -> None:
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
