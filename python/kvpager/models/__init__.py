"""Models that run over a `PagedKVCache`: plain modules whose parameters carry the checkpoint's names."""

from kvpager.models.decoder import DecoderForCausalLM
from kvpager.models.model import Model
from kvpager.models.registry import ARCHITECTURES, Architecture, find_architecture

__all__ = ["ARCHITECTURES", "Architecture", "DecoderForCausalLM", "Model", "find_architecture"]
