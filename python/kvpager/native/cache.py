"""Native libraries compiled on this machine by `kvpager build-cuda`: how they are made, where they lie, which one fits.

The wheel carries the sources of the data plane beside the library (`_sources/`); in a checkout they are the checkout's.
A compiled library lies in `<cache>/native/<digest of the sources>-torch<version>/<GPU architecture>/`, where <cache> is
`KVPAGER_CACHE`, else `kvpager` in `XDG_CACHE_HOME` or `~/.cache`: other sources, another torch or another GPU find
nothing there. `kvpager.native` prefers it to the packaged one.
"""

import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from kvpager.errors import ConfigError

LIBRARY = "_C.abi3.so"
_PACKAGE = Path(__file__).parents[1]
_BUILDER = Path("build_backend") / "native_build.py"


def source_root() -> Path | None:
    """The folder that holds csrc/ and its build script: of the wheel, or the checkout; None if there is neither."""
    for root in (_PACKAGE / "_sources", _PACKAGE.parents[1]):
        if (root / _BUILDER).exists() and (root / "csrc" / "types.h").exists():
            return root
    return None


def source_digest(root: Path) -> str:
    """Names what a library would be compiled from: 16 hex digits over sources, headers and the build script."""
    digest = hashlib.sha256((root / _BUILDER).read_bytes())
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and "testing" not in path.parts:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled libraries of all versions lie."""
    if asked := os.environ.get("KVPAGER_CACHE"):
        return Path(asked) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpager" / "native"


def compiled_library(torch_version: str, arch: str | None) -> Path | None:
    """The compiled library for these sources, this torch and this GPU.

    Args:
        torch_version: `torch.__version__`.
        arch: `sm_90`; None if there is no GPU: then the newest library will do, its CUDA kernels stay unused.

    Returns:
        None if none was compiled. O(1) without a cache, else the sources are read once.
    """
    try:
        root = source_root() if cache_folder().is_dir() else None
        if root is None:
            return None
        found = _folder(root, torch_version).glob(f"{arch or '*'}/{LIBRARY}")
        return max(found, key=lambda path: path.stat().st_mtime, default=None)
    except (OSError, RuntimeError):  # unreadable, or no home directory
        return None


def arch_generation(arch: str) -> int:
    """The number of a GPU architecture that the kernels can be compiled for: 90 for `sm_90` and `sm_90a`.

    Raises:
        ConfigError: no architecture's name, or an older one than `sm_80`.
    """
    number = re.fullmatch(r"sm_(\d+)a?", arch, re.ASCII)
    if number is None or int(number[1]) < 80:
        raise ConfigError(f"`arch`: wanted sm_80 or newer, as in sm_90, got {arch}")
    return int(number[1])


def compile_library(torch_version: str, arch: str, *, verbose: bool = False) -> Path:
    """Compile the whole native library for one GPU architecture into the cache; minutes.

    Args:
        torch_version: `torch.__version__`.
        arch: `sm_80` or newer; PTX for newer GPUs is added.
        verbose: show commands and what compilers say.

    Returns:
        The library.

    Raises:
        ConfigError: no such architecture, no sources, no nvcc, or a compiler refused.
    """
    generation = arch_generation(arch)
    root = source_root()
    if root is None:
        raise ConfigError(f"no sources to compile beside `{_PACKAGE}`; install a wheel or run from a checkout")
    folder = _folder(root, torch_version)
    report = _builder(root).build_native(
        root, folder / arch / LIBRARY, verbose=verbose, cache=folder / "objects", require_cuda=True,
        archs=(arch, f"compute_{generation}"),
    )  # fmt: skip
    if not report.built:
        raise ConfigError(f"the CUDA kernels can't be compiled: {report.reason}")
    return Path(report.out)


def _folder(root: Path, torch_version: str) -> Path:
    return cache_folder() / f"{source_digest(root)}-torch{torch_version}"


def _builder(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvpager_native_build", root / _BUILDER)
    if spec is None or spec.loader is None:
        raise ConfigError(f"`{root / _BUILDER}` is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
