"""The K/V of a model: the pool of all layers, and the metadata of a step that attends to it."""

from kvpager.cache.metadata import AttentionMetadata
from kvpager.cache.pool import PagedKVCache

__all__ = ["AttentionMetadata", "PagedKVCache"]
