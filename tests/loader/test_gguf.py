"""A GGUF file is the folder it was made from: config, tokenizer, weights. Damaged and foreign files are refused."""

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvpager import LLM, SamplingParams
from kvpager.config import ModelConfig, RopeFactors
from kvpager.errors import ArgumentError, ConfigError
from kvpager.loader import BUNDLED_MODEL, open_model, resolve_model
from kvpager.models import DecoderForCausalLM
from kvpager.models.rotary import inverse_frequencies
from kvpager.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{leaf}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{leaf}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As files of the llama architecture have q and k: the two halves of a head interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    fields: Callable[[Any], object] = lambda _writer: None,
    drop: str | None = None,
    shift: float = 0.0,
) -> Path:
    """The folder's checkpoint as a GGUF file; matrices whose rows allow it are quantised."""
    config = ModelConfig.from_folder(folder)
    architecture = json.loads((folder / "config.json").read_text())["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)
    fields(writer)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            is_query = "q_proj" in name
            tensor = permute(tensor, config.num_attention_heads if is_query else config.num_key_value_heads)
        values = (tensor.float() + shift).numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0 and kind != "F32":
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(name), values)
    if config.rope_scaling is not None:
        factors = inverse_frequencies(ModelConfig(**{**vars(config), "rope_scaling": None})) / inverse_frequencies(
            config
        )
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    files = open_model(model)
    with torch.device("meta"):
        module = DecoderForCausalLM(files.config)
    files.load(module, dtype=dtype, device=torch.device("cpu"))
    return dict(module.named_parameters())


@pytest.mark.parametrize("name", ["8-2", "14-2", "qwen2", "llama"])
def test_a_file_is_the_folder_it_was_made_from(lab: Any, tmp_path: Path, name: str) -> None:
    path = write_gguf(lab.folder(name), tmp_path / "model.gguf")
    ours, theirs = open_model(path).config, open_model(lab.folder(name)).config
    assert vars(ours) | {"rope_scaling": 0, "eos_token_ids": 0, "rms_norm_eps": 0} == vars(theirs) | {
        "rope_scaling": 0,
        "eos_token_ids": 0,
        "rms_norm_eps": 0,
    }
    assert abs(ours.rms_norm_eps - theirs.rms_norm_eps) < 1e-12  # stored as float32
    assert ours.eos_token_ids == (2, 1)
    assert torch.allclose(inverse_frequencies(ours), inverse_frequencies(theirs), rtol=1e-6)
    assert isinstance(ours.rope_scaling, RopeFactors) == (name == "llama")
    loaded, expected = load(path), load(lab.folder(name))
    assert loaded.keys() == expected.keys()
    for parameter, values in expected.items():
        assert torch.equal(loaded[parameter], values), parameter


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 0.01), ("Q4_1", 0.1)])
def test_quantised_weights_are_close(lab: Any, tmp_path: Path, kind: str, tolerance: float) -> None:
    path = write_gguf(lab.folder("16-8"), tmp_path / "model.gguf", kind)
    assert open_model(path).config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    expected = load(lab.folder("16-8"))
    differs = False
    for name, values in load(path).items():
        assert values.dtype == torch.float32
        difference = float((values - expected[name]).abs().max() / expected[name].abs().max())
        assert difference <= tolerance, name
        differs |= difference > 0
    assert differs
    assert load(path, torch.bfloat16)["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_values_come_from_the_file(lab: Any, tmp_path: Path, shift: float) -> None:
    loaded = load(write_gguf(lab.folder("16-8"), tmp_path / "model.gguf", shift=shift))
    expected = load(lab.folder("16-8"))
    for name, values in loaded.items():
        assert torch.equal(values, expected[name] + shift)


def with_tokenizer(writer: Any) -> None:
    """The bundled tokenizer's vocabulary and merges, as a converter writes them."""
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")


def test_the_tokenizer_of_a_file(lab: Any, tmp_path: Path) -> None:
    path = write_gguf(lab.folder("8-2"), tmp_path / "model.gguf", fields=with_tokenizer)
    fields = open_model(path).gguf_fields
    assert fields is not None
    ours, theirs = Tokenizer.from_gguf(fields), Tokenizer.from_folder(BUNDLED_MODEL)
    for text in (
        "The for statement",
        " two  blanks\n\ttabs",
        "naïve 世界 😀 12345 it's",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert [ours.token_bytes(token) for token in ids] == [theirs.token_bytes(token) for token in ids]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
    assert ours.decode([1, 2]) == ""
    assert ours.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def bytes_of(text: str) -> str:
    """A text in the byte-level alphabet."""
    from kvpager.tokenizer.tokenizer import _BYTE_OF

    character_of = {byte: character for character, byte in _BYTE_OF.items()}
    return "".join(character_of[byte] for byte in text.encode())


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "It'S 12345 x", ["It", "'S", " ", "123", "45", " x"]),
        ("qwen2", "a 123\n\n b", ["a", " ", "1", "2", "3", "\n\n", " b"]),
    ],
)
def test_how_each_family_cuts_texts(pre: str, text: str, pieces: list[str]) -> None:
    """With every piece of the text a token, and no merges across, the cut shows; the vocabulary has no longer ones."""
    vocabulary = sorted({bytes_of(c) for c in text} | {bytes_of(piece) for piece in pieces})
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": vocabulary}
    tokenizer = Tokenizer.from_gguf({**fields, "tokenizer.ggml.merges": []})
    cut = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == [bytes_of(piece) for piece in pieces]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_around_a_text() -> None:
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<b>", "<e>", "a"],
        "tokenizer.ggml.token_type": [3, 3, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert Tokenizer.from_gguf(fields).encode("a") == [0, 2]
    assert Tokenizer.from_gguf(fields).encode("a", add_special_tokens=False) == [2]
    assert Tokenizer.from_gguf({**fields, "tokenizer.ggml.add_bos_token": False}).encode("a") == [2]
    assert Tokenizer.from_gguf({**fields, "tokenizer.ggml.add_eos_token": True}).encode("a") == [0, 2, 1]
    for changes, message in (
        ({"tokenizer.ggml.model": "llama"}, r"`tokenizer.ggml.model` is llama; supported: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, r"`tokenizer.ggml.pre` is tekken; supported: gpt-2, smollm"),
        ({"tokenizer.ggml.merges": None}, r"supported: gpt2 \(byte-level BPE\) with tokens and merges"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tokenizer.from_gguf({**fields, **changes})


@pytest.mark.parametrize(
    ("fields", "drop", "message"),
    [
        (lambda w: w.add_expert_count(8), None, "`qwen3.expert_count` is 8; supported: 0"),
        (lambda w: w.add_sliding_window(64), None, "`qwen3.attention.sliding_window` is 64; supported: 0"),
        (lambda w: w.add_rope_dimension_count(4), None, "`qwen3.rope.dimension_count` is 4; supported: 32"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), None, "`qwen3.rope.scaling.type` is yarn"),
        (
            lambda w: w.add_tensor("extra.weight", np.zeros(4, np.float32)),
            None,
            "no place for the tensor `extra.weight`",
        ),
        (
            lambda _w: None,
            "model.layers.1.self_attn.q_norm.weight",
            "no tensor `model.layers.1.self_attn.q_norm.weight`",
        ),
        (lambda _w: None, "model.embed_tokens.weight", "no tensor `token_embd.weight`"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), None, "3 rotary factors; `head_dim` 32"),
    ],
)
def test_b113_other_models_are_refused(lab: Any, tmp_path: Path, fields: Any, drop: Any, message: str) -> None:
    path = write_gguf(lab.folder("16-8"), tmp_path / "model.gguf", fields=fields, drop=drop)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"`general.architecture` is gemma3; supported: llama, qwen2, qwen3"):
        open_model(tmp_path / "m.gguf")


def test_a_damaged_file_is_one_error_wherever_it_ends(lab: Any, tmp_path: Path) -> None:
    whole = write_gguf(lab.folder("8-2"), tmp_path / "whole.gguf", fields=with_tokenizer).read_bytes()
    damaged = tmp_path / "model.gguf"
    lengths = [0, 3, 4, 8, 23, *range(24, 400, 7), len(whole) // 2, len(whole) - 40_000, len(whole) - 1]
    for length in lengths:
        damaged.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"no sound GGUF file|is cut off|can't read|has no field|`general"):
            load(damaged)
    for place, value, message in (
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1, supported: 2, 3"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 2**63), "no sound GGUF file"),
        (16, struct.pack("<Q", 2**63), "no sound GGUF file"),
        (24, struct.pack("<Q", 2**63), "no sound GGUF file"),
    ):
        damaged.write_bytes(whole[:place] + value + whole[place + len(value) :])
        with pytest.raises(ConfigError, match=message):
            load(damaged)


def test_without_the_gguf_package(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed only where something is quantised."""
    plain = write_gguf(lab.folder("16-8"), tmp_path / "plain.gguf", "F16")
    quantised = write_gguf(lab.folder("16-8"), tmp_path / "quantised.gguf", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    assert load(plain)
    with pytest.raises(ConfigError, match=r"is quantised; to load it, install the gguf package"):
        load(quantised)


def test_where_a_file_is_found(lab: Any, tmp_path: Path) -> None:
    path = write_gguf(lab.folder("16-8"), tmp_path / "model.gguf")
    assert resolve_model(tmp_path) == resolve_model(path) == path
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no config.json in it, and 2 .gguf files"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path


def test_f213_a_stored_head_is_the_head(lab: Any, tmp_path: Path) -> None:
    """The file says nothing of tying but by the head that it stores or not."""
    path = write_gguf(lab.folder("14-2"), tmp_path / "model.gguf")
    stored = load_file(lab.folder("14-2") / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(load(path)["lm_head.weight"], stored["lm_head.weight"])


@pytest.mark.parametrize(("kind", "ends"), [(3, (2, 1, 5)), (4, (2, 1, 5)), (1, (2, 1))])
def test_f215_an_end_of_turn_is_known_by_its_text(lab: Any, tmp_path: Path, kind: int, ends: tuple[int, ...]) -> None:
    """Only where it is a token of its own kind: the same characters put together by merges end nothing."""

    def fields(writer: Any) -> None:
        texts = [f"t{number}" for number in range(199)]
        texts[5] = "<|im_end|>"
        writer.add_token_list(texts)
        writer.add_token_types([kind if number == 5 else 1 for number in range(199)])

    path = write_gguf(lab.folder("8-2"), tmp_path / "model.gguf", fields=fields)
    assert open_model(path).config.eos_token_ids == ends


def test_f216_a_file_whose_tokenizer_can_not_be_used(lab: Any, tmp_path: Path) -> None:
    def fields(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"t{number}" for number in range(199)])

    llm = LLM(write_gguf(lab.folder("8-2"), tmp_path / "model.gguf", fields=fields), num_blocks=8)
    assert len(llm.generate([3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    with pytest.raises(
        ArgumentError, match=r"token ids, as the model's tokenizer can't be used: .*is llama; supported"
    ):
        llm.generate("a text")
