"""Models in GGUF files: config from the fields, weights dequantised, names and row order as transformers has them.

In the `llama` architecture the rows of q and k are stored permuted, so that the pairs which rotary positions turn lie
side by side; here pair j is (j, j + D/2), so they are put back. Quantised weights need the `gguf` package
(``pip install kvpager[gguf]``); float32, float16 and bfloat16 do not.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvpager.config import ModelConfig, RopeFactors
from kvpager.errors import ConfigError
from kvpager.loader.fill import StoredTensor, fill_parameters
from kvpager.loader.gguf_file import GGUFFile
from kvpager.models import ARCHITECTURES, Architecture

_F32, _F16, _BF16 = 0, 1, 30
_PLAIN = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
# Tokens that end a turn, known by their texts: many files name one end-of-text token, and it is not the chat's.
END_OF_TURN_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<end_of_utterance>", "<|eot|>", "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
_ADDED_TYPES = (3, 4)  # of `tokenizer.ggml.token_type`: control and user-defined, which no merge makes
_ROPE_FACTORS = "rope_freqs.weight"
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_from_gguf(file: GGUFFile) -> tuple[Architecture, ModelConfig]:
    """The architecture that a file names, and the config that its fields describe.

    `dtype` is that of the embedding where it is stored unquantised, else float32.

    Raises:
        ConfigError: another architecture, a feature that kvpager does not compute, or a field missing.
    """
    fields = file.fields
    architecture = fields.get("general.architecture")
    known = {each.gguf: name for name, each in ARCHITECTURES.items() if each.gguf is not None}
    if architecture not in known:
        raise ConfigError(f"`general.architecture` is {architecture}; supported: {', '.join(sorted(known))}")

    def field(name: str) -> Any:
        if fields.get(f"{architecture}.{name}") is None:
            raise ConfigError(f"`{file.path}` has no field `{architecture}.{name}`")
        return fields[f"{architecture}.{name}"]

    if "token_embd.weight" not in file.tensors:
        raise ConfigError("checkpoint has no tensor `token_embd.weight`")
    embedding = file.tensors["token_embd.weight"]
    num_heads, hidden_size = field("attention.head_count"), field("embedding_length")
    head_dim = fields.get(f"{architecture}.attention.key_length")
    raw = {
        "architectures": [known[architecture]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": str(_PLAIN.get(embedding.type_id, torch.float32)).removeprefix("torch."),
        "eos_token_id": _end_token_ids(fields),
    }
    found = ARCHITECTURES[known[architecture]]
    config = found.read_config(raw)
    _refuse_other_features(file, architecture, config.head_dim)
    if _ROPE_FACTORS not in file.tensors:
        return found, config
    factors = RopeFactors(tuple(_read(file, _ROPE_FACTORS).tolist()))
    return found, replace(config, rope_scaling=factors)


def _end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """The tokens that the file calls ends, and those that are ends of a turn by their texts."""
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    texts, types = fields.get("tokenizer.ggml.tokens") or [], fields.get("tokenizer.ggml.token_type") or []
    known = frozenset(END_OF_TURN_TEXTS)
    by_text = [
        token
        for token, (text, kind) in enumerate(zip(texts, types, strict=False))
        if kind in _ADDED_TYPES and text in known
    ]
    return [token for token in dict.fromkeys((*named, *by_text)) if token is not None]


def _refuse_other_features(file: GGUFFile, architecture: str, head_dim: int) -> None:
    only = {
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": 0,
        "expert_count": 0,
    }
    for name, supported in only.items():
        value = file.fields.get(f"{architecture}.{name}", supported)
        if value != supported:
            raise ConfigError(f"`{architecture}.{name}` is {value}; supported: {supported}")


def load_gguf_parameters(
    module: nn.Module, file: GGUFFile, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Fills every parameter of a module made on the meta device; as `load_parameters` does.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape; the file is cut off; the `gguf` package is
            needed and not installed, or does not know how a tensor is quantised.
    """
    is_permuted = file.fields["general.architecture"] == "llama"
    stored = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        ours = _our_name(name)
        read = partial(_read, file, name)
        if is_permuted and ".self_attn.q_proj." in ours:
            read = partial(_read_permuted, file, name, config.num_attention_heads)
        elif is_permuted and ".self_attn.k_proj." in ours:
            read = partial(_read_permuted, file, name, config.num_key_value_heads)
        stored[ours] = StoredTensor(tensor.shape, f"ggml type {tensor.type_id}", True, read)
    fill_parameters(module, stored, dtype=dtype, device=device, ignored=_ignored(config), supported="")


def _ignored(config: ModelConfig) -> Collection[str]:
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def _our_name(name: str) -> str:
    """transformers' name of a tensor; its own where it has none, so that it is refused by it."""
    stem, _, leaf = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{leaf}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None or block[2] not in _IN_A_BLOCK:
        return name
    return f"model.layers.{block[1]}.{_IN_A_BLOCK[block[2]]}.{leaf}"


def _read_permuted(file: GGUFFile, name: str, num_heads: int) -> Tensor:
    values = _read(file, name)
    in_pairs = values.unflatten(0, (num_heads, values.shape[0] // num_heads // 2, 2))  # type: ignore[no-untyped-call]
    back: Tensor = in_pairs.transpose(1, 2).flatten(0, 2)
    return back


def _read(file: GGUFFile, name: str) -> Tensor:
    """A tensor's values, dequantised to float32 where they are quantised."""
    tensor = file.tensors[name]
    if tensor.type_id in _PLAIN:
        dtype = _PLAIN[tensor.type_id]
        raw = file.raw(name, int(np.prod(tensor.shape)) * dtype.itemsize)
        return torch.from_numpy(raw.copy()).view(dtype).view(tensor.shape)
    quants, kind = _quantisation(name, tensor.type_id)
    per_block, bytes_per_block = quants.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % per_block:
        raise ConfigError(
            f"tensor `{name}` has rows of {tensor.shape[-1]} values, {kind.name} has blocks of {per_block}"
        )
    row_bytes = tensor.shape[-1] // per_block * bytes_per_block
    rows = int(np.prod(tensor.shape[:-1]))
    raw = file.raw(name, rows * row_bytes).reshape(rows, row_bytes)
    try:
        values = quants.dequantize(raw, kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"tensor `{name}` is stored as {kind.name}, which the gguf package can't dequantise"
        ) from error
    return torch.from_numpy(values).view(tensor.shape)


def _quantisation(name: str, type_id: int) -> tuple[Any, Any]:
    """The module that dequantises, and its name for the type."""
    try:
        quants: Any = import_module("gguf.quants")
        types: Any = import_module("gguf.constants").GGMLQuantizationType
    except ImportError as error:
        raise ConfigError(
            f"tensor `{name}` is quantised; to load it, install the gguf package (`pip install kvpager[gguf]`)"
        ) from error
    try:
        return quants, types(type_id)
    except ValueError as error:
        raise ConfigError(
            f"tensor `{name}` is stored as ggml type {type_id}, which the gguf package does not know"
        ) from error
