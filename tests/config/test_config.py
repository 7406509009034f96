"""config.json in both spellings; what is missing or not computed is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager.config import EngineConfig, Llama3RopeScaling, ModelConfig, default_dtype
from kvpager.config import engine as engine_settings
from kvpager.errors import ConfigError

# Qwen3-0.6B as it is published: the old spelling.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in PUBLISHED.items() if key not in keys} | changes


def new_spelling(**changes: Any) -> dict[str, Any]:
    parameters = {"rope_theta": 1000000.0, "rope_type": "default"}
    return without("rope_theta", "rope_scaling", "torch_dtype", rope_parameters=parameters, dtype="bfloat16") | changes


LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def llama(**changes: Any) -> dict[str, Any]:
    """Llama-3.2-1B's keys that differ in kind from Qwen3's."""
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "pretraining_tp": 1}
    return without("use_sliding_window", "max_window_layers", **names, rope_scaling=LLAMA3) | changes


def qwen2(**changes: Any) -> dict[str, Any]:
    """Qwen2.5-0.5B's: no `head_dim`, no word about the biases, a window that is not used."""
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32768}
    return without("head_dim", "attention_bias", "rope_scaling", **names) | changes


def test_three_switches_tell_the_families_apart() -> None:
    read = {name: ModelConfig.from_dict(raw) for name, raw in zip("qwl", (PUBLISHED, qwen2(), llama()), strict=True)}
    assert [(c.qkv_bias, c.qk_norm) for c in read.values()] == [(False, True), (True, False), (False, False)]
    assert read["w"].head_dim == 64
    assert [c.rope_scaling for c in read.values()] == [None, None, Llama3RopeScaling(32.0, 1.0, 4.0, 8192)]
    spelled = llama(rope_parameters=LLAMA3 | {"rope_theta": 1000000.0}, dtype="bfloat16")
    for key in ("rope_theta", "rope_scaling", "torch_dtype"):
        del spelled[key]
    assert ModelConfig.from_dict(spelled) == read["l"]


def test_the_published_config() -> None:
    read = ModelConfig.from_dict(PUBLISHED)
    assert read == ModelConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(151645,),
    )
    assert ModelConfig.from_dict(new_spelling()) == read


def test_b112_a_missing_head_dim_is_hidden_over_heads() -> None:
    plain = {key: value for key, value in llama().items() if key != "head_dim"}
    assert ModelConfig.from_dict(plain).head_dim == 64
    assert ModelConfig.from_dict(without("head_dim", head_dim=None)).head_dim == 64
    with pytest.raises(ConfigError, match=r"`head_dim` is missing and `hidden_size` 1000 is not a multiple"):
        ModelConfig.from_dict({**plain, "hidden_size": 1000})


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama"])
@pytest.mark.parametrize(
    "key",
    [
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "max_position_embeddings",
        "eos_token_id",
    ],
)
def test_f214_what_a_config_lacks_is_the_family_default(family: str, key: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = {"Qwen3": PUBLISHED, "Qwen2": qwen2(), "Llama": llama()}[family]
    raw = {**raw, "num_attention_heads": 32, "hidden_size": 2048, "rms_norm_eps": 1e-5}
    raw = {name: value for name, value in raw.items() if name != key}
    theirs = getattr(transformers, f"{family}Config")(**raw)
    ours = ModelConfig.from_dict(raw)
    if key == "eos_token_id":
        assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    elif key == "head_dim" and family == "Qwen2":
        assert ours.head_dim == 2048 // 32, "transformers computes it where it is used"
    else:
        assert getattr(ours, key) == getattr(theirs, key)


def test_f214_no_kv_heads_means_as_many_as_heads() -> None:
    assert ModelConfig.from_dict(without(num_key_value_heads=None)).num_key_value_heads == 16


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without("rope_theta"), "config has neither `rope_theta` nor `rope_parameters.rope_theta`"),
        (new_spelling(rope_parameters={"rope_type": "default"}), "config has neither `rope_theta` nor"),
        (without("torch_dtype"), "config has neither `torch_dtype` nor `dtype`"),
        (without("vocab_size"), "config has no `vocab_size`"),
        (without(rms_norm_eps=None), "config has no `rms_norm_eps`"),
        (without(rms_norm_eps=float("inf")), "`rms_norm_eps` is Infinity; wanted a number above 0 that is finite"),
        (without(hidden_size=10**30), f"`hidden_size` is {10**30}; wanted an integer of at least 1, below 2^31"),
        (without(vocab_size="many"), '`vocab_size` is "many"; wanted an integer of at least 1'),
        (without(num_hidden_layers=True), "`num_hidden_layers` is true; wanted an integer"),
        (without(tie_word_embeddings=1), "`tie_word_embeddings` is 1; wanted true or false"),
        (without(rope_theta=-1), "`rope_theta` is -1; wanted a number above 0"),
        (without(eos_token_id="end"), '`eos_token_id` is "end"; wanted a token id'),
        (without(rope_parameters={"rope_theta": 5.0}), "`rope_theta` 1000000.0, `rope_parameters.rope_theta` 5.0"),
        (without(dtype="float16"), "`torch_dtype` bfloat16, `dtype` float16"),
        (without(torch_dtype="float8_e4m3fn"), "`torch_dtype` is float8_e4m3fn; supported: float32, float16, bfloat16"),
        (
            without(architectures=["GPT2LMHeadModel"]),
            "`architectures` is GPT2LMHeadModel; supported: Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM",
        ),
        (without(architectures=["LlamaForCausalLM"]), '`model_type` is "qwen3"; supported: "llama"'),
        (without("architectures", model_type="mistral"), "`architectures` is mistral; supported: Qwen3ForCausalLM"),
        (llama(attention_bias=True), "`attention_bias` is true; supported: false"),
        (llama(mlp_bias=True), "`mlp_bias` is true; supported: false"),
        (llama(rope_scaling=LLAMA3 | {"high_freq_factor": 1}), "`low_freq_factor` 1.0 is not below `high_freq_factor`"),
        (llama(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "config has no `low_freq_factor`"),
        (llama(rope_parameters=LLAMA3 | {"factor": 8.0}), "config disagrees with itself: `rope_scaling` Llama3"),
        (qwen2(use_sliding_window=True), "`use_sliding_window` is true; supported: false"),
        (without(architectures=["Qwen3MoeForCausalLM"]), "`architectures` is Qwen3MoeForCausalLM"),
        (without(model_type="qwen3_moe"), '`model_type` is "qwen3_moe"; supported: "qwen3"'),
        (without(hidden_act="gelu"), '`hidden_act` is "gelu"; supported: "silu"'),
        (without(attention_bias=True), "`attention_bias` is true; supported: false"),
        (without(use_sliding_window=True), "`use_sliding_window` is true; supported: false"),
        (without(quantization_config={"bits": 4}), '`quantization_config` is {"bits": 4}; supported: null'),
        (without(layer_types=["full_attention", "sliding_attention"]), "`layer_types` has sliding_attention"),
        (
            without(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            "`rope_scaling` asks for RoPE scaling of type yarn",
        ),
        (
            without(rope_scaling={"type": "linear", "factor": 2.0}),
            "`rope_scaling` asks for RoPE scaling of type linear",
        ),
        (
            new_spelling(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}),
            "`rope_parameters` asks for RoPE scaling",
        ),
        (without(rope_scaling={"partial_rotary_factor": 0.5}), "`rope_scaling.partial_rotary_factor` is 0.5"),
        (without(num_key_value_heads=3), "`num_attention_heads` 16 is not a multiple of `num_key_value_heads` 3"),
        (without(head_dim=33), "`head_dim` 33 is odd"),
    ],
)
def test_refusals_name_key_and_value(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert message in str(caught.value)


def test_harmless_values_are_read() -> None:
    scaling = {"rope_type": "default"}
    assert ModelConfig.from_dict(without("hidden_act", "use_sliding_window", rope_scaling=scaling)).head_dim == 128
    assert ModelConfig.from_dict(
        without(rope_parameters=None, dtype="bfloat16", layer_types=["full_attention"])
    ).head_dim
    assert ModelConfig.from_dict(without(torch_dtype="torch.float32")).dtype == "float32"


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(5, None, (5,)), (5, 7, (7,)), (5, [7, 5, 7], (7, 5)), ([1, 2], "absent", (1, 2)), (None, "absent", ())],
)
def test_end_of_text_ids(tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    """generation_config.json decides where it names any: a chat model ends on more tokens than its base."""
    (tmp_path / "config.json").write_text(json.dumps(without(eos_token_id=in_config)))
    if in_generation != "absent":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[1]", "holds list, wanted an object")])
def test_a_damaged_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"can't read `.*config.json`: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "`dtype` is int8; supported: auto, float32, float16, bfloat16, float64"),
        ({"block_size": 0}, "`block_size` is 0; it must be at least 1"),
        ({"num_blocks": 0}, "`num_blocks` is 0; it must be at least 1"),
        ({"num_blocks": 2**70}, "it must be a whole number of at most 63 bits"),
        ({"block_size": 2.5}, "`block_size` is 2.5; it must be a whole number"),
        ({"block_size": None}, "`block_size` is None; it must be a whole number"),
        ({"kv_cache_memory_bytes": 1e9}, "`kv_cache_memory_bytes` is 1000000000.0; it must be a whole number"),
        ({"seed": "a"}, "`seed` is 'a'; it must be a whole number"),
        ({"enable_prefix_caching": "no"}, "`enable_prefix_caching` is 'no'; it must be True or False"),
        ({"device": None}, "`device` is None; it must be a text"),
        ({"num_blocks": 4, "kv_cache_memory_bytes": 4}, "both set the size of the pool; give one"),
    ],
)
def test_engine_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("flags", "stored", "device", "expected"),
    [
        ({"avx2"}, "bfloat16", "cpu", "float32"),
        ({"avx512_bf16"}, "bfloat16", "cpu", "bfloat16"),
        ({"amx_bf16"}, "bfloat16", "cpu", "bfloat16"),
        ({"avx512_bf16"}, "float16", "cpu", "float32"),
        (set(), "float32", "cpu", "float32"),
        (set(), "bfloat16", "cuda:1", "bfloat16"),
    ],
)
def test_dtype_auto_asks_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], stored: str, device: str, expected: str
) -> None:
    monkeypatch.setattr(engine_settings, "cpu_features", lambda: frozenset(flags))
    assert default_dtype(stored, device) == expected
