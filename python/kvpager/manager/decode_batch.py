"""`DecodeBatch`: what the kernels of one step need to know about its rows, kept from step to step.

From one decode step to the next almost nothing changes: every row is one token longer, and one in `block_size` rows has
a new block. So the batch persists in Rust and a step writes what changed, straight into the memory of two sets of
tensors that take turns. The class is a thin subclass: `step` is the Rust method itself. What is added here makes the
tensors. torch is imported there, never before.
"""

from typing import TYPE_CHECKING, Generic, Self, TypeVar

from kvpager import _core
from kvpager._core import BatchStep as BatchStep
from kvpager.errors import ArgumentError
from kvpager.kinds import is_whole
from kvpager.records import BatchBuffers, new_buffers

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from kvpager.manager.block_manager import KVBlockManager

_Memory = TypeVar("_Memory", bound="torch.Tensor | Buffer")


class DecodeBatch(_core.DecodeBatch, Generic[_Memory]):
    """Sequences that step together, shown in two buffer sets that take turns.

    While a device still reads the set of step n, step n + 1 is prepared in the other: what was exported for a step is
    not touched until the step after the next. `changed` is the difference to the previous *step*, which used the other
    set: who keeps one table on a device applies each step's changes to it, in the order of the steps, and uploads the
    whole table only where a step says so.

    A sequence is a row of one batch at most. It may be committed, truncated, forked and appended to by id; the next
    step shows it. Releasing it is a `StateError` until it is removed. When the batch is garbage, its rows are free.

    Args:
        manager: whose sequences they are.
        first, second: B, M, T and C are the sizes of `first`; `second` has the same, and shares no memory with it. Both
            are written at once: no rows. They belong to the batch from then on, to be read.

    Raises:
        ArgumentError: a buffer has not the type or shape that `BatchBuffers` says, or is not on the CPU.

    Example:
        >>> from kvpager import KVBlockManager
        >>> manager = KVBlockManager(64, 4)
        >>> batch = DecodeBatch.with_capacity(manager, max_rows=2, max_blocks=3)
        >>> manager.create_sequence(7)
        >>> batch.add(7)
        0
        >>> batch.step()
        BatchStep(buffer_set=0, num_rows=1, num_tokens=1, num_changes=1, upload_table=False)
        >>> batch.buffers[0].block_tables.tolist()
        [[0, -1, -1], [-1, -1, -1]]
    """

    __slots__ = ("_buffers",)

    _buffers: tuple[BatchBuffers[_Memory], BatchBuffers[_Memory]]

    def __new__(cls, manager: "KVBlockManager", first: BatchBuffers[_Memory], second: BatchBuffers[_Memory]) -> Self:
        """Check both sets, hold their memory and write "no rows" into it. O(B * M + T)."""
        self = super().__new__(cls, manager, first, second)
        self._buffers = (first, second)
        return self

    @classmethod
    def with_capacity(
        cls: "type[DecodeBatch[torch.Tensor]]",
        manager: "KVBlockManager",
        max_rows: int,
        max_blocks: int,
        *,
        max_tokens: int | None = None,
        max_changes: int | None = None,
        pin_memory: bool = False,
    ) -> "DecodeBatch[torch.Tensor]":
        """Make a batch over new tensors.

        Args:
            manager: whose sequences they are.
            max_rows: B, sequences at once.
            max_blocks: M, blocks of one sequence.
            max_tokens: T, new tokens of one step; None = B, a decode step.
            max_changes: C, table entries that one step can list; None = B + M, a decode step that one row joins.
            pin_memory: whether a GPU shall be able to copy from the tensors without waiting.

        Raises:
            ArgumentError: a size is negative, or no whole number; or `pin_memory` is no bool, or asked for where no
                memory can be pinned.
        """
        import torch

        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "max_tokens": max_tokens, "max_changes": max_changes}
        for argument, size in sizes.items():
            if size is None and argument in ("max_tokens", "max_changes"):
                continue
            if not is_whole(size) or not 0 <= size < 2**63:
                raise ArgumentError(argument, "a size of at least 0", repr(size))
        if not isinstance(pin_memory, bool):
            raise ArgumentError("pin_memory", "True or False", repr(pin_memory))
        if pin_memory and not torch.cuda.is_available():
            raise ArgumentError("pin_memory", "False on a machine without a CUDA driver", "True")

        capacity = (max_rows, max_blocks, max_tokens, max_changes)
        return cls(manager, *(new_buffers(*capacity, pin_memory=pin_memory) for _ in range(2)))

    @property
    def buffers(self) -> tuple[BatchBuffers[_Memory], BatchBuffers[_Memory]]:
        """The two sets; `step` says which one it wrote."""
        return self._buffers

    def __repr__(self) -> str:
        sizes = f"{self.max_blocks} blocks, {self.max_tokens} tokens, {self.max_changes} changes"
        return f"DecodeBatch({self.num_rows} of {self.max_rows} rows; room for {sizes})"
