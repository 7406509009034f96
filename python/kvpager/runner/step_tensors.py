"""`StepTensors`: the tensors that the device reads in a step, made once and loaded before each step.

On a CPU the model reads the batch's own buffers, so a steady decode copies nothing but its B input tokens. On a GPU the
buffers are copied; of the block tables only the changed entries are.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpager import ops
from kvpager.manager import BatchBuffers, BatchStep
from kvpager.runner.graphs import Replay

_UPLOADED = ("seq_lens", "query_start_loc", "slot_mapping")  # whole, in every step


class StepTensors:
    """The inputs of any step of one batch, on the model's device.

    Args:
        buffers: one of the batch's two buffer sets, for its sizes B, M and T.
        device: where the model computes. On the CPU the batch's buffers are read in place, else they are copied into
            tensors of the device: tables by their changes.
        copied: whether they are copied; None: where the device is not the CPU.
    """

    def __init__(self, buffers: BatchBuffers[Tensor], device: torch.device, *, copied: bool | None = None) -> None:
        T = buffers.slot_mapping.shape[0]
        self.input_ids = torch.zeros(T, dtype=torch.int64, device=device)
        self.positions = torch.zeros(T, dtype=torch.int64, device=device)
        self.replays: dict[int, Replay] = {}  # recorded decode steps, by padded number of rows
        self._device = device
        is_copied = device.type != "cpu" if copied is None else copied
        self._copies = _to_device(buffers, device) if is_copied else None

    def load(
        self, step: BatchStep, buffers: BatchBuffers[Tensor], input_ids: NDArray[np.int64], counts: Any
    ) -> BatchBuffers[Tensor]:
        """Brings a step's inputs to the device. O(B + T), without Python per row.

        Args:
            step: what the batch says it wrote.
            buffers: into which set.
            input_ids: [T].
            counts: [B] tokens of each row, or None: one each.

        Returns:
            Where the device finds tables, lengths and slots.
        """
        T, B = step.num_tokens, step.num_rows
        self.input_ids[:T].copy_(torch.from_numpy(input_ids))
        found = buffers if self._copies is None else self._copy(step, buffers, self._copies)
        if counts is None:
            torch.sub(found.seq_lens, 1, out=self.positions[: len(found.seq_lens)])
            self.positions.clamp_(min=0)  # rows past the last have length 0
        else:
            ends, lengths = np.cumsum(counts), buffers.seq_lens[:B].numpy()
            positions = np.arange(T) + np.repeat(lengths - ends, counts)
            self.positions[:T].copy_(torch.from_numpy(positions))
        return found

    def _copy(
        self, step: BatchStep, buffers: BatchBuffers[Tensor], copies: BatchBuffers[Tensor]
    ) -> BatchBuffers[Tensor]:
        for name in _UPLOADED:
            getattr(copies, name).copy_(getattr(buffers, name), non_blocking=True)
        if step.upload_table:
            copies.block_tables.copy_(buffers.block_tables, non_blocking=True)
        elif step.num_changes:
            changed = buffers.changed[: step.num_changes].to(self._device, non_blocking=True)
            ops.update_tables(copies.block_tables, changed)
        return copies


def _to_device(buffers: BatchBuffers[Tensor], device: torch.device) -> BatchBuffers[Tensor]:
    """Copies of a fresh batch's buffers: no rows."""
    return replace(buffers, **{n: getattr(buffers, n).to(device, copy=True) for n in ("block_tables", *_UPLOADED)})
