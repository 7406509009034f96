"""`AttentionMetadata`: what attention needs to know about one step."""

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.tensors import refuse, require_tensors


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """What attention needs to know about one step, on the cache's device.

    Attributes:
        slot_mapping: slot_mapping [T] int64: where each new token's K/V go; −1 = nowhere.
        block_tables: block_tables [B, M] int32, padded with −1.
        seq_lens: seq_lens [B] int32: tokens of each sequence, those of this step included.
        query_start_loc: query_start_loc [B + 1] int32: the new tokens of sequence b are rows [b] … [b + 1] − 1.
        max_query_len: upper bound of the new tokens of a sequence.
        max_seq_len: upper bound of `seq_lens`.
        split_plan: from `kvpager.ops.make_split_plan`, for steps of one token a sequence; None lets the kernels cut.
        workspace: uint8 of `kvpager.ops.workspace_bytes`, zeroed once; None lets the kernels find room.
        fixed_split: see `kvpager.ops.paged_attention`.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    split_plan: Tensor | None = None
    workspace: Tensor | None = None
    fixed_split: int = 0


def refuse_step(query: Tensor, metadata: AttentionMetadata) -> NoReturn:
    """Say why no kind of attention could be told for a step."""
    if not isinstance(metadata, AttentionMetadata):
        raise ArgumentError("metadata", "an `AttentionMetadata`", type(metadata).__name__)
    require_tensors(query=query, seq_lens=metadata.seq_lens)
    if query.dim() != 3:
        refuse("query", "[T, H, D]", query)
    refuse("seq_lens", "[B] int32", metadata.seq_lens)
