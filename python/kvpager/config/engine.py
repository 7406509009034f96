"""`EngineConfig`: how a model is run; and the dtype that suits the processor.

A setting of the engine is one field of `EngineConfig` and one key of `EngineSettings`, which are the keywords of `LLM`;
a test keeps the two equal.
"""

import difflib
import platform
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TypedDict, Unpack

from kvpager.config.cache import CacheConfig, at_least
from kvpager.config.model import DTYPES, ModelConfig
from kvpager.errors import ConfigError
from kvpager.kinds import MAX_SEED

DEFAULT_KV_CACHE_BYTES = 2**30


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig` as keywords."""

    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    enable_prefix_caching: bool
    eviction_policy: str
    watermark_blocks: int | None
    attention_backend: str
    device: str
    dtype: str
    max_num_seqs: int
    seed: int
    max_num_batched_tokens: int | None
    max_model_len: int | None
    fixed_split: int
    enforce_eager: bool


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CacheConfig):
    """The settings of an engine: those of its cache (`CacheConfig`), and these.

    With neither `num_blocks` nor `kv_cache_memory_bytes` the pool takes 1 GiB, or less where `max_num_seqs` sequences
    of the model's full length need less.

    Attributes:
        device: where weights and cache lie: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtype: the dtype to compute in: one of `DTYPES`, ``"float64"`` (the readable operations only, for exact
            comparisons), or ``"auto"``: see `default_dtype`.
        max_num_seqs: most sequences that run together.
        seed: of the requests that bring none, 0 … 2⁶⁴ − 1.
        max_num_batched_tokens: most tokens of a step, at least `max_num_seqs`; longer prompts are computed in chunks.
            None: 2,048, or `max_num_seqs` if that is more.
        max_model_len: most tokens of a sequence, prompt and new ones; None: the positions that the model has.
        fixed_split: cut the sequences of a decode's attention every so many tokens instead of where it suits the
            threads; then a decode's scores are the same, bit for bit, whatever else is in its step. 0: cut freely.
        enforce_eager: never record decode steps as CUDA graphs; on a CPU they never are.
    """

    device: str = "cpu"
    dtype: str = "auto"
    max_num_seqs: int = at_least(1, 64)
    seed: int = 0
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = at_least(1, None)
    fixed_split: int = at_least(0, 0)
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        supported = ("auto", *DTYPES, "float64")
        if self.dtype not in supported:
            raise ConfigError(f"`dtype` is {self.dtype}; supported: {', '.join(supported)}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"`seed` is {self.seed}; it must be 0 … 2^64 - 1")
        check_step_tokens(self.step_tokens, self.max_num_seqs)

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step: `max_num_batched_tokens`, or its default."""
        if self.max_num_batched_tokens is None:
            return max(2048, self.max_num_seqs)
        return self.max_num_batched_tokens

    def longest_sequence(self, model: ModelConfig) -> int:
        """Most tokens of a sequence: `max_model_len`, or the model's positions if those are fewer."""
        return min(self.max_model_len or model.max_position_embeddings, model.max_position_embeddings)

    def sized_for(self, model: ModelConfig, computed: object) -> "EngineConfig":
        """This config with a default pool, where it gives neither blocks nor a budget; `computed` as in `dtype_for`."""
        if self.num_blocks is not None or self.kv_cache_memory_bytes is not None:
            return self
        affordable = DEFAULT_KV_CACHE_BYTES // self.bytes_per_block(model, computed)
        useful = self.max_num_seqs * -(-self.longest_sequence(model) // self.block_size)
        return replace(self, num_blocks=max(1, min(affordable, useful)))

    def override(self, **settings: Unpack[EngineSettings]) -> "EngineConfig":
        """This config with other values.

        Raises:
            ConfigError: there is no such setting, or a value can't be used.
        """
        known = [each.name for each in fields(EngineConfig)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
                raise ConfigError(f"there is no setting `{name}`; {hint}")
        return replace(self, **settings)


def check_step_tokens(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Refuse a step too small for one token of each running sequence.

    Raises:
        ConfigError: `max_num_batched_tokens` is less than `max_num_seqs`.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {max_num_batched_tokens}; it must be at least `max_num_seqs` "
            f"{max_num_seqs}, so that each sequence that decodes gets its token"
        )


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
