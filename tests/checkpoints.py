"""Checkpoints with random weights, and what transformers' eager attention makes of them: made once per session.

The reference decodes greedily and without a cache, one sequence at a time, and records at every step the logits and
each layer's attention output (what goes into `o_proj`) of the last query.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvpager.cache import PagedKVCache
from kvpager.config import CacheConfig, ModelConfig
from kvpager.loader import BUNDLED_MODEL, load_parameters
from kvpager.manager import KVBlockManager
from kvpager.models import DecoderForCausalLM
from kvpager.runner import ModelRunner
from kvpager.verify import forward_eager

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

NUM_STEPS = 64
PROMPT_LENGTHS = (1, 5, 16, 33, 18)
VOCAB_SIZE = 199

# name: family, H, K, head_dim, hidden_size, tied head, spelling of config.json.
# Qwen2 has no head_dim of its own; elsewhere it is never hidden_size / H.
SHAPES: dict[str, tuple[str, int, int, int, int, bool, str]] = {
    "16-8": ("Qwen3", 16, 8, 32, 64, False, "old"),
    "8-2": ("Qwen3", 8, 2, 16, 96, True, "new"),
    "14-2": ("Qwen3", 14, 2, 8, 56, False, "new"),
    "5-1": ("Qwen3", 5, 1, 24, 40, True, "old"),
    "qwen2": ("Qwen2", 6, 2, 16, 96, True, "old"),
    "llama": ("Llama", 4, 2, 24, 56, False, "new"),
}
# Stretched over a context of 32 positions: of the 12 frequencies some are kept, some blended, some divided.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS = ("tiny", *SHAPES)


@dataclass(frozen=True)
class Trace:
    """One sequence, step by step: tokens [steps], logits [steps, V], attention outputs [steps, L, H · D]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Tensor
    attention: Tensor


@dataclass(frozen=True, eq=False)
class Lab:
    """Checkpoints, and our side of a comparison: the fixture `lab`, as test files import nothing from each other."""

    tmp_path_factory: pytest.TempPathFactory

    @functools.cache  # noqa: B019 (one per session)
    def folder(self, name: str) -> Path:
        """A checkpoint by name, in the spelling of its table row."""
        if name == "tiny":
            return BUNDLED_MODEL
        *_, spelling = SHAPES[name]
        folder = self.tmp_path_factory.mktemp(name) / "model"
        save_random_model(name, folder)
        if spelling == "old":
            respell(folder)
        return folder

    def respelled(self, name: str, tmp_path: Path) -> Path:
        """A copy of a checkpoint saved in the new spelling, with the old one."""
        save_random_model(name, tmp_path / "old")
        respell(tmp_path / "old")
        return tmp_path / "old"

    def prompts(self, name: str) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(len(name))
        vocab_size = ModelConfig.from_folder(self.folder(name)).vocab_size
        return [
            tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist()) for length in PROMPT_LENGTHS
        ]

    @functools.cache  # noqa: B019
    def reference(self, name: str) -> tuple[Trace, ...]:
        """transformers, float32, greedy."""
        model = self.transformers_model(name, torch.float32)
        return tuple(trace_transformers(model, prompt, decode_greedily(model, prompt)) for prompt in self.prompts(name))

    def transformers_model(self, name: str, dtype: torch.dtype) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder(name), attn_implementation="eager", dtype=dtype
        ).eval()

    def runner(
        self,
        name: str | Path,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> ModelRunner:
        """Model, cache full of NaN, manager whose free list is shuffled, so that no table is ascending by luck."""
        folder = self.folder(name) if isinstance(name, str) else name
        config = ModelConfig.from_folder(folder)
        with torch.device("meta"):
            model = DecoderForCausalLM(config)
        load_parameters(model, folder, dtype=dtype, device=torch.device("cpu"), ignored=("lm_head.weight",))
        if num_blocks is None:
            num_blocks = len(PROMPT_LENGTHS) * -(-(max(PROMPT_LENGTHS) + NUM_STEPS) // block_size)
        cache = PagedKVCache.from_config(config, CacheConfig(block_size=block_size, num_blocks=num_blocks), dtype=dtype)
        cache.storage.fill_(float("nan"))
        manager = KVBlockManager(num_blocks, block_size)
        blocks = [manager.allocate_block() for _ in range(num_blocks)]
        for place in torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_size)).tolist():
            manager.free_block(blocks[place])
        return ModelRunner(model.eval(), cache, manager)

    def force(
        self, runner: ModelRunner, prompts: Sequence[Sequence[int]], forced: Sequence[Sequence[int]]
    ) -> list[Trace]:
        """Our side: all sequences together, a prefill, then the forced tokens one by one."""
        ids = list(range(len(prompts)))
        for sequence_id in ids:
            runner.block_manager.create_sequence(sequence_id)
        logits, attention = [], []
        seen, remove = record_attention(runner.model)
        for step in range(len(forced[0])):
            tokens = prompts if step == 0 else [each[step - 1 : step] for each in forced]
            logits.append(forward_eager(runner, ids, tokens))
            last = torch.tensor([len(each) for each in tokens]).cumsum(0) - 1
            attention.append(torch.stack(seen)[:, last])  # [L, B, H · D]
            seen.clear()
        remove()
        assert runner.block_manager.check_invariants() == []
        by_step, by_layer = torch.stack(logits), torch.stack(attention)  # [steps, B, V], [steps, L, B, H · D]
        return [Trace(tuple(prompts[row]), tuple(forced[row]), by_step[:, row], by_layer[:, :, row]) for row in ids]


def save_random_model(name: str, folder: Path) -> None:
    """Weights wide enough that logits are far from flat, and norms that are not all one."""
    family, H, K, head_dim, hidden_size, tied, _ = SHAPES[name]
    torch.manual_seed(H)
    rope = LLAMA3 if family == "Llama" else {"rope_type": "default"}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size + 8,
        num_hidden_layers=2,
        num_attention_heads=H,
        num_key_value_heads=K,
        **({} if family == "Qwen2" else {"head_dim": head_dim}),
        max_position_embeddings=256,
        rope_parameters={**rope, "rope_theta": 1e6},
        tie_word_embeddings=tied,
        initializer_range=2 * hidden_size**-0.5,
        dtype="float32",
        eos_token_id=[1, 2],
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def respell(folder: Path) -> None:
    """config.json as published folders have it: top-level `rope_theta`, `rope_scaling`, `torch_dtype`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def record_attention(model: torch.nn.Module) -> tuple[list[Tensor], Callable[[], None]]:
    """A list that gets every layer's attention output, and how to stop that. Both sides name the module alike."""
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        for layer in model.model.layers  # type: ignore[union-attr]
    ]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return seen, remove


@torch.inference_mode()
def decode_greedily(model: Any, prompt: Sequence[int]) -> list[int]:
    """transformers' choices, each from a look at the whole text: no cache is involved."""
    tokens = list(prompt)
    for _ in range(NUM_STEPS):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def trace_transformers(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Trace:
    """What transformers computes at every step along these tokens."""
    seen, remove = record_attention(model)
    first = len(prompt) - 1  # the position that gives the first token
    out = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False)
    remove()
    attention = torch.stack([each[0, first:] for each in seen], dim=1)  # [steps, L, H · D]
    return Trace(tuple(prompt), tuple(tokens), out.logits[0, first:].float(), attention)
