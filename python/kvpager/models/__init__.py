"""Models that run over a `PagedKVCache`: plain modules whose parameters carry the checkpoint's names."""

from kvpager.models.decoder import DecoderForCausalLM

__all__ = ["DecoderForCausalLM"]
