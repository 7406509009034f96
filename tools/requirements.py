"""Prints what the development environment needs, one requirement a line, from pyproject.toml (its only source)."""

import tomllib
from pathlib import Path


def main() -> None:
    """Prints the requirements to build, run and test kvpager."""
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    project = pyproject["project"]
    wanted = pyproject["build-system"]["requires"] + project["dependencies"] + project["optional-dependencies"]["dev"]
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main()
