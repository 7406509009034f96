"""Runs the model for one step: from sequences and their new tokens to the logits of each one's next token.

Owns the order of things in a step: slots are taken, owed copies are run, the model writes keys and values and attends,
the manager is told that they are written. Keeps no state of its own; what a sequence has computed is its length in
the block manager. O(new tokens) on the host, one upload per tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpager.block_manager import KVBlockManager
from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.errors import ArgumentError
from kvpager.models import DecoderForCausalLM


class ModelRunner:
    """A model, the cache its keys and values go to, and the manager that says where."""

    def __init__(self, model: DecoderForCausalLM, cache: PagedKVCache, block_manager: KVBlockManager) -> None:
        self.model = model
        self.cache = cache
        self.block_manager = block_manager
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def step(self, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Computes the given new tokens of every sequence: a prompt, a part of one, or the token sampled last.

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
        slot_mapping = self.block_manager.slot_mapping_for_append(sequence_ids, counts, device=self._device)
        if copies := self.block_manager.take_copies():
            self.cache.copy_blocks(copies)
        seq_lens = self.block_manager.get_seq_lens_tensor(sequence_ids)
        input_ids, positions, starts = _flatten(token_ids, seq_lens.tolist())
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            block_tables=self.block_manager.get_block_table_tensor(sequence_ids, device=self._device),
            seq_lens=seq_lens.to(self._device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self._device),
            max_query_len=max(counts),
            max_seq_len=int(seq_lens.max()),
        )
        hidden = self.model(input_ids.to(self._device), positions.to(self._device), self.cache, metadata)  # [T, C]
        for sequence_id, length in zip(sequence_ids, seq_lens.tolist(), strict=True):
            self.block_manager.commit(sequence_id, length)
        last = torch.tensor(starts[1:], device=self._device) - 1
        return self.model.logits(hidden[last])


def _flatten(token_ids: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """All sequences' tokens in a row: ids [T], positions [T], and where each sequence begins, [B + 1]."""
    input_ids = torch.tensor([token for tokens in token_ids for token in tokens], dtype=torch.int64)
    spans = [torch.arange(end - len(tokens), end) for tokens, end in zip(token_ids, seq_lens, strict=True)]
    starts = [0]
    for tokens in token_ids:
        starts.append(starts[-1] + len(tokens))
    return input_ids, torch.cat(spans), starts
