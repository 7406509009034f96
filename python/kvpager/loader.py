"""Finds a model's folder and fills a module's parameters from its safetensors files.

Invariant: after `load_parameters` every parameter was filled exactly once, from a tensor of the same name and shape;
anything else is a `ConfigError` that names the tensor, raised before the first one is read. The module comes on the
meta device, so a parameter that nobody fills has no values that could pass for weights. Pickles are never opened.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from kvpager.config import read_json
from kvpager.errors import ConfigError

BUNDLED_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = ("F32", "F16", "BF16", "F64")


def resolve_model(model: str | Path | None) -> Path:
    """The folder of a model: the bundled one for None, a local folder, or a snapshot fetched from the Hugging Face hub.

    Raises:
        ConfigError: no such folder and no way to fetch it, or the folder has no ``config.json``.
    """
    if model is None:
        return BUNDLED_MODEL
    folder = Path(model).expanduser()
    if not folder.exists():
        folder = _fetch(str(model))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`{folder}` is not a model folder: no config.json in it")
    return folder


def _fetch(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(f"no folder `{name}`, and a hub name has the form `owner/name`")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"no folder `{name}`; to fetch it from the hub, install huggingface_hub (`pip install kvpager[hub]`)"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # network, permission, no such repository: the hub's errors share no base class
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"no folder `{name}`, and the hub can't give it: {type(error).__name__}: {reason}") from error


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
    wanted = dict(module.named_parameters())
    with ExitStack() as stack:
        files = {path: _open(stack, path) for path in _weight_files(folder)}
        homes = _homes(files)
        _check_index(folder, homes)
        _check_tensors({name: tuple(parameter.shape) for name, parameter in wanted.items()}, homes, files, ignored)
        for name in wanted:
            _replace(module, name, files[homes[name]].get_tensor(name).to(device=device, dtype=dtype))


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


def _check_tensors(
    wanted: Mapping[str, tuple[int, ...]],
    homes: Mapping[str, Path],
    files: Mapping[Path, Any],
    ignored: Collection[str],
) -> None:
    if missing := [name for name in wanted if name not in homes]:
        raise ConfigError(f"checkpoint has no tensor `{missing[0]}`{_and_more(missing)}")
    if unexpected := sorted(homes.keys() - wanted.keys() - set(ignored)):
        raise ConfigError(f"model has no place for the tensor `{unexpected[0]}`{_and_more(unexpected)}")
    for name, shape in wanted.items():
        stored = files[homes[name]].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"tensor `{name}` has shape {stored.get_shape()}, the config asks for {list(shape)}")
        if stored.get_dtype() not in _FLOATS:
            raise ConfigError(f"tensor `{name}` is stored as {stored.get_dtype()}; supported: {', '.join(_FLOATS)}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _replace(module: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
