"""From a model on disk and settings to a runner: dtype, weights, pool; and its tokenizer."""

import functools
import logging

import torch

from kvpager.block_manager import KVBlockManager
from kvpager.cache import PagedKVCache
from kvpager.config import EngineConfig, ModelConfig, default_dtype
from kvpager.errors import ConfigError
from kvpager.graphs import CudaCapture, decode_sizes
from kvpager.loader import ModelFiles
from kvpager.models import DecoderForCausalLM
from kvpager.native import native_status
from kvpager.runner import ModelRunner
from kvpager.tokenizer import Tokenizer

DEFAULT_KV_CACHE_BYTES = 2**30


def make_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """The tokenizer that a model brings; None where a folder has no ``tokenizer.json``.

    Raises:
        ConfigError: it is damaged, or not byte-level.
    """
    if files.gguf_fields is not None:
        return Tokenizer.from_gguf(files.gguf_fields)
    return Tokenizer.from_folder(files.path) if (files.path / "tokenizer.json").is_file() else None


def make_runner(files: ModelFiles, config: EngineConfig) -> ModelRunner:
    """Loads the model and makes the pool beside it.

    Raises:
        ConfigError: the device can't be used, or the model or the pool can't be made.
    """
    model_config = files.config
    device = _usable_device(config.device)
    dtype = getattr(torch, resolve_dtype(model_config, config))
    with torch.device("meta"):
        model = DecoderForCausalLM(model_config)
    files.load(model, dtype=dtype, device=device)
    cache = _make_cache(model_config, config, dtype)
    manager = KVBlockManager(cache.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching)
    is_recorded = can_capture(config)
    return ModelRunner(
        model.eval(), cache, manager, fixed_split=config.fixed_split,
        decode_sizes=decode_sizes(config.max_num_seqs) if is_recorded else (),
        capture=CudaCapture() if is_recorded else None,
    )  # fmt: skip


def can_capture(config: EngineConfig) -> bool:
    """Whether decode steps are recorded: on CUDA, by kernels that need no look at their inputs on the host."""
    is_cuda = torch.device(config.device).type == "cuda" and native_status().cuda_kernels
    return is_cuda and not config.enforce_eager and config.attention_backend in ("auto", "native", "flash_attn")


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"`device` is {name}; supported: cpu, cuda, cuda:0, …") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device` is {name}; supported: cpu, cuda, cuda:0, …")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"`device` is {name}; torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def resolve_dtype(model_config: ModelConfig, config: EngineConfig) -> str:
    """The dtype that an engine computes in; says so (once per process) where it is not the stored one."""
    if config.dtype != "auto":
        return config.dtype
    dtype = default_dtype(model_config.dtype, config.device)
    if dtype != model_config.dtype:
        _say_once(f"this CPU has no fast {model_config.dtype} arithmetic: computing in {dtype} (`dtype` overrides)")
    return dtype


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("kvpager").warning("%s", message)


def _make_cache(model_config: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> PagedKVCache:
    num_blocks, budget = config.num_blocks, config.kv_cache_memory_bytes
    make = functools.partial(
        PagedKVCache.from_config, model_config, block_size=config.block_size, dtype=dtype, device=config.device,
        attention_backend=config.attention_backend,
    )  # fmt: skip
    if num_blocks is not None or budget is not None:
        return make(num_blocks=num_blocks, kv_cache_memory_bytes=budget)
    return make(num_blocks=default_num_blocks(model_config, config, dtype))


def default_num_blocks(model_config: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Blocks of the pool where neither they nor a budget are given: 1 GiB, or what can be used at most."""
    values_per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * model_config.head_dim
    affordable = DEFAULT_KV_CACHE_BYTES // (values_per_token * dtype.itemsize * config.block_size)
    longest = min(config.max_model_len or 2**31, model_config.max_position_embeddings)
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return max(1, min(affordable, useful))
