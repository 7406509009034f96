"""What a hand-off knows of a call before it sees a layer's tensors, and what it owes rows that see nothing."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

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
        scale, max_query_len, max_seq_len, window, softcap, sinks, key_scale, value_scale: as in `kvpager.ops`.
        fixed_split: as in `kvpager.ops.paged_attention`.
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
    scale: float
    max_query_len: int
    max_seq_len: int
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    fixed_split: int = 0

    @classmethod
    def of(cls, query: Tensor, key_cache: Tensor, **given: Any) -> Self:
        """Sizes, dtypes and device are those of query [T, H, D] and key_cache [N, K, S, D]; scale None is 1 / √D."""
        T, H, D = query.shape
        _, K, S, _ = key_cache.shape
        if given.get("scale") is None:
            given["scale"] = D**-0.5
        return cls(
            num_tokens=T, num_heads=H, num_kv_heads=K, head_dim=D, block_size=S, query_dtype=query.dtype,
            cache_dtype=key_cache.dtype, device=query.device, **given,
        )  # fmt: skip

    @property
    def window_left(self) -> int:
        """Positions before its own that a query sees; −1: all."""
        return self.window - 1 if self.window else -1

    def common_refusal(self) -> str | None:
        """What neither FlashInfer nor flash-attn takes."""
        if self.device.type != HANDED_OFF_DEVICE:
            return f"tensors on {self.device.type}"
        if self.cache_dtype != self.query_dtype:
            return f"a cache of {self.cache_dtype} codes with scales"
        if self.query_dtype not in HANDED_OFF_DTYPES:
            return str(self.query_dtype)
        if self.sinks is not None:
            return "sinks"
        if self.fixed_split:
            return "a fixed split"
        return None

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
        """Query and out [T, H, D], HND caches [N, K, S, D], lse [T, H] float32 or None if it is not wanted."""
