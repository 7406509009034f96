"""Runs the model for one step: from slots, tables and new tokens to the hidden states of those tokens.

Owns the order of things in a step: slots are taken, owed copies are run, the model writes keys and values and attends,
then the manager is told that they are written. `run` takes a step of a `DecodeBatch` whose slots are taken already and
leaves the telling to the caller; `step` does it all for sequences that are in no batch.

What the device reads lies in tensors that are made once (`StepTensors`), and a decode step can be padded to a few fixed
numbers of rows whose padding writes nothing: so it can be recorded and replayed (`kvpager.graphs`). On a CPU the device
reads the batch's own buffers, so a steady decode copies nothing but its B input tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpager import ops
from kvpager.block_manager import KVBlockManager
from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.decode_batch import BatchBuffers, BatchStep
from kvpager.errors import ArgumentError
from kvpager.graphs import Replay
from kvpager.models import DecoderForCausalLM


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
        for name in ("seq_lens", "query_start_loc", "slot_mapping"):
            getattr(copies, name).copy_(getattr(buffers, name), non_blocking=True)
        if step.upload_table:
            copies.block_tables.copy_(buffers.block_tables, non_blocking=True)
        elif step.num_changes:
            changed = buffers.changed[: step.num_changes].to(self._device, non_blocking=True)
            ops.update_tables(copies.block_tables, changed)
        return copies


def _to_device(buffers: BatchBuffers[Tensor], device: torch.device) -> BatchBuffers[Tensor]:
    """Copies of a fresh batch's buffers: no rows."""
    return BatchBuffers(
        block_tables=buffers.block_tables.to(device, copy=True),
        seq_lens=buffers.seq_lens.to(device, copy=True),
        query_start_loc=buffers.query_start_loc.to(device, copy=True),
        slot_mapping=buffers.slot_mapping.to(device, copy=True),
        changed=buffers.changed,
    )


class ModelRunner:
    """A model, the cache its keys and values go to, and the manager that says where.

    Args:
        model: the decoder.
        cache: its pool.
        block_manager: of that pool.
        decode_sizes: numbers of rows, ascending, to which a step that only decodes is padded; the batch's buffers must
            have room for them. Empty: steps are run as they are.
        fixed_split: see `EngineConfig`.
        capture: records a computation; None: steps are run anew each time. Padded decode steps are recorded, so their
            tensors must be copied ones (`StepTensors`).
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        cache: PagedKVCache,
        block_manager: KVBlockManager,
        *,
        decode_sizes: Sequence[int] = (),
        fixed_split: int = 0,
        capture: Callable[[Callable[[], Tensor]], Replay] | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_manager = block_manager
        self.decode_sizes = tuple(decode_sizes)
        self.fixed_split = fixed_split
        self.capture = capture
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def run(
        self,
        tensors: StepTensors,
        step: BatchStep,
        buffers: BatchBuffers[Tensor],
        input_ids: NDArray[np.int64],
        counts: NDArray[np.int64] | None,
        *,
        max_query_len: int,
        max_seq_len: int,
    ) -> Tensor:
        """Computes a step of a batch: owed copies, then the model. Nothing is committed.

        Args:
            tensors: made for this batch.
            step, buffers: what the batch wrote, and where.
            input_ids: [T] int64, the new tokens, row after row.
            counts: [B] int64, new tokens of each row; None: one each.
            max_query_len, max_seq_len: upper bounds of `counts` and of the rows' lengths.

        Returns:
            Hidden states [T, C] of the new tokens; of a recorded step they stay until the next one is run.
        """
        if copies := self.block_manager.take_copies():
            self.cache.copy_blocks(copies)
        found = tensors.load(step, buffers, input_ids, counts)
        B, T = step.num_rows, step.num_tokens
        is_recorded = False
        if counts is None:
            B = T = self._padded(B, len(found.seq_lens))
            is_recorded = self.capture is not None and B in self.decode_sizes
        if is_recorded and (replay := tensors.replays.get(B)) is not None:
            return replay()[: step.num_tokens]
        if is_recorded:  # what is recorded must hold for every later step
            max_seq_len = found.block_tables.shape[1] * self.cache.block_size
        metadata = AttentionMetadata(
            slot_mapping=found.slot_mapping[:T],
            block_tables=found.block_tables[:B],
            seq_lens=found.seq_lens[:B],
            query_start_loc=found.query_start_loc[: B + 1],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            fixed_split=self.fixed_split,
        )

        def compute() -> Tensor:
            hidden: Tensor = self.model(tensors.input_ids[:T], tensors.positions[:T], self.cache, metadata)  # [T, C]
            return hidden

        if is_recorded and self.capture is not None:
            tensors.replays[B] = compute = self.capture(compute)
        return compute()[: step.num_tokens]

    def _padded(self, num_rows: int, room: int) -> int:
        place = bisect_left(self.decode_sizes, num_rows)
        return min(self.decode_sizes[place], room) if place < len(self.decode_sizes) else num_rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor, token_index: NDArray[np.int64] | None = None) -> Tensor:
        """Scores of the tokens that follow: hidden [T, C], of these the rows [R] asked for → [R, V]."""
        if token_index is not None:
            hidden = hidden[torch.from_numpy(token_index).to(hidden.device)]
        return self.model.logits(hidden)

    @torch.inference_mode()
    def step(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Computes the given new tokens of sequences that are in no batch: the whole step, commit included.

        Args:
            sequence_ids: B ids known to the block manager, each at most once.
            token_ids: for each sequence the tokens that follow its computed ones, at least one.

        Returns:
            Logits [B, V] float32 after each sequence's last given token.

        Raises:
            ArgumentError: an id named twice, or no token for one.
            OutOfBlocksError: nothing has changed then.
            Exception: the forward pass failed; the sequences have grown by slots that hold nothing. Release them.
        """
        counts = [len(tokens) for tokens in token_ids]
        if len(set(sequence_ids)) != len(sequence_ids):
            raise ArgumentError("sequence_ids", "each at most once", list(sequence_ids))
        if len(counts) != len(sequence_ids) or min(counts, default=0) < 1:
            raise ArgumentError("token_ids", f"at least one for each of {len(sequence_ids)} sequences", counts)
        slot_mapping = self.block_manager.slot_mapping_for_append(sequence_ids, counts, device=self.device)
        if copies := self.block_manager.take_copies():
            self.cache.copy_blocks(copies)
        seq_lens = self.block_manager.get_seq_lens_tensor(sequence_ids)
        input_ids, positions, starts = _flatten(token_ids, seq_lens.tolist())
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            block_tables=self.block_manager.get_block_table_tensor(sequence_ids, device=self.device),
            seq_lens=seq_lens.to(self.device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            max_query_len=max(counts),
            max_seq_len=int(seq_lens.max()),
            fixed_split=self.fixed_split,
        )
        hidden = self.model(input_ids.to(self.device), positions.to(self.device), self.cache, metadata)  # [T, C]
        for sequence_id, length in zip(sequence_ids, seq_lens.tolist(), strict=True):
            self.block_manager.commit(sequence_id, length)
        last = torch.tensor(starts[1:], device=self.device) - 1
        return self.model.logits(hidden[last])


def _flatten(token_ids: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """All sequences' tokens in a row: ids [T], positions [T], and where each sequence begins, [B + 1]."""
    input_ids = torch.tensor([token for tokens in token_ids for token in tokens], dtype=torch.int64)
    spans = [torch.arange(end - len(tokens), end) for tokens, end in zip(token_ids, seq_lens, strict=True)]
    starts = [0]
    for tokens in token_ids:
        starts.append(starts[-1] + len(tokens))
    return input_ids, torch.cat(spans), starts
