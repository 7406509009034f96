"""Finds a model: the bundled one, a local folder, a GGUF file, a snapshot from the Hugging Face hub."""

from pathlib import Path

from kvpager.errors import ConfigError

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "tiny-qwen3"


def resolve_model(model: str | Path | None) -> Path:
    """The files of a model: a folder with ``config.json``, or a GGUF file.

    Args:
        model: None for the bundled one; a folder; a ``.gguf`` file, or a folder with one and no ``config.json``; or the
            name of a repository on the Hugging Face hub, which is fetched.

    Raises:
        ConfigError: no such file or folder and no way to fetch it, or the folder has neither.
    """
    if model is None:
        return BUNDLED_MODEL
    if not isinstance(model, str | Path):
        raise ConfigError(f"`model` is {model!r}; it must be a folder, a GGUF file or a hub name")
    folder = Path(model).expanduser()
    if not folder.exists():
        folder = _fetch(str(model))
    if folder.is_file() or (folder / "config.json").is_file():
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        also = f", and {len(found)} .gguf files" if found else " and no .gguf file"
        raise ConfigError(f"`{folder}` is not a model folder: no config.json in it{also}")
    return found[0]


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
