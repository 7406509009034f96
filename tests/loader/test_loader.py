"""Every parameter is filled exactly once, from the right tensor; anything else is an error that names the tensor."""

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvpager import LLM
from kvpager.cache import PagedKVCache
from kvpager.config import CacheConfig, ModelConfig
from kvpager.errors import ConfigError
from kvpager.loader import BUNDLED_MODEL, load_parameters, open_model, resolve_model
from kvpager.models import DecoderForCausalLM
from kvpager.verify import forward_eager

Tensors = dict[str, torch.Tensor]


def new_model(folder: Path) -> DecoderForCausalLM:
    with torch.device("meta"):
        return DecoderForCausalLM(ModelConfig.from_folder(folder))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    model = new_model(folder)
    ignored = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    load_parameters(model, folder, dtype=dtype, device=torch.device("cpu"), ignored=ignored)
    return model


@pytest.fixture
def altered(lab: Any, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the untied checkpoint with other tensors, in one file or in two shards with an index."""

    def altered(change: Callable[[Tensors], object], *, shards: bool = False, **config: object) -> Path:
        source = lab.folder("14-2")
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        raw = json.loads((source / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if not shards:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        names = sorted(tensors)
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            shard = f"model-{number:05}-of-00002.safetensors"
            save_file({name: tensors[name] for name in part}, tmp_path / shard)
            weight_map |= dict.fromkeys(part, shard)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return altered


def unchanged(_tensors: Tensors) -> None:
    pass


def published_shape(hidden_size: int, num_attention_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        dtype="float32",
    )


@pytest.mark.parametrize(("hidden_size", "heads", "qkv_rows"), [(2560, 32, 6144), (5120, 64, 10240)])
def test_b112_explicit_head_dim_shapes_the_projections(hidden_size: int, heads: int, qkv_rows: int) -> None:
    config = published_shape(hidden_size, heads)
    with torch.device("meta"):
        attention = DecoderForCausalLM(config).model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (heads * 128, hidden_size)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, hidden_size)
    assert attention.o_proj.weight.shape == (hidden_size, heads * 128)
    assert sum(getattr(attention, name).weight.shape[0] for name in ("q_proj", "k_proj", "v_proj")) == qkv_rows
    cache = PagedKVCache.from_config(config, CacheConfig(block_size=1, num_blocks=1), dtype=torch.float16)
    assert cache.bytes_per_token == 2 * 8 * 128 * 2


def test_b112_a_derived_head_dim_is_refused_by_the_shapes(altered: Callable[..., Path]) -> None:
    """Where the config loses its `head_dim`, hidden / heads is taken, and the stored shapes say that it is wrong."""
    with pytest.raises(
        ConfigError, match=r"tensor `model.layers.0.self_attn.q_proj.weight` has shape \[112, 56\], .* \[56, 56\]"
    ):
        load(altered(unchanged, head_dim=None))


@pytest.mark.parametrize("shards", [False, True])
def test_b113_a_sound_checkpoint_fills_everything(altered: Callable[..., Path], shards: bool) -> None:
    folder = altered(unchanged, shards=shards)
    stored: Tensors = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    parameters = dict(load(folder).named_parameters())
    assert parameters.keys() == stored.keys()
    for name, parameter in parameters.items():
        assert not parameter.is_meta
        assert not parameter.requires_grad
        assert torch.equal(parameter, stored[name]), name  # equal is false for NaN


def rename(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"),
            "no tensor `model.layers.1.self_attn.q_norm.weight`",
        ),
        (rename, "checkpoint has no tensor `model.layers.1.mlp.gate_proj.weight`"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "model has no place for the tensor `model.extra`"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(55)}),
            "tensor `model.norm.weight` has shape [55], the config asks for [56]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(56, dtype=torch.int32)}),
            "tensor `model.norm.weight` is stored as I32",
        ),
    ],
    ids=["missing", "renamed", "unexpected", "shape", "dtype"],
)
def test_b113_faults_name_the_tensor(altered: Callable[..., Path], change: Any, message: str, shards: bool) -> None:
    folder = altered(change, shards=shards)
    model = new_model(folder)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_parameters(model, folder, dtype=torch.float32, device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters()), "nothing is filled on an error"


@pytest.mark.parametrize(
    ("name", "change", "changes", "message"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias", {}, "no tensor `model.layers.1.self_attn.k_proj.bias`"),
        (
            "qwen2",
            None,
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            "no place for the tensor `model.",
        ),
        ("llama", None, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, ".q_proj.bias` (and 5 more)"),
        ("llama", None, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ".q_norm.weight` (and 3 more)"),
        ("llama", "lm_head.weight", {}, "no tensor `lm_head.weight`"),
        (
            "llama",
            None,
            {"head_dim": None},
            "self_attn.q_proj.weight` has shape [96, 56], the config asks for [56, 56]",
        ),
    ],
)
def test_b113_the_switches_decide_what_is_wanted(
    lab: Any, tmp_path: Path, name: str, change: str | None, changes: dict[str, object], message: str
) -> None:
    raw = json.loads((lab.folder(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    tensors = load_file(lab.folder(name) / "model.safetensors")
    if change is not None:
        del tensors[change]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path)


def test_frequencies_that_older_checkpoints_hold_are_not_wanted(altered: Callable[..., Path]) -> None:
    assert load(altered(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})))


def test_b113_a_tensor_in_two_shards(altered: Callable[..., Path]) -> None:
    folder = altered(unchanged, shards=True)
    shards = sorted(folder.glob("*.safetensors"))
    doubled = next(iter(load_file(shards[0])))
    save_file(load_file(shards[1]) | {doubled: load_file(shards[0])[doubled]}, shards[1])
    with pytest.raises(
        ConfigError, match=f"tensor `{doubled}` is stored twice: in `{shards[0].name}` and `{shards[1].name}`"
    ):
        load(folder)


def test_b113_a_missing_shard(altered: Callable[..., Path]) -> None:
    folder = altered(unchanged, shards=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"shard `model-00002-of-00002.safetensors` of `.*weight` is named in .* missing"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"lm_head.weight": "model-00001-of-00002.safetensors"}, "tensor `lm_head.weight` lies in"),
        ({"ghost": "model-00001-of-00002.safetensors"}, "tensor `ghost` is missing"),
        ({"ghost": "../other.safetensors"}, "puts `ghost` into `../other.safetensors`"),
        ({"ghost": "model.bin"}, "puts `ghost` into `model.bin`"),
    ],
)
def test_b113_an_index_that_lies(altered: Callable[..., Path], entry: dict[str, str], message: str) -> None:
    folder = altered(unchanged, shards=True)
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    if "lm_head.weight" in entry:
        entry = {
            "lm_head.weight": next(
                shard for shard in sorted(set(weight_map.values())) if shard != weight_map["lm_head.weight"]
            )
        }
    path.write_text(json.dumps({"weight_map": weight_map | entry}))
    with pytest.raises(ConfigError, match=message):
        load(folder)


def last_logits(folder: Path) -> torch.Tensor:
    llm = LLM(folder, num_blocks=4)
    llm.block_manager.create_sequence(0)
    return forward_eager(llm.runner, [0], [[5, 9, 4, 17]])[0]


def transformers_logits(lab: Any, head: torch.Tensor) -> torch.Tensor:
    """An independent forward of the same decoder with this head."""
    model = lab.transformers_model("14-2", torch.float32)
    hidden = model.model(torch.tensor([[5, 9, 4, 17]])).last_hidden_state[0, -1]
    return (head @ hidden).detach()


@pytest.mark.parametrize("case", ["untied", "tied", "tied with a head in the file"])
def test_b114_tied_and_untied_heads(lab: Any, altered: Callable[..., Path], case: str) -> None:
    tensors = load_file(lab.folder("14-2") / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    assert not torch.equal(embedding, head)
    drop = case == "tied"
    folder = altered(lambda t: t.pop("lm_head.weight") if drop else None, tie_word_embeddings=case != "untied")
    expected = transformers_logits(lab, embedding if case == "tied" else head)
    assert float((last_logits(folder) - expected).abs().max()) <= 1e-4
    other = transformers_logits(lab, head if case == "tied" else embedding)
    assert float((last_logits(folder) - other).abs().max()) > 0.1


def test_f213_a_stored_head_beside_the_tied_flag_is_used_as_transformers_does(
    altered: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = altered(unchanged, tie_word_embeddings=True)
    files = open_model(folder)
    assert not files.config.tie_word_embeddings
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "kvpager"]
    assert "says `tie_word_embeddings` and stores a head that is not the embedding: the stored head is used" in warning
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(theirs.get_output_embeddings().weight, stored)
    llm = LLM(folder, num_blocks=4, dtype="float32")
    assert torch.equal(dict(llm.runner.model.named_parameters())["lm_head.weight"], stored)


def test_f213_a_stored_head_that_is_the_embedding_stays_tied(altered: Callable[..., Path]) -> None:
    def copy_embedding(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert open_model(altered(copy_embedding, tie_word_embeddings=True)).config.tie_word_embeddings


def test_b114_an_untied_model_needs_its_head(altered: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint has no tensor `lm_head.weight`"):
        LLM(altered(lambda tensors: tensors.pop("lm_head.weight")), num_blocks=4)


def test_dtype_as_asked(altered: Callable[..., Path]) -> None:
    folder = altered(lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    for dtype in (torch.float32, torch.bfloat16):
        assert {parameter.dtype for parameter in load(folder, dtype).parameters()} == {dtype}


def test_weights_lie_on_whole_cache_lines_of_one_allocation() -> None:
    parameters = list(load(BUNDLED_MODEL).parameters())
    assert all(parameter.data_ptr() % 64 == 0 and parameter.is_contiguous() for parameter in parameters)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1


def test_a_pickle_is_refused_by_name(altered: Callable[..., Path]) -> None:
    folder = altered(unchanged)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"weights as a pickle \(`pytorch_model.bin`\), which can run code and is never"
    ):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load(folder)


def test_a_damaged_file_is_named(altered: Callable[..., Path]) -> None:
    folder = altered(unchanged)
    (folder / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(ConfigError, match=r"model.safetensors` is no sound safetensors file"):
        load(folder)


def test_the_bundled_model_is_small_and_complete() -> None:
    assert resolve_model(None) == BUNDLED_MODEL
    assert sum(path.stat().st_size for path in BUNDLED_MODEL.iterdir()) <= 8 * 2**20
    assert {path.name for path in BUNDLED_MODEL.iterdir()} >= {"README.md", "LICENSE-PSF.txt", "chat_template.jinja"}


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a model folder: no config.json in it"):
        resolve_model(tmp_path)
    for name in ("./nowhere", "/nowhere/at all", "nowhere", "a/b/c"):
        with pytest.raises(ConfigError, match=f"no folder `{name}`, and a hub name has the form `owner/name`"):
            resolve_model(name)


def test_a_hub_name_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/unreachable":
            raise OSError("no route to the hub\nand a long explanation")
        return str(BUNDLED_MODEL)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve_model("owner/model") == BUNDLED_MODEL
    assert asked == [("owner/model", ["*.json", "*.jinja", "*.safetensors"])]
    with pytest.raises(ConfigError, match=r"the hub can't give it: OSError: no route to the hub$"):
        resolve_model("owner/unreachable")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"install huggingface_hub"):
        resolve_model("owner/model")
