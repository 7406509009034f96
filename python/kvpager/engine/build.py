"""Makes a runner of a model on disk and settings: device, dtype, weights, pool; and the model's tokenizer."""

import functools
import logging

import torch

from kvpager.cache import PagedKVCache
from kvpager.config import EngineConfig, ModelConfig, default_dtype
from kvpager.errors import ConfigError
from kvpager.loader import ModelFiles
from kvpager.manager import KVBlockManager
from kvpager.models import Model
from kvpager.native import native_status
from kvpager.runner import CudaCapture, ModelRunner, decode_sizes
from kvpager.tokenizer import Tokenizer


def make_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """The tokenizer that a model brings; None where a folder has no ``tokenizer.json``.

    Raises:
        ConfigError: it is damaged, or not byte-level.
    """
    if files.gguf_fields is not None:
        return Tokenizer.from_gguf(files.gguf_fields)
    return Tokenizer.from_folder(files.path) if (files.path / "tokenizer.json").is_file() else None


def make_runner(files: ModelFiles, config: EngineConfig) -> ModelRunner:
    """Load a model and make the pool beside it.

    Raises:
        ConfigError: the device can't be used, or the model or the pool can't be made.
    """
    device = _usable_device(config.device)
    dtype = resolve_dtype(files.config, config)
    config.dtype_for(dtype)  # refused before the weights are read
    model = files.make_model()
    files.load(model, dtype=getattr(torch, dtype), device=device)
    return runner_over(model.eval(), config, dtype)


def runner_over(model: Model, config: EngineConfig, dtype: str) -> ModelRunner:
    """A runner over loaded weights, with a pool of its own.

    Args:
        model: on `config.device`, in evaluation mode.
        config: of pool and runner.
        dtype: the dtype that `model` computes in.

    Raises:
        ConfigError: the pool can't be made.
    """
    config = config.sized_for(model.config, dtype)
    cache = PagedKVCache.from_config(model.config, config, dtype=dtype, device=config.device)
    manager = KVBlockManager(
        cache.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction_policy=config.eviction_policy,
    )
    is_recorded = can_capture(config)
    return ModelRunner(
        model, cache, manager, fixed_split=config.fixed_split,
        decode_sizes=decode_sizes(config.max_num_seqs) if is_recorded else (),
        capture=CudaCapture() if is_recorded else None,
        plans_splits=_has_cuda_kernels(config) and config.attention_backend in ("auto", "native"),
    )  # fmt: skip


def can_capture(config: EngineConfig) -> bool:
    """Whether decode steps are recorded: on CUDA, with kernels that never read their inputs on the host."""
    takes_graphs = config.attention_backend in ("auto", "native", "flash_attn")
    return _has_cuda_kernels(config) and takes_graphs and not config.enforce_eager


def _has_cuda_kernels(config: EngineConfig) -> bool:
    return torch.device(config.device).type == "cuda" and native_status().cuda_kernels


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
