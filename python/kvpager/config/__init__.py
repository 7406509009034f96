"""What a model is (`ModelConfig`, read from a Hugging Face config) and how it is to be run (`EngineConfig`).

A leaf: imports neither torch nor anything of kvpager but the errors. Both are frozen and checked once, when made.
Nothing that changes the result is guessed: a key that is missing, or a value that kvpager does not compute with, is a
`ConfigError` that names the key, the value and what is supported.
"""

from kvpager.config.engine import EngineConfig, cpu_features, default_dtype
from kvpager.config.files import read_json
from kvpager.config.model import (
    DTYPES,
    FAMILIES,
    Llama3RopeScaling,
    ModelConfig,
    RopeFactors,
    architecture_of,
    read_folder_config,
)

__all__ = [
    "DTYPES",
    "FAMILIES",
    "EngineConfig",
    "Llama3RopeScaling",
    "ModelConfig",
    "RopeFactors",
    "architecture_of",
    "cpu_features",
    "default_dtype",
    "read_folder_config",
    "read_json",
]
