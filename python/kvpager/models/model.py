"""`Model`: the interface that runner, engine build and plan need of a model.

A model is a module that computes one step over a paged cache and knows nothing of sequences, requests or scheduling.
To add one, write such a module and a reader of its ``config.json``, and enter both in `kvpager.models.registry`.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.config import ModelConfig


class Model(nn.Module, ABC):
    """A causal language model over a `PagedKVCache`.

    It is made on the meta device and filled by `kvpager.loader`: its parameters carry the names of the checkpoint's
    tensors, and it makes no other tensors before its first step.

    Args:
        config: shape and constants; a subclass of `ModelConfig` where a model needs more of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """Compute one step and write its keys and values into the cache.

        Args:
            input_ids: input_ids [T] int64, the tokens of all sequences of the step, sequence after sequence.
            positions: positions [T] int64, of each token in its sequence.
            cache: the pool that the metadata's slots and tables point into.
            metadata: the step's slots, tables and lengths.

        Returns:
            Hidden states [T, C] in the model's dtype; `logits` takes the rows that are wanted.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token: `hidden` [rows, C] → [rows, V] float32 (float64 where the model is)."""
