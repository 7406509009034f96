"""Weights in safetensors files, one or several with an index. Pickles are never opened."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from kvpager.config import read_json
from kvpager.errors import ConfigError
from kvpager.loader.fill import StoredTensor, fill_parameters

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DERIVED = ".rotary_emb.inv_freq"  # older Llama checkpoints hold what follows from their config
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS_COMPARED = 4096  # at a time
_FLOATS = ("F32", "F16", "BF16", "F64")


def load_parameters(
    module: nn.Module, folder: Path, *, dtype: torch.dtype, device: torch.device, ignored: Collection[str] = ()
) -> None:
    """Fills every parameter of a module made on the meta device.

    Args:
        module: its parameters have the checkpoint's names; they are replaced by ones that take no gradient.
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and the shards it names.
        dtype: what the parameters become, whatever is stored.
        device: where they go.
        ignored: names that a checkpoint may hold without need (the head of a tied model).

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape, not floating point, or in two shards; a file is
            missing or damaged; the weights come as a pickle only.
    """
    with ExitStack() as stack:
        files = {path: _open(stack, path) for path in _weight_files(folder)}
        homes = _homes(files)
        _check_index(folder, homes)
        stored = {name: _stored(files[path], name) for name, path in homes.items() if not name.endswith(_DERIVED)}
        fill_parameters(module, stored, dtype=dtype, device=device, ignored=ignored, supported=", ".join(_FLOATS))


def stored_head_differs(folder: Path) -> bool:
    """Whether the files store a head beside the embedding, and not the same values. Reads both where they do.

    False where they can't be read: `load_parameters` says what is wrong.
    """
    try:
        with ExitStack() as stack:
            files = {path: _open(stack, path) for path in _weight_files(folder)}
            homes = _homes(files)
            if not {_HEAD, _EMBEDDING} <= homes.keys():
                return False
            parts = [files[homes[name]].get_slice(name) for name in (_HEAD, _EMBEDDING)]
            if parts[0].get_shape() != parts[1].get_shape():
                return True
            starts = range(0, parts[0].get_shape()[0], _ROWS_COMPARED)
            pieces = ([part[start : start + _ROWS_COMPARED].float() for part in parts] for start in starts)
            return not all(torch.equal(head, embedding) for head, embedding in pieces)
    except ConfigError:
        return False


def _stored(file: Any, name: str) -> StoredTensor:
    part = file.get_slice(name)
    kind = part.get_dtype()
    return StoredTensor(tuple(part.get_shape()), kind, kind in _FLOATS, partial(file.get_tensor, name))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        weight_map = _weight_map(folder)
        shards = {folder / shard: tensor for tensor, shard in sorted(weight_map.items(), reverse=True)}
        for path, tensor in sorted(shards.items()):
            if not path.is_file():
                raise ConfigError(f"shard `{path.name}` of `{tensor}` is named in {_INDEX} but missing in `{folder}`")
        return sorted(shards)
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ConfigError(
            f"`{folder}` has its weights as a pickle (`{pickles[0]}`), which can run code and is never loaded; "
            f"convert it to {_SINGLE}"
        )
    raise ConfigError(f"`{folder}` has neither {_SINGLE} nor {_INDEX}")


def _weight_map(folder: Path) -> Mapping[str, str]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError(f"`{folder / _INDEX}` has no `weight_map` from tensor to file name")
    for tensor, shard in weight_map.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{_INDEX} puts `{tensor}` into `{shard}`; wanted a .safetensors file of the same folder")
    return weight_map


def _open(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"`{path}` is no sound safetensors file: {error}") from error


def _homes(files: Mapping[Path, Any]) -> dict[str, Path]:
    """Tensor name → the one file that holds it."""
    homes: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            if name in homes:
                raise ConfigError(f"tensor `{name}` is stored twice: in `{homes[name].name}` and `{path.name}`")
            homes[name] = path
    return homes


def _check_index(folder: Path, homes: Mapping[str, Path]) -> None:
    if (folder / _SINGLE).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in homes:
            raise ConfigError(f"tensor `{name}` is missing: {_INDEX} puts it into `{shard}`, which does not hold it")
        if homes[name].name != shard:
            raise ConfigError(f"tensor `{name}` lies in `{homes[name].name}`, but {_INDEX} says `{shard}`")
