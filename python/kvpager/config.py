"""What a model is (`ModelConfig`, read from a Hugging Face folder) and how it is to be run (`EngineConfig`).

A leaf: imports neither torch nor anything of kvpager but the errors. Both are frozen and checked once, when made.
Nothing that changes the result is guessed: a key that is missing, or a value that kvpager does not compute with, is a
`ConfigError` that names the key, the value and what is supported.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvpager.errors import ConfigError

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "float16", "bfloat16")
_MISSING = object()


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Qwen3 decoder.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: L.
        num_attention_heads: H, query heads.
        num_key_value_heads: K, key/value heads; H is a multiple of K.
        head_dim: D; not always ``hidden_size / num_attention_heads``.
        max_position_embeddings: positions the model was made for, 0 … this − 1.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        tie_word_embeddings: whether the embedding is the head too.
        dtype: of the stored weights: one of `DTYPES`.
        eos_token_ids: ids that end a text; may be empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        H, K, D = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if H % K:
            raise ConfigError(f"`num_attention_heads` {H} is not a multiple of `num_key_value_heads` {K}")
        if D % 2:
            raise ConfigError(f"`head_dim` {D} is odd; rotary positions turn pairs of values")

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads ``config.json``, and the end-of-text ids of ``generation_config.json`` where there is one.

        Raises:
            ConfigError: a file is missing or no JSON object, or see `from_dict`.
        """
        raw = dict(read_json(folder / "config.json"))
        generation_path = folder / "generation_config.json"
        if generation_path.exists() and (eos := read_json(generation_path).get("eos_token_id")) is not None:
            raw["eos_token_id"] = eos
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From a ``config.json`` in the old spelling (top-level ``rope_theta``, ``torch_dtype``) or the new one.

        Raises:
            ConfigError: another architecture, a feature that kvpager does not compute, a key missing or malformed.
        """
        _refuse_other_models(raw)
        hidden_size = _integer(raw, "hidden_size")
        num_attention_heads = _integer(raw, "num_attention_heads")
        if raw.get("head_dim") is not None:
            head_dim = _integer(raw, "head_dim")
        elif hidden_size % num_attention_heads == 0:
            head_dim = hidden_size // num_attention_heads
        else:
            raise ConfigError(
                f"`head_dim` is missing and `hidden_size` {hidden_size} is not a multiple of "
                f"`num_attention_heads` {num_attention_heads}"
            )
        return cls(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=_integer(raw, "num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            rms_norm_eps=_positive(raw, "rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings"),
            dtype=_dtype(raw),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
        )


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs its model.

    Attributes:
        device: where weights and cache lie: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtype: one of `DTYPES`, or ``"auto"``: see `default_dtype`.
        block_size: S, token positions per block.
        num_blocks: N, blocks in the pool; None: from the budget.
        kv_cache_memory_bytes: budget of the pool; None with no `num_blocks` either: the engine's default.
        max_num_seqs: most sequences that run together.
        seed: of the requests that bring none.
    """

    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"`dtype` is {self.dtype}; supported: auto, {', '.join(DTYPES)}")
        for name in ("block_size", "num_blocks", "kv_cache_memory_bytes", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"`num_blocks` {self.num_blocks} and `kv_cache_memory_bytes` {self.kv_cache_memory_bytes} "
                "both set the size of the pool; give one"
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


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read `{path}`: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"`{path}` is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"`{path}` holds {type(content).__name__}, wanted an object")
    return content


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures") or [raw.get("model_type", "of no name")]
    if architectures not in ([ARCHITECTURE], ["qwen3"]):
        raise ConfigError(f"`architectures` is {', '.join(map(str, architectures))}; supported: {ARCHITECTURE}")
    # Absent means the value named here: these are Qwen3's own defaults, and older folders leave the keys out.
    only = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }
    for key, supported in only.items():
        value = raw.get(key, supported)
        if value != supported and value is not None:
            raise ConfigError(f"`{key}` is {json.dumps(value)}; supported: {json.dumps(supported)}")
    layer_types = raw.get("layer_types") or []
    if other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
        raise ConfigError(f"`layer_types` has {', '.join(other)}; supported: full_attention")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, mapping in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if mapping is None:
            continue
        if not isinstance(mapping, dict):
            raise ConfigError(f"`{key}` is {json.dumps(mapping)}; wanted an object")
        kind = mapping.get("rope_type", mapping.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"`{key}` asks for RoPE scaling of type {kind}; supported: default (no scaling)")
        if (factor := mapping.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError(f"`{key}.partial_rotary_factor` is {factor}; supported: 1.0")
    found = {}
    if raw.get("rope_theta") is not None:
        found["rope_theta"] = _positive(raw, "rope_theta")
    if parameters is not None and parameters.get("rope_theta") is not None:
        found["rope_parameters.rope_theta"] = _positive(parameters, "rope_theta")
    return float(_agreed(found, "`rope_theta` nor `rope_parameters.rope_theta`"))


def _dtype(raw: Mapping[str, Any]) -> str:
    found = {key: str(raw[key]).removeprefix("torch.") for key in ("torch_dtype", "dtype") if raw.get(key) is not None}
    dtype = str(_agreed(found, "`torch_dtype` nor `dtype`"))
    if dtype not in DTYPES:
        raise ConfigError(f"`{next(iter(found))}` is {dtype}; supported: {', '.join(DTYPES)}")
    return dtype


def _agreed(found: Mapping[str, object], wanted: str) -> Any:
    """The one value that the spellings of a key agree on."""
    if not found:
        raise ConfigError(f"config has neither {wanted}")
    if len(set(found.values())) > 1:
        values = ", ".join(f"`{key}` {value}" for key, value in found.items())
        raise ConfigError(f"config disagrees with itself: {values}")
    return next(iter(found.values()))


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = _required(raw, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{key}` is {json.dumps(value)}; wanted an integer of at least 1")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = _required(raw, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"`{key}` is {json.dumps(value)}; wanted a number above 0")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = _required(raw, key)
    if not isinstance(value, bool):
        raise ConfigError(f"`{key}` is {json.dumps(value)}; wanted true or false")
    return value


def _required(raw: Mapping[str, Any], key: str) -> Any:
    value = raw.get(key, _MISSING)
    if value is _MISSING or value is None:
        raise ConfigError(f"config has no `{key}`")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"`eos_token_id` is {json.dumps(value)}; wanted a token id or a list of them")
    return tuple(dict.fromkeys(ids))
