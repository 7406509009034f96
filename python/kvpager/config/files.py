"""JSON files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpager.errors import ConfigError


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
