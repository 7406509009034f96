"""The registry of models: for each architecture, the module that runs it and the reader of its ``config.json``.

To add an architecture, write one file with a `Model` and a reader, and add one line to `ARCHITECTURES`. Loader, engine,
``kvpager plan`` and ``kvpager verify`` find it here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpager.config import ModelConfig, architecture_of
from kvpager.models.decoder import DecoderForCausalLM
from kvpager.models.model import Model


@dataclass(frozen=True)
class Architecture:
    """One line of the registry.

    Attributes:
        model_type: the name that ``config.json`` has under ``model_type``.
        model: the module.
        read_config: makes the model's config of a ``config.json``; refuses any feature that `model` does not compute.
        gguf: the name of the architecture in GGUF files; None if kvpager does not read it from them.
    """

    model_type: str
    model: Callable[[ModelConfig], Model]
    read_config: Callable[[Mapping[str, Any]], ModelConfig] = ModelConfig.from_dict
    gguf: str | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3ForCausalLM": Architecture("qwen3", DecoderForCausalLM, gguf="qwen3"),
    "Qwen2ForCausalLM": Architecture("qwen2", DecoderForCausalLM, gguf="qwen2"),
    "LlamaForCausalLM": Architecture("llama", DecoderForCausalLM, gguf="llama"),
}


def find_architecture(raw: Mapping[str, Any]) -> Architecture:
    """The architecture that a ``config.json`` names.

    Raises:
        ConfigError: it names none, several, or one that is not in the registry.
    """
    return ARCHITECTURES[architecture_of(raw, {name: each.model_type for name, each in ARCHITECTURES.items()})]
