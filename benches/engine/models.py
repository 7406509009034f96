"""Random Qwen3 models and random prompts: the same weights and token ids for every engine, from seeds."""

from pathlib import Path
from typing import Any

import torch
import transformers

Prompts = list[list[int]]

SHAPES: dict[str, dict[str, int]] = {
    "small": {  # 42 million parameters
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "0.6B": {  # 596 million: the shapes of Qwen3-0.6B
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def make_weights(folder: Path, model: str, dtype: str) -> Path:
    """A checkpoint in a subfolder of `folder`; one that is there from an earlier run is kept."""
    checkpoint = folder / f"{model}-{dtype}"
    if (checkpoint / "config.json").exists():
        return checkpoint
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPES[model], tie_word_embeddings=True, max_position_embeddings=4096)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    made.save_pretrained(checkpoint)
    return checkpoint


def load_transformers(checkpoint: Path, dtype: str) -> Any:
    """transformers' model, attending with sdpa, that stops at no token."""
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def make_prompts(batch: int, vocab_size: int) -> Prompts:
    """Lengths from 16 to 192, spread evenly; 96 for one."""
    generator = torch.Generator().manual_seed(0)
    lengths = [96] if batch == 1 else [16 + 176 * n // (batch - 1) for n in range(batch)]
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def make_shared_prompts(num_prompts: int, num_shared: int, num_own: int, vocab_size: int) -> Prompts:
    """Prompts that begin with the same `num_shared` tokens."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, vocab_size, (num_shared,), generator=generator).tolist()
    own = torch.randint(3, vocab_size, (num_prompts, num_own), generator=generator).tolist()
    return [shared + each for each in own]
