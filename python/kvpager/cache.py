"""`PagedKVCache`, the K/V of all layers of a model in one allocation, and `AttentionMetadata`, what a step needs.

The cache knows no sequence and hands out no block; it holds bytes, writes rows into slots and attends through tables.
Two arrangements of the one allocation: layer-major [L, 2, N, block] (a layer's blocks lie together) and block-major
[N, L, 2, block] (one copy moves a block through all layers). `key_cache[l]` and `value_cache[l]` are views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from kvpager import ops
from kvpager.errors import ConfigError
from kvpager.ops.checks import FLOAT_DTYPES


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
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


class CacheShape(Protocol):
    """The part of a model's configuration that shapes its cache."""

    @property
    def num_hidden_layers(self) -> int:
        """L, the layers that attend."""

    @property
    def num_key_value_heads(self) -> int:
        """K, the kv heads of a layer."""

    @property
    def head_dim(self) -> int:
        """D, the elements of a head."""


class PagedKVCache:
    """The K/V pool of a model: L layers of N blocks of S token positions, uninitialised.

    Args:
        num_layers: L.
        num_blocks: N.
        num_kv_heads: K.
        block_size: S, token positions of a block.
        head_dim: D.
        layout: axes of a layer's caches, "HND" = [N, K, S, D] or "NHD" = [N, S, K, D].
        dtype: float32, float16, bfloat16 or float64.
        device: where the pool lies.
        block_major: keep a block's bytes of all layers together instead of a layer's blocks.

    Attributes:
        storage: the allocation: [L, 2, N, …] or, block-major, [N, L, 2, …].
        key_cache: per layer, key_cache [N, K, S, D] (or NHD), a view of `storage`.
        value_cache: per layer, value_cache, like `key_cache`.

    Raises:
        ConfigError: a size below 1, an unknown layout or dtype, or a pool that can't be allocated.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        layout: ops.Layout = "HND",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        block_major: bool = False,
    ) -> None:
        _check_sizes(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
        )
        if layout not in ("HND", "NHD"):
            raise ConfigError(f'`layout`: wanted "HND" or "NHD", got {layout}')
        if dtype not in FLOAT_DTYPES:
            raise ConfigError(f"`dtype`: wanted float32, float16, bfloat16 or float64, got {dtype}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        self.layout: ops.Layout = layout
        self.dtype = dtype
        self.block_major = block_major
        self.storage = self._allocate(torch.device(device))
        self.device = self.storage.device
        by_layer = self.storage.permute(1, 2, 0, 3, 4, 5) if block_major else self.storage  # [L, 2, N, …]
        self.key_cache: tuple[Tensor, ...] = tuple(layer[0] for layer in by_layer)
        self.value_cache: tuple[Tensor, ...] = tuple(layer[1] for layer in by_layer)
        # What the ops are given: HND views, made once.
        self._hnd_caches = tuple(
            (key, value) if layout == "HND" else (key.transpose(1, 2), value.transpose(1, 2))
            for key, value in zip(self.key_cache, self.value_cache, strict=True)
        )
        self._by_block = self.storage if block_major else self.storage.permute(2, 0, 1, 3, 4, 5)  # [N, L, 2, …]

    def _allocate(self, device: torch.device) -> Tensor:
        inner = (self.num_kv_heads, self.block_size) if self.layout == "HND" else (self.block_size, self.num_kv_heads)
        outer = (self.num_layers, 2, self.num_blocks)
        if self.block_major:
            outer = (self.num_blocks, self.num_layers, 2)
        try:
            return torch.empty((*outer, *inner, self.head_dim), dtype=self.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"can't allocate {self.bytes_per_block * self.num_blocks} bytes on {device}: "
                f"{self.num_blocks} blocks of {self.bytes_per_block} bytes"
            ) from error

    @classmethod
    def from_config(
        cls,
        config: CacheShape,
        *,
        block_size: int,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        layout: ops.Layout = "HND",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        block_major: bool = False,
    ) -> Self:
        """A cache for a model, with a number of blocks or as many as fit a budget in bytes: exactly one of the two.

        Raises:
            ConfigError: none or both of the two are given, or the budget holds no block.
        """
        if (num_blocks is None) == (kv_cache_memory_bytes is None):
            got = "none" if num_blocks is None else "both"
            raise ConfigError(f"wanted one of `num_blocks` and `kv_cache_memory_bytes`, got {got}")
        if kv_cache_memory_bytes is not None:
            L, K, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
            _check_sizes(num_layers=L, num_kv_heads=K, block_size=block_size, head_dim=D)
            per_block = 2 * L * K * D * dtype.itemsize * block_size
            num_blocks = kv_cache_memory_bytes // per_block
            if num_blocks < 1:
                raise ConfigError(
                    f"`kv_cache_memory_bytes`: wanted at least {per_block} bytes (one block of {block_size} tokens), "
                    f"got {kv_cache_memory_bytes}"
                )
        assert num_blocks is not None
        return cls(
            config.num_hidden_layers,
            num_blocks,
            config.num_key_value_heads,
            block_size,
            config.head_dim,
            layout=layout,
            dtype=dtype,
            device=device,
            block_major=block_major,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_per_token * self.block_size

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V rows [T, K, D] of one layer into their slots; see `kvpager.ops.write_kv`."""
        ops.write_kv(key, value, *self._hnd_caches[layer], slot_mapping)

    def norm_turn_write(
        self,
        layer: int,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_sin: Tensor,
        slot_mapping: Tensor,
        *,
        eps: float,
    ) -> Tensor:
        """Norm and turn a step's query and key heads and write its K and V; see `kvpager.ops.qk_norm_rope_write`.

        Args:
            layer: the layer, from 0.
            qkv: qkv [T, (H + 2·K)·D], the fused rows of the step's tokens.
            q_weight: q_weight [D], or None for no norm.
            k_weight: k_weight [D], or None for no norm.
            cos_sin: cos_sin [T, D], the angles of each token.
            slot_mapping: slot_mapping [T] int64.
            eps: of the norm.

        Returns:
            query [T, H, D], ready for `attend`.
        """
        rows = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
        key_cache, value_cache = self._hnd_caches[layer]
        return ops.qk_norm_rope_write(
            qkv, q_weight, k_weight, cos_sin, rows, key_cache, value_cache, slot_mapping, eps=eps
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's queries over one layer's cache; the step's K/V must have been written.

        Runs `kvpager.ops.paged_attention` when every sequence has one query, else `kvpager.ops.paged_prefill`; the
        options and errors are theirs.

        Args:
            layer: the layer, from 0.
            query: query [T, H, D] of the cache's dtype.
            metadata: the step's tables and lengths.
            scale: factor of the scores; 1 / √D if None.
            window: positions a query sees, itself included; 0 = all.
            softcap: bend of the scores; 0 = none.
            sinks: sinks [H].

        Returns:
            out [T, H, D].
        """
        key_cache, value_cache = self._hnd_caches[layer]
        tables, lengths = metadata.block_tables, metadata.seq_lens
        if metadata.max_query_len == 1 and query.shape[0] == lengths.shape[0]:
            return ops.paged_attention(
                query,
                key_cache,
                value_cache,
                tables,
                lengths,
                scale=scale,
                max_seq_len=metadata.max_seq_len,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        return ops.paged_prefill(
            query,
            key_cache,
            value_cache,
            tables,
            metadata.query_start_loc,
            lengths,
            scale=scale,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def copy_blocks(self, pairs: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copy blocks through all layers, (source, destination) each; see `kvpager.ops.copy_blocks`."""
        ops.copy_blocks([self._by_block], pairs)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"`{name}`: wanted at least 1, got {size}")
