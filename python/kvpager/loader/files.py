"""`ModelFiles`: a model on disk, whatever its format: its config, its weights, what its tokenizer is made from."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvpager.config import ModelConfig, read_folder_config
from kvpager.loader.find import resolve_model
from kvpager.loader.gguf import config_from_gguf, load_gguf_parameters
from kvpager.loader.gguf_file import GGUFFile
from kvpager.loader.safetensors import load_parameters, stored_head_differs
from kvpager.models import Architecture, Model, find_architecture


class ModelFiles(ABC):
    """A model on disk. Opening reads its config; the weights are read by `load`.

    Attributes:
        path: its folder or file.
        architecture: its entry in the registry of models.
        config: its shape and constants.
        gguf_fields: the fields to make a tokenizer from; None where it is made from the folder at `path`.
    """

    path: Path
    architecture: Architecture
    config: ModelConfig
    gguf_fields: Mapping[str, Any] | None = None

    def make_model(self) -> Model:
        """The model on the meta device: shapes without memory, to be filled by `load`."""
        with torch.device("meta"):
            return self.architecture.model(self.config)

    @abstractmethod
    def load(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        """Fills every parameter of a module made on the meta device.

        Raises:
            ConfigError: the weights do not fit the config, or are damaged.
        """


class HuggingFaceFolder(ModelFiles):
    """``config.json`` and safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_folder_config(path)
        self.architecture = find_architecture(raw)
        self.config = self.architecture.read_config(raw)
        if self.config.tie_word_embeddings and stored_head_differs(path):
            self.config = replace(self.config, tie_word_embeddings=False)
            logging.getLogger("kvpager").warning(
                "`%s` says `tie_word_embeddings` and stores a head that is not the embedding: the stored head is used",
                path,
            )

    def load(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        """See `ModelFiles.load`."""
        ignored = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        load_parameters(module, self.path, dtype=dtype, device=device, ignored=ignored)


class GGUFModel(ModelFiles):
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self.gguf_fields = self._file.fields
        self.architecture, self.config = config_from_gguf(self._file)

    def load(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        """See `ModelFiles.load`."""
        load_gguf_parameters(module, self._file, self.config, dtype=dtype, device=device)


def open_model(model: str | Path | None) -> ModelFiles:
    """Finds a model and reads its config; see `resolve_model` for what can be given.

    Raises:
        ConfigError: it is not there, or kvpager does not compute what its config says.
    """
    path = resolve_model(model)
    return GGUFModel(path) if path.is_file() else HuggingFaceFolder(path)
