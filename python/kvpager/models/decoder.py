"""The dense decoder over a paged key/value cache: one block that runs Qwen3, Qwen2 (2.5) and Llama.

The three differ in three switches of `ModelConfig`: `qkv_bias` (Qwen2), `qk_norm` (Qwen3) and `tie_word_embeddings`.

The tokens of all sequences of a step lie one after the other: T tokens, no batch dimension, no padding. Which of them
belong together, and where their keys and values go, stands in the `AttentionMetadata` that travels with them.
Submodules carry the names of the checkpoint's tensors (and so of transformers' modules).

Letters: T tokens, H query heads, K kv heads, D head dim, C hidden size, I intermediate size, V vocabulary, L layers.
Architecture: Llama, arXiv:2302.13971; Qwen2.5, arXiv:2412.15115; Qwen3, arXiv:2505.09388; RMSNorm, arXiv:1910.07467.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.config import ModelConfig
from kvpager.models.rotary import inverse_frequencies, rotary_cos_sin


class RMSNorm(nn.Module):
    """``x / √(mean(x²) + eps) · weight`` over the last dimension, computed in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [..., width]."""
        wide = _widened(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, by the switches with a bias on q, k, v and RMSNorm on every query and key head.

    Keys and values live in the cache.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.layer = layer
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor, cos_sin: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """X [T, C] → [T, C]; writes this step's keys and values, then attends to all that the tables name."""
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)  # [T, (H + 2 K) · D]
        q_weight = self.q_norm.weight if self.q_norm else None
        k_weight = self.k_norm.weight if self.k_norm else None
        slots = metadata.slot_mapping
        q = cache.norm_turn_write(self.layer, qkv, q_weight, k_weight, cos_sin, slots, eps=self.eps)  # [T, H, D]
        attended = cache.attend(self.layer, q, metadata)  # [T, H, D]
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) · up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_proj = nn.Linear(C, I, bias=False)
        self.up_proj = nn.Linear(C, I, bias=False)
        self.down_proj = nn.Linear(I, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [T, C] → [T, C]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """X [T, C] → [T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, cache, metadata)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x  # noqa: RET504


class DecoderModel(nn.Module):
    """Embedding, L decoder layers, the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """input_ids [T], positions [T] → hidden states [T, C]."""
        x = self.embed_tokens(input_ids)
        wide = torch.promote_types(x.dtype, torch.float32)
        cos_sin = rotary_cos_sin(positions, inverse_frequencies(self.config, positions.device), wide)
        for layer in self.layers:
            x = layer(x, cos_sin, cache, metadata)
        out: Tensor = self.norm(x)
        return out


class DecoderForCausalLM(nn.Module):
    """The decoder with its head. Made on the meta device and filled by `kvpager.loader`.

    With tied embeddings there is no ``lm_head`` parameter at all: the embedding is the head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """Runs one step and writes its keys and values into the cache.

        Args:
            input_ids: [T] int64, the tokens of all sequences of the step, sequence after sequence.
            positions: [T] int64, of each token in its sequence.
            cache: the pool that the metadata's slots and tables point into.
            metadata: what is written where, and who attends to what.

        Returns:
            Hidden states [T, C] in the model's dtype; `logits` takes the rows that are wanted.
        """
        out: Tensor = self.model(input_ids, positions, cache, metadata)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token: hidden [rows, C] → [rows, V] float32 (float64 where the model is)."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return _widened(F.linear(hidden, head.weight))


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
