"""`CacheConfig`: the settings of a paged cache, and the one formula of the bytes that it takes.

Cache, block manager, engine and ``kvpager plan`` read the same record. `EngineConfig` extends it, so whatever takes a
`CacheConfig` takes an `EngineConfig` too. Nothing here imports torch.
"""

from dataclasses import dataclass, field, fields
from typing import Protocol, TypeVar

from kvpager import _core
from kvpager.cache_dtypes import CACHE_DTYPES, SCALE_BYTES, CacheDtype, cache_dtype, one_of
from kvpager.errors import ConfigError
from kvpager.kinds import is_whole

_Default = TypeVar("_Default")


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


def at_least(least: int, default: _Default) -> _Default:
    """A field of a settings class: a whole number with a lower bound, checked by `CacheConfig`."""
    made: _Default = field(default=default, metadata={"least": least})
    return made


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The settings of a paged cache.

    Attributes:
        block_size: S, token positions per block.
        num_blocks: N, blocks in the pool; None: from the budget.
        kv_cache_memory_bytes: the budget: as many blocks as fit into it.
        kv_cache_dtype: dtype of the stored keys and values: "auto" for the dtype that the model computes in, or a dtype
            of codes (`kvpager.cache_dtypes`), which halves or quarters the cache.
        enable_prefix_caching: find blocks that other requests computed for the same beginning.
        eviction_policy: which cached blocks go first when the pool is full; the names are those of `KVBlockManager`.
        watermark_blocks: blocks that an admission leaves free while others run, so that they can grow; None: 1 % of
            the pool.
        attention_backend: the kernels of attention: "auto" (kvpager's own wherever it has them), "native",
            "flashinfer", "flash_attn" or "reference".

    Raises:
        ConfigError: a value has the wrong kind or is out of range, or two values contradict each other.
    """

    block_size: int = at_least(1, 16)
    num_blocks: int | None = at_least(1, None)
    kv_cache_memory_bytes: int | None = at_least(1, None)
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    watermark_blocks: int | None = at_least(0, None)
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        self._check_fields()
        if self.kv_cache_dtype != "auto":
            cache_dtype(self.kv_cache_dtype, "kv_cache_dtype")
        _core.KVBlockManager(1, 1, eviction_policy=self.eviction_policy)  # the manager knows its policies
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"`num_blocks` {self.num_blocks} and `kv_cache_memory_bytes` {self.kv_cache_memory_bytes} "
                "both set the size of the pool; give one"
            )

    def _check_fields(self) -> None:
        """Each value is of the kind of its default (a text, True or False, or a whole number) and not too small."""
        for each in fields(self):
            name, value, default = each.name, getattr(self, each.name), each.default
            if isinstance(default, str):
                fits, wanted = isinstance(value, str), "a text"
            elif isinstance(default, bool):
                fits, wanted = isinstance(value, bool), "True or False"
            elif value is None:
                fits, wanted = default is None, "a whole number"
            else:
                fits = is_whole(value) and (name == "seed" or -(2**63) <= value < 2**63)  # a seed has its own range
                wanted = "a whole number of at most 63 bits"
            if not fits:
                raise ConfigError(f"`{name}` is {value!r}; it must be {wanted}")
            least = each.metadata.get("least")
            if least is not None and value is not None and value < least:
                raise ConfigError(f"`{name}` is {value}; it must be at least {least}")

    def dtype_for(self, computed: object) -> CacheDtype:
        """The dtype of the cache beside a model that computes in `computed` (a name or a dtype of torch).

        Raises:
            ConfigError: attention can't read such a cache with queries of that dtype.
        """
        own = cache_dtype(computed)
        wanted = own if self.kv_cache_dtype == "auto" else cache_dtype(self.kv_cache_dtype)
        if wanted is own or (wanted.is_codes and own.name != "float64"):
            return wanted
        codes = [] if own.name == "float64" else [each.name for each in CACHE_DTYPES if each.is_codes]
        raise ConfigError(
            f"`kv_cache_dtype` is {self.kv_cache_dtype}; beside a model that computes in {own.name} it must be "
            f"{one_of(['auto', own.name, *codes])}"
        )

    def bytes_per_block(self, model: CacheShape, computed: object) -> int:
        """Bytes of one block of a model's cache in all layers, scales included; `computed` as in `dtype_for`."""
        L, K, D = model.num_hidden_layers, model.num_key_value_heads, model.head_dim
        return bytes_per_block(L, K, self.block_size, D, self.dtype_for(computed))

    def blocks_in_pool(self, model: CacheShape, computed: object) -> int:
        """Blocks of the pool: `num_blocks`, or as many as fit the budget; `computed` as in `dtype_for`.

        Raises:
            ConfigError: neither is given, or the budget holds no block.
        """
        if self.kv_cache_memory_bytes is not None:
            needed = self.bytes_per_block(model, computed)
            if self.kv_cache_memory_bytes < needed:
                raise ConfigError(
                    f"`kv_cache_memory_bytes`: wanted at least {needed} bytes (one block of {self.block_size} tokens), "
                    f"got {self.kv_cache_memory_bytes}"
                )
            return self.kv_cache_memory_bytes // needed
        if self.num_blocks is None:
            raise ConfigError("wanted one of `num_blocks` and `kv_cache_memory_bytes`, got none")
        return self.num_blocks


def bytes_per_block(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: CacheDtype) -> int:
    """Bytes of one block in all layers: K and V of S tokens, and behind the codes of a quantised block its scales.

    Scales are float32, so they begin at a multiple of 4 bytes.
    """
    rows = num_kv_heads * block_size
    elements = rows * head_dim * dtype.element_bytes
    if dtype.is_codes:
        elements = -(-elements // SCALE_BYTES) * SCALE_BYTES
    return 2 * num_layers * (elements + rows * dtype.scale_bytes)
