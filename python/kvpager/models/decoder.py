"""The dense decoder over a paged key/value cache: one block that runs Qwen3, Qwen2 (2.5) and Llama.

The three differ in three switches of `ModelConfig`: `qkv_bias` (Qwen2), `qk_norm` (Qwen3) and `tie_word_embeddings`.

The tokens of all sequences of a step lie one after the other: T tokens, no batch dimension, no padding. Which of them
belong together, and where their keys and values go, stands in the `AttentionMetadata` that travels with them.
Submodules carry the names of the checkpoint's tensors (and so of transformers' modules).

Letters: T tokens, H query heads, K kv heads, D head dim, C hidden size, I intermediate size, V vocabulary, L layers.
Architecture: Llama, arXiv:2302.13971; Qwen2.5, arXiv:2412.15115; Qwen3, arXiv:2505.09388; RMSNorm, arXiv:1910.07467.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from kvpager import ops
from kvpager.cache import AttentionMetadata, PagedKVCache
from kvpager.config import ModelConfig
from kvpager.models.model import Model
from kvpager.models.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of a step that are the same for all layers.

    Attributes:
        cache: the pool that the metadata's slots and tables point into.
        metadata: the step's slots, tables and lengths.
        cos_sin: cos_sin [P, D], the cosines and sines of the angles of each position.
        positions: positions [T] int64.
    """

    cache: PagedKVCache
    metadata: AttentionMetadata
    cos_sin: Tensor
    positions: Tensor


class Linear(nn.Linear):
    """A linear layer on `kvpager.ops.linear`, which may write its result into a given place."""

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Project `x` [T, in] → [T, out], written into `out` if it is given."""
        return ops.linear(x, self.weight, self.bias, out=out)


class RMSNorm(nn.Module):
    """``x / √(mean(x²) + eps) · weight`` over the last dimension, computed in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Norms x [T, width], or adds it to the residual [T, width] and norms that."""
        return ops.rms_norm(x, self.weight, eps=self.eps, residual=residual)


class Attention(nn.Module):
    """Grouped-query attention, by the switches with a bias on q, k, v and RMSNorm on every query and key head.

    Keys and values live in the cache.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.layer = layer
        self.q_proj = Linear(C, config.num_attention_heads * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.v_proj = Linear(C, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_attention_heads * D, C, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write this step's keys and values, then attend over the sequences' tables: `x` [T, C] → [T, C]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        widths = [projection.out_features for projection in projections]
        qkv = x.new_empty((x.shape[0], sum(widths)))  # [T, (H + 2 K) · D]
        for projection, part in zip(projections, torch.split(qkv, widths, dim=1), strict=True):
            projection(x, out=part)
        q_weight = self.q_norm.weight if self.q_norm else None
        k_weight = self.k_norm.weight if self.k_norm else None
        q = inputs.cache.qk_norm_rope_write(
            self.layer,
            qkv,
            q_weight,
            k_weight,
            inputs.cos_sin,
            inputs.positions,
            inputs.metadata.slot_mapping,
            eps=self.eps,
        )  # [T, H, D]
        attended = inputs.cache.attend(self.layer, q, inputs.metadata)  # [T, H, D]
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) · up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_proj = Linear(C, I, bias=False)
        self.up_proj = Linear(C, I, bias=False)
        self.down_proj = Linear(I, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to `x` [T, C] → [T, C]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj(ops.silu_mul(gate, up, out=gate))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to the residual stream after.

    Residual additions are fused into the norm that follows them, so a layer returns its MLP's result unadded.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, normed: Tensor, residual: Tensor, inputs: LayerInputs) -> Tensor:
        """Compute the MLP's result [T, C] from `normed` [T, C]; attention's result is added to `residual` [T, C]."""
        attended = self.self_attn(normed, inputs)
        out: Tensor = self.mlp(self.post_attention_layernorm(attended, residual))
        return out


class DecoderModel(nn.Module):
    """Embedding, L decoder layers, the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """input_ids [T], positions [T] → hidden states [T, C]."""
        residual = self.embed_tokens(input_ids)
        inputs = LayerInputs(cache, metadata, self.rotary.rows(metadata.max_seq_len, residual), positions)
        layers = cast("list[DecoderLayer]", list(self.layers))
        norms = [layer.input_layernorm for layer in layers[1:]] + [self.norm]  # each adds the layer before it
        normed: Tensor = layers[0].input_layernorm(residual)
        for layer, norm in zip(layers, norms, strict=True):
            normed = norm(layer(normed, residual, inputs), residual)
        return normed


class DecoderForCausalLM(Model):
    """The decoder with its head.

    With tied embeddings there is no ``lm_head`` parameter: the embedding is the head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = DecoderModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        """See `Model.forward`."""
        out: Tensor = self.model(input_ids, positions, cache, metadata)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        scores = ops.linear(hidden, head.weight)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))
