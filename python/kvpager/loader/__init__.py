"""Finds a model and fills a module's parameters: Hugging Face folders with safetensors, GGUF files."""

from kvpager.loader.files import ModelFiles, open_model
from kvpager.loader.find import BUNDLED_MODEL, resolve_model
from kvpager.loader.safetensors import load_parameters

__all__ = ["BUNDLED_MODEL", "ModelFiles", "load_parameters", "open_model", "resolve_model"]
