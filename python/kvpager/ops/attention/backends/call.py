"""What a hand-off knows of a call before it sees a layer's tensors, and what it owes rows that see nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvpager.ops.attention.options import AttentionOptions

HANDED_OFF_DTYPES = (torch.float16, torch.bfloat16)
HANDED_OFF_DEVICE = "cuda"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Everything of a call but query, K and V; the caches are HND.

    Attributes:
        block_tables: [B, M] int32.
        seq_lens: [B] int32.
        query_start_loc: [B + 1] int32 of a prefill; None: one query a sequence.
        num_tokens, num_heads, num_kv_heads, head_dim, block_size: T, H, K, D, S.
        query_dtype, cache_dtype, device: of the tensors.
        max_query_len, max_seq_len, fixed_split: as in `kvpager.ops`.
        options: the options of attention, with a scale.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    max_query_len: int
    max_seq_len: int
    options: AttentionOptions
    fixed_split: int = 0

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, tables: tuple[Tensor, ...], keywords: Mapping[str, Any]) -> Self:
        """The call of an op with its bounds filled in: query [T, H, D], key_cache [N, K, S, D], and its keywords.

        `tables` are block_tables and seq_lens, of a prefill with query_start_loc between them.
        """
        T, H, D = query.shape
        _, K, S, _ = key_cache.shape
        block_tables, *starts, seq_lens = tables
        options = AttentionOptions.of(keywords)
        if options.scale is None:
            options = options._replace(scale=D**-0.5)
        return cls(
            block_tables=block_tables, seq_lens=seq_lens, query_start_loc=starts[0] if starts else None, num_tokens=T,
            num_heads=H, num_kv_heads=K, head_dim=D, block_size=S, query_dtype=query.dtype,
            cache_dtype=key_cache.dtype, device=query.device, max_query_len=keywords.get("max_query_len", 1),
            max_seq_len=keywords["max_seq_len"], options=options, fixed_split=keywords.get("fixed_split", 0),
        )  # fmt: skip

    @property
    def window_left(self) -> int:
        """Positions before its own that a query sees; −1: all."""
        return self.options.window - 1 if self.options.window else -1

    def refusal(self, supported: frozenset[str]) -> str | None:
        """What no package that kvpager hands off to takes, or the first option that is not among the supported."""
        if self.device.type != HANDED_OFF_DEVICE:
            return f"tensors on {self.device.type}"
        if self.cache_dtype != self.query_dtype:
            return f"a cache of {self.cache_dtype} codes with scales"
        if self.query_dtype not in HANDED_OFF_DTYPES:
            return str(self.query_dtype)
        if self.fixed_split:
            return "a fixed split"
        return self.options.unsupported(supported)

    def clear_empty(self, out: Tensor, lse: Tensor | None) -> None:
        """Zeros, and lse −inf, for rows that see nothing: the packages leave there what they like. out [T, H, D]."""
        if self.query_start_loc is None:
            empty = self.seq_lens == 0
        else:
            empty = torch.arange(self.num_tokens, device=self.device) >= self.query_start_loc[-1]
        out.masked_fill_(empty[:, None, None], 0)
        if lse is not None:
            lse.masked_fill_(empty[:, None], -torch.inf)


class Run(Protocol):
    """Attention of one layer, by a backend that has planned the step."""

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, lse: Tensor | None, /
    ) -> None:
        """Attend: `query`, `out` [T, H, D], HND caches [N, K, S, D], `lse` [T, H] float32 or None if not wanted."""
