"""`ModelRunner`: runs the model for one step, from slots, tables and new tokens to hidden states.

The order of a step: slots are taken, owed copies are run, the model writes keys and values and attends, then the
manager is told that they are written. The runner does the two in the middle; slots and telling are the caller's.

A step's tensors are made once (`StepTensors`), and a decode step can be padded to a few fixed numbers of rows whose
padding writes nothing: so it can be recorded and replayed (`kvpager.runner.graphs`).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpager import ops
from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.manager import BatchBuffers, BatchStep, KVBlockManager
from kvpager.models import Model
from kvpager.ops.attention.split_plan import MIN_PART_TOKENS
from kvpager.runner.graphs import Replay
from kvpager.runner.step_tensors import StepTensors


class ModelRunner:
    """A model, the cache its keys and values go to, and the manager that says where.

    Args:
        model: on the device it runs on, in evaluation mode.
        cache: its pool.
        block_manager: of that pool.
        decode_sizes: numbers of rows, ascending, to which a step that only decodes is padded; the batch's buffers must
            have room for them. Empty: steps are run as they are.
        fixed_split: see `EngineConfig`.
        capture: records a computation; None: steps are run anew each time. Padded decode steps are recorded, so their
            tensors must be copied ones (`StepTensors`).
        plans_splits: make the split plan and the workspace of a step's decode attention once for all layers. False:
            each layer's kernel makes its own, which costs less on a CPU.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        block_manager: KVBlockManager,
        *,
        decode_sizes: Sequence[int] = (),
        fixed_split: int = 0,
        capture: Callable[[Callable[[], Tensor]], Replay] | None = None,
        plans_splits: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_manager = block_manager
        self.decode_sizes = tuple(decode_sizes)
        self.fixed_split = fixed_split
        self.capture = capture
        self.plans_splits = plans_splits
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

        def compute() -> Tensor:
            metadata = AttentionMetadata(
                slot_mapping=found.slot_mapping[:T],
                block_tables=found.block_tables[:B],
                seq_lens=found.seq_lens[:B],
                query_start_loc=found.query_start_loc[: B + 1],
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                fixed_split=self.fixed_split,
                **self._split(found.seq_lens[:B], max_seq_len) if counts is None else {},
            )
            hidden: Tensor = self.model(tensors.input_ids[:T], tensors.positions[:T], self.cache, metadata)  # [T, C]
            return hidden

        if is_recorded and self.capture is not None:
            tensors.replays[B] = compute = self.capture(compute)
        return compute()[: step.num_tokens]

    def _split(self, seq_lens: Tensor, max_seq_len: int) -> dict[str, Tensor]:
        """The plan and the workspace of a decode step's attention.

        A recorded step makes them anew in each replay, of the lengths of that moment: the plan is part of the graph.
        """
        if not self.plans_splits:
            return {}
        cache, H = self.cache, self.model.config.num_attention_heads
        num_bytes = ops.workspace_bytes(
            len(seq_lens), H, cache.head_dim, max_seq_len=max_seq_len, fixed_split=self.fixed_split,
            num_kv_heads=cache.num_kv_heads, device=self.device,
        )  # fmt: skip
        plan = ops.make_split_plan(
            seq_lens, block_size=cache.block_size, fixed_split=self.fixed_split, num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim, min_part_tokens=MIN_PART_TOKENS,
        )  # fmt: skip
        return {"split_plan": plan, "workspace": torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)}

    def _padded(self, num_rows: int, room: int) -> int:
        place = bisect_left(self.decode_sizes, num_rows)
        return min(self.decode_sizes[place], room) if place < len(self.decode_sizes) else num_rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor, token_index: NDArray[np.int64] | None = None) -> Tensor:
        """Scores of the tokens that follow: hidden [T, C], of these the rows [R] asked for → [R, V]."""
        if token_index is not None:
            hidden = hidden[torch.from_numpy(token_index).to(hidden.device)]
        return self.model.logits(hidden)
