"""PEP 517 backend: builds the data plane (csrc/) into the package, then lets maturin build the rest.

One wheel carries both planes: the Rust module `kvpager/_core.abi3.so` (maturin) and, beside it, the torch library
`kvpager/_C.abi3.so` (native_build.py), which pyproject.toml lists as an extra file of the wheel. Wheel and editable
builds go through here; a source distribution carries the sources of both. The wheel carries those of the library too,
for `kvpager build-cuda`.

Use it without build isolation, in an environment that has torch: `pip install --no-build-isolation .`
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import build_sdist, get_requires_for_build_sdist
from native_build import build_native

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
NATIVE_LIBRARY = ROOT / "python" / "kvpager" / "_C.abi3.so"
WHEEL_SOURCES = ROOT / "python" / "kvpager" / "_sources"

get_requires_for_build_wheel = maturin.get_requires_for_build_wheel
get_requires_for_build_editable = maturin.get_requires_for_build_editable
prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable

# maturin's hooks start the `maturin` program by name: let them find the one of this very interpreter.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    """Builds the native library, then the wheel that holds both planes and the library's sources."""
    print(build_native(ROOT, NATIVE_LIBRARY))
    stage_sources(ROOT, WHEEL_SOURCES)
    try:
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(WHEEL_SOURCES)


def stage_sources(root: Path, folder: Path) -> None:
    """Copies what the native library is compiled from to where maturin packs it: a tree like the checkout's."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("testing"))
    (folder / "build_backend").mkdir()
    shutil.copy2(root / "build_backend" / "native_build.py", folder / "build_backend")


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    """Builds both libraries in place, under python/kvpager."""
    print(build_native(ROOT, NATIVE_LIBRARY))
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
