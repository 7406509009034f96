"""`KVBlockManager`: the Rust allocator with the calls that speak torch.

The class is a thin subclass: what needs no tensor is the Rust method itself, so nothing stands between a caller and
`append_token`. What is added here lends the memory of tensors to Rust, which reads ids from it and writes answers into
it; nothing is decided here. torch is imported inside the calls that make a tensor, never before.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from kvpager import _core
from kvpager.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    Integers: TypeAlias = torch.Tensor | Buffer | Sequence[int]
    Device: TypeAlias = torch.device | str | int

_Out = TypeVar("_Out", bound="torch.Tensor | Buffer")


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
    """Who owns which block of a paged key/value cache: pool, block tables, copy-on-write.

    Works on integers alone: the keys and values lie in the caller's tensors, at the slots that are handed out here
    (slot = block id * block_size + offset). All calls may be made from any thread; each does all of its work or, when
    it raises, nothing. `kvpager.reference.KVBlockManager` is the same contract in plain Python, made to be read.

    Args:
        num_physical_blocks: N, blocks in the pool, 1 to 2^31 - 1.
        block_size: S, token positions in a block, at least 1; N * S must fit int64.
        enable_prefix_caching: must be False until the prefix index arrives.

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
        self, ids: "Integers", counts: "Integers | None" = None, *, device: "Device | None" = None, out: None = None
    ) -> "torch.Tensor": ...
    @overload
    def slot_mapping_for_append(
        self, ids: "Integers", counts: "Integers | None" = None, *, device: None = None, out: _Out
    ) -> _Out: ...
    def slot_mapping_for_append(
        self,
        ids: "Integers",
        counts: "Integers | None" = None,
        *,
        device: "Device | None" = None,
        out: "torch.Tensor | Buffer | None" = None,
    ) -> object:
        """Append to a batch of sequences, in the order of `ids`, and return where the new tokens' K/V go.

        All or nothing: the demand of the whole batch is settled before anything changes. An id named twice appends
        twice. Appending into a shared tail block owes a copy: run `take_copies` before the slots are written.
        Fastest with `ids` (and `counts`) in an int64 tensor on the CPU and a reused `out`.

        Args:
            ids: `ids [B]`, sequence ids: an int64 or int32 tensor (CPU), array or other buffer, or a sequence of ints.
            counts: `counts [B]`, tokens to append to each (0 allowed), of the same kinds; None appends one to each.
            device: device of the new tensor; the CPU if None. Not together with `out`.
            out: writable C-contiguous int64 buffer of exactly T elements (CPU tensor, numpy array, `array`,
                memoryview); filled and returned itself.

        Returns:
            `slot_mapping [T] int64`, T = sum of `counts`: the rows' slots one after the other; `out` if it was given.

        Raises:
            UnknownSequenceError: an id names no sequence.
            OutOfBlocksError: the pool has fewer free blocks than the batch takes; `row` is the first that lacks one.
            ArgumentError: a bad id, count, `out` or `device`.

        Cost: O(B + T); a crossing into Rust and no work in Python per row.
        """
        ids = _lend("ids", ids)
        counts = None if counts is None else _lend("counts", counts)
        if out is not None:
            _refuse_device(device)
            self.slot_mapping_into(ids, counts, _lend("out", out))
            return out
        num_tokens = _length(ids) if counts is None else _total(counts)
        if num_tokens > self.num_blocks * self.block_size:  # will be refused: no memory for it
            num_tokens = 0
        return _fill_new((num_tokens,), "int64", device, lambda slots: self.slot_mapping_into(ids, counts, slots))

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
        out: "torch.Tensor | Buffer | None" = None,
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
        ids = _lend("ids", ids)
        if out is not None:
            _refuse_device(device)
            lent = _lend("out", out)
            if max_blocks is not None:
                _check_room(lent, _length(ids), _read_width(max_blocks, self.longest_table(ids)))
            self.block_tables_into(ids, lent)
            return out
        while True:
            longest = self.longest_table(ids)
            width = longest if max_blocks is None else _read_width(max_blocks, longest)
            num_rows = _length(ids)
            shape = (num_rows, width) if num_rows else (0, 0)
            try:
                return _fill_new(shape, "int32", device, lambda tables: self.block_tables_into(ids, tables))
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
        self, ids: "Integers", *, device: "Device | None" = None, out: "torch.Tensor | Buffer | None" = None
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
        ids = _lend("ids", ids)
        if out is not None:
            _refuse_device(device)
            self.seq_lens_into(ids, _lend("out", out))
            return out
        return _fill_new((_length(ids),), "int32", device, lambda lengths: self.seq_lens_into(ids, lengths))

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
            f"{stats.fenced} fenced, {stats.free} free; {stats.num_sequences} sequences)"
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


def _lend(argument: str, value: Any) -> Any:
    """`value` as something that Rust may read more than once: a numpy view if it is a tensor, a list if an iterator.

    Rust could ask a tensor for its view itself, but only after it failed to find a buffer, which costs a microsecond.
    """
    torch = sys.modules.get("torch")  # who passes a tensor has imported torch
    tensor_class: Any = getattr(torch, "Tensor", ())
    if not isinstance(value, tensor_class):
        return list(value) if isinstance(value, Iterator) else value
    try:
        return value.numpy()
    except (TypeError, RuntimeError):
        came = f"a {value.dtype} tensor on {value.device}" + (" that requires grad" if value.requires_grad else "")
        raise ArgumentError(argument, "a tensor on the CPU that numpy can view", came) from None


def _fill_new(shape: tuple[int, ...], dtype: str, device: "Device | None", fill: Callable[[Any], None]) -> object:
    """A new tensor on `device`, filled by Rust. It is made first: a device may be missing, or full."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if tensor.device.type == "cpu":
        fill(tensor.numpy())
        return tensor
    host = torch.empty(shape, dtype=tensor.dtype)
    fill(host.numpy())
    return tensor.copy_(host)


def _length(values: Any) -> int:
    """Rows of `values`; 0 for what has no length, which Rust then refuses by name."""
    try:
        return len(values)
    except TypeError:
        return 0


def _total(counts: Any) -> int:
    """Sum of `counts`; 0 for what can't be summed, which Rust then refuses by name."""
    with suppress(TypeError, NotImplementedError):  # no buffer, or one that Rust refuses
        counts = memoryview(counts).tolist()
    try:
        return max(0, sum(map(operator.index, counts)))
    except TypeError:
        return 0


def _refuse_device(device: object) -> None:
    if device is not None:
        raise ArgumentError("device", "None together with `out`", device)


def _read_width(max_blocks: int, longest: int) -> int:
    wanted = f"at least {longest}, the longest table"
    try:
        width = operator.index(max_blocks)
    except TypeError:
        raise ArgumentError("max_blocks", wanted, type(max_blocks).__name__) from None
    if width < longest:
        raise ArgumentError("max_blocks", wanted, width)
    return width


def _check_room(out: Any, num_rows: int, width: int) -> None:
    """Refuse an `out` that is a buffer but not of `num_rows` * `width` elements."""
    try:
        view = memoryview(out)
    except TypeError:
        return  # no buffer at all: Rust says so
    if view.nbytes // view.itemsize != num_rows * width:
        wanted = f"a writable, contiguous int32 buffer of {num_rows * width} elements on the CPU"
        raise ArgumentError("out", wanted, f"a buffer of shape {list(view.shape or ())} and format `{view.format}`")
