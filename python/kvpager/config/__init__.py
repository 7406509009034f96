"""Settings and model shapes: `ModelConfig` (read from a model's config), `CacheConfig` and `EngineConfig`.

All are frozen and checked once, when made; nothing here imports torch. No value that changes a result is guessed: a key
that is missing, or a value that kvpager does not compute with, is a `ConfigError` with the key, the value and the
supported values.
"""

from kvpager.config.cache import CacheConfig, CacheShape, bytes_per_block
from kvpager.config.engine import EngineConfig, EngineSettings, check_step_tokens, cpu_features, default_dtype
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
    "CacheConfig",
    "CacheShape",
    "EngineConfig",
    "EngineSettings",
    "Llama3RopeScaling",
    "ModelConfig",
    "RopeFactors",
    "architecture_of",
    "bytes_per_block",
    "check_step_tokens",
    "cpu_features",
    "default_dtype",
    "read_folder_config",
    "read_json",
]
