"""Another architecture is one file and one line: this file is the file, and `ARCHITECTURES` gets the line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from kvpager import LLM, AttentionMetadata, PagedKVCache
from kvpager.cli.plan import make_plan
from kvpager.config import EngineConfig, ModelConfig
from kvpager.errors import ConfigError
from kvpager.loader import open_model
from kvpager.models import ARCHITECTURES, Architecture, Model

C, H, D, V = 32, 4, 8, 50


class OneLayer(Model):
    """Learned positions, one attention layer without norms, a residual, an untied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, C)
        self.places = nn.Embedding(config.max_position_embeddings, C)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.head = nn.Linear(C, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        hidden = self.words(input_ids) + self.places(positions)
        query, key, value = self.qkv(hidden).view(-1, 3, H, D).unbind(1)
        cache.write(0, key, value, metadata.slot_mapping)
        out: Tensor = hidden + cache.attend(0, query, metadata).flatten(1)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(hidden)
        return scores.float()


def read_one_layer(raw: Mapping[str, Any]) -> ModelConfig:
    """`positions` is a key that no other architecture has."""
    return ModelConfig(
        vocab_size=V, hidden_size=C, intermediate_size=C, num_hidden_layers=1, num_attention_heads=H,
        num_key_value_heads=H, head_dim=D, max_position_embeddings=raw["positions"], rms_norm_eps=1e-6, rope_theta=1e4,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip


@torch.inference_mode()
def continued(weights: dict[str, Tensor], tokens: list[int], num_new: int) -> list[int]:
    """The same model without a cache, over the whole text each time."""
    text = list(tokens)
    for _ in range(num_new):
        hidden = weights["words.weight"][text] + weights["places.weight"][: len(text)]
        query, key, value = (hidden @ weights["qkv.weight"].T).view(-1, 3, H, D).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        last = (hidden + attended.transpose(0, 1).flatten(1))[-1]
        text.append(int((weights["head.weight"] @ last).argmax()))
    return text[len(tokens) :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in OneLayer(read_one_layer({"positions": 64})).named_parameters()}
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OneLayerForCausalLM"], "positions": 64}))
    return tmp_path


def test_a_new_architecture_is_one_file_and_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`architectures` is OneLayerForCausalLM; supported: Qwen3ForCausalLM, "):
        LLM(folder)
    monkeypatch.setitem(ARCHITECTURES, "OneLayerForCausalLM", Architecture("one_layer", OneLayer, read_one_layer))
    llm = LLM(folder, block_size=4, num_blocks=32, max_num_batched_tokens=9, max_num_seqs=4)
    prompts = [[5, 6, 7], [8] * 13, [9, 1]]
    weights = dict(llm.runner.model.named_parameters())
    for prompt, output in zip(prompts, llm.generate(prompts, max_tokens=12), strict=True):
        assert list(output.outputs[0].token_ids) == continued(weights, prompt, 12)
    plan = make_plan(open_model(folder), EngineConfig(num_blocks=32, block_size=4))
    assert plan.num_parameters == sum(each.numel() for each in weights.values())
    assert plan.max_model_len == 64
    (folder / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    with pytest.raises(ConfigError, match=r"supported: .*, OneLayerForCausalLM"):
        open_model(folder)
