"""`forward_eager`: one whole step for sequences that are in no batch; comparisons need no scheduler for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpager.cache import AttentionMetadata
from kvpager.errors import ArgumentError
from kvpager.runner import ModelRunner


@torch.inference_mode()
def forward_eager(runner: ModelRunner, sequence_ids: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Take slots for the given new tokens, compute them and commit them.

    Args:
        runner: model, cache and block manager.
        sequence_ids: B ids known to the block manager, each at most once.
        token_ids: for each sequence the tokens that follow its computed ones, at least one.

    Returns:
        Logits [B, V] float32 after each sequence's last given token.

    Raises:
        ArgumentError: an id named twice, or no token for one.
        OutOfBlocksError: nothing has changed then.
        Exception: the forward pass failed; the sequences have grown by slots that hold nothing. Release them.
    """
    manager, cache, device = runner.block_manager, runner.cache, runner.device
    counts = [len(tokens) for tokens in token_ids]
    if len(set(sequence_ids)) != len(sequence_ids):
        raise ArgumentError("sequence_ids", "each at most once", list(sequence_ids))
    if len(counts) != len(sequence_ids) or min(counts, default=0) < 1:
        raise ArgumentError("token_ids", f"at least one for each of {len(sequence_ids)} sequences", counts)
    slot_mapping = manager.slot_mapping_for_append(sequence_ids, counts, device=device)
    if copies := manager.take_copies():
        cache.copy_blocks(copies)
    seq_lens = manager.get_seq_lens_tensor(sequence_ids)
    starts = torch.tensor([0, *counts]).cumsum(0)  # [B + 1]: where each sequence's tokens begin
    input_ids = torch.tensor([token for tokens in token_ids for token in tokens])
    positions = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, seq_lens.tolist(), strict=True)])
    metadata = AttentionMetadata(
        slot_mapping=slot_mapping,
        block_tables=manager.get_block_table_tensor(sequence_ids, device=device),
        seq_lens=seq_lens.to(device),
        query_start_loc=starts.to(device, torch.int32),
        max_query_len=max(counts),
        max_seq_len=int(seq_lens.max()),
        fixed_split=runner.fixed_split,
    )
    hidden = runner.model(input_ids.to(device), positions.to(device), cache, metadata)  # [T, C]
    for sequence_id, length in zip(sequence_ids, seq_lens.tolist(), strict=True):
        manager.commit(sequence_id, length)
    return runner.model.logits(hidden[starts[1:].to(device) - 1])
