"""`kvpager plan`: what a model and its cache take, and what fits, before anything is loaded.

Only the config is read. All sizes follow from it: the weights' from their shapes, the cache's from `CacheConfig`.
"""

from dataclasses import dataclass

import torch

from kvpager.config import EngineConfig
from kvpager.engine.build import resolve_dtype
from kvpager.loader import ModelFiles
from kvpager.sampling import prompt_logprob_bytes


@dataclass(frozen=True)
class Plan:
    """The arithmetic of one model on one machine.

    Attributes:
        num_parameters: of the model.
        dtype: of the weights, and of all arithmetic.
        cache_dtype: of the cache.
        weight_bytes, cache_bytes: of the weights, and of the whole pool.
        bytes_per_block: of the cache, all layers, scales included.
        block_size, num_blocks: of the pool.
        max_model_len: positions that the model has.
        available_bytes: memory that the device has to give now; None where unknown.
        prompt_logprob_bytes: taken for a moment, at most, where a request asks for `prompt_logprobs`.
    """

    num_parameters: int
    dtype: str
    cache_dtype: str
    weight_bytes: int
    bytes_per_block: int
    block_size: int
    num_blocks: int
    max_model_len: int
    available_bytes: int | None
    prompt_logprob_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and answer together; the last token takes no slot."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def concurrent(self, num_tokens: int) -> int:
        """Requests of this many tokens (prompt and answer) that fit the pool together, sharing nothing."""
        return self.num_blocks // max(1, -(-(num_tokens - 1) // self.block_size))


def make_plan(files: ModelFiles, config: EngineConfig) -> Plan:
    """Reads nothing but what `files` has read. O(layers).

    Raises:
        ConfigError: the settings can't be used with this model.
    """
    model = files.config
    dtype = resolve_dtype(model, config)
    config = config.sized_for(model, dtype)
    num_parameters = sum(parameter.numel() for parameter in files.make_model().parameters())
    return Plan(
        num_parameters=num_parameters,
        dtype=dtype,
        cache_dtype=config.dtype_for(dtype).name,
        weight_bytes=num_parameters * getattr(torch, dtype).itemsize,
        prompt_logprob_bytes=prompt_logprob_bytes(model.vocab_size),
        bytes_per_block=config.bytes_per_block(model, dtype),
        block_size=config.block_size,
        num_blocks=config.blocks_in_pool(model, dtype),
        max_model_len=model.max_position_embeddings,
        available_bytes=_available_bytes(config.device),
    )


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Name and value of every line."""
    total = plan.weight_bytes + plan.cache_bytes
    lengths = [n for n in (256, 1024, 4096, 16384) if n < plan.longest_request] + [plan.longest_request]
    fits = [f"{plan.concurrent(length):,} of {length:,} tokens" for length in lengths]
    lines = [
        ("parameters", f"{plan.num_parameters:,}"),
        ("weights", f"{_size(plan.weight_bytes)} in {plan.dtype}"),
        ("cache per token", f"{-(-plan.bytes_per_block // plan.block_size):,} bytes in {plan.cache_dtype}"),
        (
            "cache",
            f"{_size(plan.cache_bytes)}: {plan.num_blocks:,} blocks of {plan.block_size}, "
            f"{plan.num_blocks * plan.block_size:,} tokens",
        ),
        ("longest request", f"{plan.longest_request:,} tokens (the model has {plan.max_model_len:,} positions)"),
        ("together", "; ".join(fits)),
        ("in all", f"{_size(total)}; prompt_logprobs take at most {_size(plan.prompt_logprob_bytes)} more"),
    ]
    if plan.available_bytes is not None:
        lines.append(("memory", f"{_size(plan.available_bytes)} available: {_verdict(plan, total)}"))
    return lines


def _verdict(plan: Plan, total: int) -> str:
    available = plan.available_bytes or 0
    if total <= available:
        return "fits"
    left = available - plan.weight_bytes
    if left < plan.bytes_per_block:
        return f"the weights alone lack {_size(plan.weight_bytes + plan.bytes_per_block - available)}"
    return f"lacks {_size(total - available)}; `num_blocks` {left // plan.bytes_per_block} would fit"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.2f} {unit}" if unit != "bytes" else f"{num_bytes} bytes"


def _available_bytes(device: str) -> int | None:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0] if torch.cuda.is_available() else None
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
    return None if kib is None else int(kib) * 1024
