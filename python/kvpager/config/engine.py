"""How a model is run: `EngineConfig`, and the dtype that suits the processor."""

import platform
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from kvpager.config.model import DTYPES
from kvpager.errors import ConfigError
from kvpager.kinds import MAX_SEED, is_whole


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs its model.

    Attributes:
        device: where weights and cache lie: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtype: one of `DTYPES`, ``"float64"`` (the readable operations only, for exact comparisons), or ``"auto"``:
            see `default_dtype`.
        block_size: S, token positions per block.
        num_blocks: N, blocks in the pool; None: from the budget.
        kv_cache_memory_bytes: budget of the pool; None with no `num_blocks` either: the engine's default.
        max_num_seqs: most sequences that run together.
        seed: of the requests that bring none, 0 … 2⁶⁴ − 1.
        max_num_batched_tokens: most tokens of a step, at least `max_num_seqs`; what does not fit is computed in chunks.
            None: 2,048, or `max_num_seqs` if that is more.
        max_model_len: most tokens of a sequence, prompt and new ones; None: the positions that the model has.
        enable_prefix_caching: find what other requests computed for the same beginning.
        watermark_blocks: blocks that an admission leaves free while others run, so that they can grow; None: 1 % of
            the pool.
        attention_backend: who computes attention: "auto" (kvpager's kernels wherever it has them), "native",
            "flashinfer", "flash_attn" or "reference".
        fixed_split: cut the sequences of a decode's attention every so many tokens instead of where it suits the
            threads; then a decode's scores are the same, bit for bit, whatever else is in its step. 0: cut freely.
        enforce_eager: never record decode steps as CUDA graphs; on a CPU they never are.
    """

    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 64
    seed: int = 0
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    watermark_blocks: int | None = None
    attention_backend: str = "auto"
    fixed_split: int = 0
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        supported = ("auto", *DTYPES, "float64")
        if self.dtype not in supported:
            raise ConfigError(f"`dtype` is {self.dtype}; supported: {', '.join(supported)}")
        for name in ("block_size", "num_blocks", "kv_cache_memory_bytes", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1")
        for name in ("watermark_blocks", "fixed_split"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"`{name}` is {value}; it must be at least 0")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"`seed` is {self.seed}; it must be 0 … 2^64 - 1")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"`max_num_batched_tokens` is {self.max_num_batched_tokens}; it must be at least `max_num_seqs` "
                f"{self.max_num_seqs}, so that all who decode get their token"
            )
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"`num_blocks` {self.num_blocks} and `kv_cache_memory_bytes` {self.kv_cache_memory_bytes} "
                "both set the size of the pool; give one"
            )

    def _check_kinds(self) -> None:
        """Each value is of the kind of its default: a text, True or False, or else a whole number."""
        for field in fields(self):
            name, value, default = field.name, getattr(self, field.name), field.default
            if isinstance(default, str):
                fits, wanted = isinstance(value, str), "a text"
            elif isinstance(default, bool):
                fits, wanted = isinstance(value, bool), "True or False"
            elif value is None:
                fits, wanted = default is None, "a whole number"
            else:
                fits = is_whole(value) and (name == "seed" or -(2**63) <= value < 2**63)  # a seed has its own range
                wanted = "a whole number of at most 63 bits"
            if not fits:
                raise ConfigError(f"`{name}` is {value!r}; it must be {wanted}")


def default_dtype(stored: str, device: str) -> str:
    """The dtype to compute in when none is asked for: as stored, but float32 on a CPU that can't multiply that.

    Without bfloat16 instructions a CPU's bfloat16 matrix product is about a hundred times slower than float32's.
    """
    if device.partition(":")[0] != "cpu" or stored == "float32":
        return stored
    fast = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}[stored]
    return stored if fast & cpu_features() else "float32"


@cache
def cpu_features() -> frozenset[str]:
    """Instruction-set flags of this CPU as Linux names them (``avx2``, ``avx512_bf16``, …); empty where unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    key = "flags" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "Features"
    line = next((line for line in lines if line.startswith(key)), "")
    return frozenset(line.partition(":")[2].split())
