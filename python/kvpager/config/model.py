"""What a model is: `ModelConfig`, from a ``config.json`` in either spelling.

Three families share one decoder block; what tells them apart are switches, so that nothing else asks for a family.

Longer than 300 lines, because the families, their defaults and both spellings describe one file, ``config.json``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager.config.files import read_json
from kvpager.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
_TOO_LARGE = 1e300  # no number of a config is near it; Infinity and integers that no float holds are above
_MISSING = object()


@dataclass(frozen=True)
class _Family:
    """What the models of one architecture have in common, where it is not in their config.

    Attributes:
        model_type: its other name.
        qkv_bias, qk_norm: see `ModelConfig`.
        other_keys: key → the one value that kvpager computes with; absent means that value, as in older folders.
        defaults: key → its value where the config lacks it, as transformers' config class of the family has it. The
            sizes that shape the weights are not among them: a config without those is damaged. Nor is the base of the
            rotary frequencies: guessed wrong, it gives fluent nonsense.
    """

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    other_keys: Mapping[str, object]
    defaults: Mapping[str, object]


_EVERYWHERE: dict[str, object] = {"hidden_act": "silu", "use_sliding_window": False, "quantization_config": None}
_DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN: dict[str, object] = {**_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 32_768}
_LLAMA: dict[str, object] = {**_DEFAULTS, "max_position_embeddings": 2_048, "eos_token_id": 2}
FAMILIES: Mapping[str, _Family] = {
    "Qwen3ForCausalLM": _Family(
        "qwen3", False, True, {**_EVERYWHERE, "attention_bias": False}, {**_QWEN, "head_dim": 128}
    ),
    "Qwen2ForCausalLM": _Family("qwen2", True, False, _EVERYWHERE, _QWEN),
    "LlamaForCausalLM": _Family(
        "llama", False, False, {**_EVERYWHERE, "attention_bias": False, "mlp_bias": False}, _LLAMA
    ),
}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Rotary frequencies stretched as in Llama 3.1 (``rope_type`` llama3); the formula is in `models.rotary`.

    Attributes:
        factor: what slow frequencies are divided by.
        low_freq_factor: turns over the original context below which a frequency counts as slow.
        high_freq_factor: turns above which it is kept.
        original_max_position_embeddings: positions of the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"`low_freq_factor` {self.low_freq_factor} is not below `high_freq_factor` {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class RopeFactors:
    """Rotary frequencies each divided by a number of its own, as GGUF files spell out the stretching of Llama 3.1.

    Attributes:
        factors: D/2 numbers.
    """

    factors: tuple[float, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder: Qwen3, Qwen2 (2.5) or Llama.

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
        qkv_bias: whether the projections to q, k and v have a bias (Qwen2).
        qk_norm: whether every query and key head is normed (Qwen3).
        rope_scaling: how the rotary frequencies are stretched; None: not at all.
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
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_scaling: Llama3RopeScaling | RopeFactors | None = None

    def __post_init__(self) -> None:
        H, K, D = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if H % K:
            raise ConfigError(f"`num_attention_heads` {H} is not a multiple of `num_key_value_heads` {K}")
        if D % 2:
            raise ConfigError(f"`head_dim` {D} is odd; rotary positions turn pairs of values")
        if isinstance(self.rope_scaling, RopeFactors) and len(self.rope_scaling.factors) != D // 2:
            raise ConfigError(f"{len(self.rope_scaling.factors)} rotary factors; `head_dim` {D} has {D // 2} pairs")

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads ``config.json``, and the end-of-text ids of ``generation_config.json`` where there is one.

        Raises:
            ConfigError: a file is missing or no JSON object, or see `from_dict`.
        """
        return cls.from_dict(read_folder_config(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From a ``config.json`` in the old spelling (top-level ``rope_theta``, ``torch_dtype``) or the new one.

        Raises:
            ConfigError: another architecture, a feature that kvpager does not compute, a key missing or malformed.
        """
        family = _family(raw)
        raw = {**family.defaults, **raw}
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
        num_key_value_heads = num_attention_heads
        if raw.get("num_key_value_heads") is not None:
            num_key_value_heads = _integer(raw, "num_key_value_heads")
        return cls(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            rms_norm_eps=_positive(raw, "rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings"),
            dtype=_dtype(raw),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope_scaling=_rope_scaling(raw),
        )


def read_folder_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``, with the end-of-text ids of ``generation_config.json`` where there are some.

    Raises:
        ConfigError: a file is missing or no JSON object.
    """
    raw = dict(read_json(folder / "config.json"))
    generation_path = folder / "generation_config.json"
    if generation_path.exists() and (eos := read_json(generation_path).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    return raw


def architecture_of(raw: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """The name of the one architecture that a ``config.json`` names.

    Args:
        raw: its content; without ``architectures`` its ``model_type`` names the architecture.
        known: supported names, each with its ``model_type``.

    Raises:
        ConfigError: it names none, several, or another one.
    """
    architectures = raw.get("architectures") or [raw.get("model_type", "of no name")]
    names = {**{name: name for name in known}, **{model_type: name for name, model_type in known.items()}}
    if len(architectures) != 1 or architectures[0] not in names:
        raise ConfigError(f"`architectures` is {', '.join(map(str, architectures))}; supported: {', '.join(known)}")
    return names[architectures[0]]


def _family(raw: Mapping[str, Any]) -> _Family:
    """The family of the model, once it is sure that nothing in the config asks for more than kvpager computes."""
    family = FAMILIES[architecture_of(raw, {name: family.model_type for name, family in FAMILIES.items()})]
    for key, supported in {"model_type": family.model_type, **family.other_keys}.items():
        value = raw.get(key, supported)
        if value != supported and value is not None:
            raise ConfigError(f"`{key}` is {json.dumps(value)}; supported: {json.dumps(supported)}")
    layer_types = raw.get("layer_types") or []
    if other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
        raise ConfigError(f"`layer_types` has {', '.join(other)}; supported: full_attention")
    return family


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters")
    found = {}
    if raw.get("rope_theta") is not None:
        found["rope_theta"] = _positive(raw, "rope_theta")
    if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        found["rope_parameters.rope_theta"] = _positive(parameters, "rope_theta")
    return float(_agreed(found, "`rope_theta` nor `rope_parameters.rope_theta`"))


def _rope_scaling(raw: Mapping[str, Any]) -> Llama3RopeScaling | None:
    """What ``rope_scaling`` (old spelling) and ``rope_parameters`` (new) ask for; they have to agree."""
    found: dict[str, Llama3RopeScaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        mapping = raw.get(key)
        if mapping is None:
            continue
        if not isinstance(mapping, dict):
            raise ConfigError(f"`{key}` is {json.dumps(mapping)}; wanted an object")
        kind = mapping.get("rope_type", mapping.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ConfigError(f"`{key}` asks for RoPE scaling of type {kind}; supported: default (no scaling), llama3")
        if (partial := mapping.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError(f"`{key}.partial_rotary_factor` is {partial}; supported: 1.0")
        found[key] = None if kind == "default" else _llama3(mapping)
    return _agreed(found, "") if found else None


def _llama3(mapping: Mapping[str, Any]) -> Llama3RopeScaling:
    return Llama3RopeScaling(
        factor=_positive(mapping, "factor"),
        low_freq_factor=_positive(mapping, "low_freq_factor"),
        high_freq_factor=_positive(mapping, "high_freq_factor"),
        original_max_position_embeddings=_integer(mapping, "original_max_position_embeddings"),
    )


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
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ConfigError(f"`{key}` is {json.dumps(value)}; wanted an integer of at least 1, below 2^31")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = _required(raw, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _TOO_LARGE:
        raise ConfigError(f"`{key}` is {json.dumps(value)}; wanted a number above 0 that is finite")
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
