"""`PagedKVCache`: the K/V of all layers of a model in one allocation.

The cache knows no sequence and hands out no block; it holds bytes, writes rows into slots and attends through tables.
Two arrangements of the one allocation: layer-major [L, 2, N, block] (a layer's blocks lie together) and block-major
[N, L, 2, block] (one copy moves a block through all layers). `key_cache[l]` and `value_cache[l]` are views of it.
A quantised block holds its codes and, behind them, their scales, so that whatever moves the block moves them too.

Longer than 300 lines because the one class documents each tensor that it hands out.
"""

from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from kvpager import ops
from kvpager.cache.metadata import AttentionMetadata, refuse_step
from kvpager.cache_dtypes import SCALE_BYTES, cache_dtype
from kvpager.config import CacheConfig, CacheShape, bytes_per_block
from kvpager.errors import ArgumentError, ConfigError
from kvpager.huge_pages import advise_huge_pages
from kvpager.kinds import is_whole
from kvpager.ops.attention import backends
from kvpager.ops.attention.options import ScaleKeywords, ScoreKeywords
from kvpager.ops.tensors import QUANTISED_DTYPES, as_hnd, require_tensors, scales_as_hnd


class PagedKVCache:
    """The K/V pool of a model: L layers of N blocks of S token positions, uninitialised.

    Args:
        num_layers: L.
        num_blocks: N.
        num_kv_heads: K.
        block_size: S, token positions of a block.
        head_dim: D.
        layout: axes of a layer's caches, "HND" = [N, K, S, D] or "NHD" = [N, S, K, D].
        dtype: of `kvpager.cache_dtypes`, by name or as a torch dtype. In one of codes, K and V of 32 or 16 bits are
            written, and read again, as codes with a scale for each token and kv head.
        device: where the pool lies. On the CPU of Linux it asks for huge pages, which kernels read faster.
        block_major: keep a block's bytes of all layers together instead of a layer's blocks.
        attention_backend: who computes `attend`: "auto" or another name of `kvpager.ops.attention.backends`.

    Attributes:
        storage: the allocation: [L, 2, N, …] or, block-major, [N, L, 2, …]; of a quantised cache uint8
            [L, 2, N, bytes] or [N, L, 2, bytes], where a block's codes are followed by their scales.
        key_cache: per layer, key_cache [N, K, S, D] (or NHD), a view of `storage`.
        value_cache: per layer, value_cache, like `key_cache`.
        key_scale: per layer, key_scale [N, K, S] (or [N, S, K]) float32, a view of `storage`; empty if not quantised.
        value_scale: per layer, value_scale, like `key_scale`.
        dtype: the torch dtype of the caches.

    Raises:
        ConfigError: a size below 1, an unknown layout or dtype, a backend that can't be used, or a pool that can't be
            allocated.
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
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        block_major: bool = False,
        attention_backend: str = "auto",
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
        backends.check_backend(attention_backend)
        self.attention_backend = attention_backend
        self._planner = backends.Planner(attention_backend)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        self.layout: ops.Layout = layout
        self.dtype = _checked_dtype(dtype)
        self.block_major = block_major
        inner = (num_kv_heads, block_size) if layout == "HND" else (block_size, num_kv_heads)
        self.storage = self._allocate((*inner, head_dim), _checked_device(device))
        self.device = self.storage.device
        # [L, 2, N, …] views, whatever the arrangement.
        by_layer = self.storage.movedim(0, 2) if block_major else self.storage
        scales = None
        if self.quantised:
            num_codes = num_kv_heads * block_size * head_dim
            scales = by_layer[..., -num_kv_heads * block_size * SCALE_BYTES :].view(torch.float32)
            scales = torch.unflatten(scales, 3, inner)
            by_layer = torch.unflatten(by_layer[..., :num_codes].view(self.dtype), 3, (*inner, head_dim))
        self.key_cache: tuple[Tensor, ...] = tuple(layer[0] for layer in by_layer)
        self.value_cache: tuple[Tensor, ...] = tuple(layer[1] for layer in by_layer)
        self.key_scale: tuple[Tensor, ...] = () if scales is None else tuple(layer[0] for layer in scales)
        self.value_scale: tuple[Tensor, ...] = () if scales is None else tuple(layer[1] for layer in scales)
        # What the ops are given: HND views, made once.
        self._hnd_caches = tuple(
            as_hnd(key, value, layout) for key, value in zip(self.key_cache, self.value_cache, strict=True)
        )
        self._hnd_scales: tuple[ScaleKeywords, ...] = (ScaleKeywords(),) * num_layers
        if scales is not None:
            hnd = (scales_as_hnd(*pair, layout) for pair in zip(self.key_scale, self.value_scale, strict=True))
            self._hnd_scales = tuple(ScaleKeywords(key_scale=key, value_scale=value) for key, value in hnd)
        self._by_block = self.storage if block_major else self.storage.movedim(2, 0)  # [N, L, 2, …]

    @property
    def quantised(self) -> bool:
        """Whether the caches hold codes with scales."""
        return self.dtype in QUANTISED_DTYPES

    def _allocate(self, inner: tuple[int, ...], device: torch.device) -> Tensor:
        """The pool, uninitialised; `inner` are the axes of a block of numbers."""
        outer = (self.num_layers, 2, self.num_blocks)
        if self.block_major:
            outer = (self.num_blocks, self.num_layers, 2)
        if self.quantised:
            inner = (self.bytes_per_block // (2 * self.num_layers),)
        try:
            storage = torch.empty((*outer, *inner), dtype=torch.uint8 if self.quantised else self.dtype, device=device)
            if device.type == "cpu":
                advise_huge_pages(storage)
            return storage
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"can't allocate {self.bytes_per_block * self.num_blocks} bytes on {device}: "
                f"{self.num_blocks} blocks of {self.bytes_per_block} bytes"
            ) from error

    @classmethod
    def from_config(
        cls,
        model: CacheShape,
        config: CacheConfig,
        *,
        dtype: str | torch.dtype = torch.float32,
        layout: ops.Layout = "HND",
        device: str | torch.device = "cpu",
        block_major: bool = False,
    ) -> Self:
        """A cache for a model.

        Args:
            model: its configuration.
            config: blocks, block size, dtype and attention backend.
            dtype: the dtype that the model computes in, and that of the cache where `config.kv_cache_dtype` is "auto".
            layout, device, block_major: as in the constructor.

        Raises:
            ConfigError: `config` gives neither blocks nor a budget, or a budget that holds no block.
        """
        return cls(
            model.num_hidden_layers,
            config.blocks_in_pool(model, dtype),
            model.num_key_value_heads,
            config.block_size,
            model.head_dim,
            layout=layout,
            dtype=config.dtype_for(dtype).name,
            device=device,
            block_major=block_major,
            attention_backend=config.attention_backend,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, scales included."""
        dtype = cache_dtype(self.dtype)
        return bytes_per_block(self.num_layers, self.num_kv_heads, self.block_size, self.head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, scales included, rounded up."""
        return -(-self.bytes_per_block // self.block_size)

    def _layer(self, layer: int) -> tuple[tuple[Tensor, Tensor], ScaleKeywords]:
        """Caches of a layer, and keywords for its scales, as the ops are given them."""
        try:
            if layer >= 0:
                return self._hnd_caches[layer], self._hnd_scales[layer]
        except (IndexError, TypeError):
            pass
        raise ArgumentError("layer", f"0 … {self.num_layers - 1}", repr(layer))

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V rows [T, K, D] of one layer into their slots; see `kvpager.ops.write_kv`."""
        caches, scales = self._layer(layer)
        ops.write_kv(key, value, *caches, slot_mapping, **scales)

    def qk_norm_rope_write(
        self,
        layer: int,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_sin: Tensor,
        positions: Tensor,
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
            cos_sin: cos_sin [P, D], the angles of each position.
            positions: positions [T] int64, each token's row of `cos_sin`.
            slot_mapping: slot_mapping [T] int64.
            eps: of the norm.

        Returns:
            query [T, H, D], ready for `attend`.
        """
        (key_cache, value_cache), scales = self._layer(layer)
        return ops.qk_norm_rope_write(
            qkv, q_weight, k_weight, cos_sin, positions, key_cache, value_cache, slot_mapping, eps=eps, **scales
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[ScoreKeywords],
    ) -> Tensor:
        """Attention of a step's queries over one layer's cache; the step's K/V must have been written.

        Runs `kvpager.ops.paged_attention` when every sequence has one query, else `kvpager.ops.paged_prefill`; the
        options and errors are theirs.

        Args:
            layer: the layer, from 0.
            query: query [T, H, D] of the cache's dtype; float32, float16 or bfloat16 for a quantised cache.
            metadata: the step's tables and lengths.
            options: of attention; see `kvpager.ops.attention.options.AttentionOptions`.

        Returns:
            out [T, H, D].
        """
        (key_cache, value_cache), scales = self._layer(layer)
        try:
            tables, lengths = metadata.block_tables, metadata.seq_lens
            is_decode = metadata.max_query_len == 1 and query.shape[0] == lengths.shape[0]
        except (AttributeError, IndexError, TypeError):
            refuse_step(query, metadata)
        if self.attention_backend not in ("auto", "native"):
            return self._attend_planned(layer, query, metadata, is_decode, options)
        if is_decode:
            return ops.paged_attention(
                query, key_cache, value_cache, tables, lengths, max_seq_len=metadata.max_seq_len,
                fixed_split=metadata.fixed_split, split_plan=metadata.split_plan, workspace=metadata.workspace,
                **scales, **options,
            )  # fmt: skip
        return ops.paged_prefill(
            query, key_cache, value_cache, tables, metadata.query_start_loc, lengths,
            max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len, **scales, **options,
        )  # fmt: skip

    def _attend_planned(
        self, layer: int, query: Tensor, metadata: AttentionMetadata, is_decode: bool, options: ScoreKeywords
    ) -> Tensor:
        """By a backend that plans a step once for all its layers."""
        (key_cache, value_cache), scales = self._layer(layer)
        lengths = {"seq_lens": metadata.seq_lens}
        if not is_decode:
            lengths = {"query_start_loc": metadata.query_start_loc, **lengths}
        require_tensors(query=query, block_tables=metadata.block_tables, **lengths)
        tables = (metadata.block_tables, *lengths.values())
        keywords: dict[str, Any] = {
            **options, **scales, "max_query_len": metadata.max_query_len, "max_seq_len": metadata.max_seq_len,
            "fixed_split": metadata.fixed_split,
        }  # fmt: skip
        run = self._planner.plan(metadata, query, (key_cache, value_cache), tables, keywords)
        out = query.new_empty(query.shape)
        run(query, key_cache, value_cache, out, None)
        return out

    def copy_blocks(self, pairs: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copy blocks through all layers, (source, destination) each; see `kvpager.ops.copy_blocks`."""
        ops.copy_blocks([self._by_block], pairs)

    def swap_blocks(self, target: "PagedKVCache", pairs: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copy blocks through all layers into another cache, (own block, block of `target`) each.

        Args:
            target: a cache of the same layers, heads, block size, head dim, layout and dtype; another arrangement or
                number of blocks is fine.
            pairs: as in `kvpager.ops.swap_blocks`; errors are its.
        """
        if not isinstance(target, PagedKVCache):
            raise ArgumentError("target", "a `PagedKVCache`", type(target).__name__)
        ops.swap_blocks([self._by_block], [target._by_block], pairs)


def _checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, cache_dtype(dtype).torch_name)
    return found


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not is_whole(size) or size >= 2**63:
            raise ConfigError(f"`{name}`: wanted a whole number of at most 63 bits, got {size!r}")
        if size < 1:
            raise ConfigError(f"`{name}`: wanted at least 1, got {size}")


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f'`device`: wanted "cpu", "cuda", "cuda:1", …, got {device!r}') from None
