"""Models that run over a `PagedKVCache`: plain modules whose parameters carry the checkpoint's names."""

from kvpager.models.qwen3 import Qwen3ForCausalLM

__all__ = ["Qwen3ForCausalLM"]
