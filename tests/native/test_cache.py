"""The cache of `kvpager build-cuda`: what names an entry, when it is loaded, and what is said when it can't be made."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpager import native
from kvpager.errors import ConfigError
from kvpager.native import cache as native_cache

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
from kvpager import native, ops
status = native.native_status()
print(json.dumps([str(status.path), status.loaded, status.reason]))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path))
    return tmp_path / "native"


def entry(cache, arch, torch_version=torch.__version__):
    path = cache / f"{native_cache.source_digest(ROOT)}-torch{torch_version}" / arch / "_C.abi3.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    return path


def status_of_a_new_process(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


def test_the_checkout_is_the_source():
    assert native_cache.source_root() == ROOT


def test_the_digest_follows_what_is_compiled(tmp_path):
    for folder in ("csrc/cuda", "csrc/testing", "build_backend"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "build_backend" / "native_build.py").write_text("")
    (tmp_path / "csrc" / "types.h").write_text("")
    first = native_cache.source_digest(tmp_path)
    (tmp_path / "csrc" / "testing" / "emulator.h").write_text("")
    (tmp_path / "csrc" / "README.md").write_text("")
    assert native_cache.source_digest(tmp_path) == first
    seen = {first}
    for name in ("csrc/cuda/a.cuh", "csrc/cuda/b.cu", "csrc/checks.h", "build_backend/native_build.py"):
        (tmp_path / name).write_text("#")
        seen.add(native_cache.source_digest(tmp_path))
    assert len(seen) == 5


def test_only_what_fits_is_found(cache):
    assert native_cache.compiled_library(torch.__version__, None) is None
    path = entry(cache, "sm_90")
    entry(cache, "sm_80", torch_version="0.0")
    assert native_cache.compiled_library(torch.__version__, "sm_90") == path
    assert native_cache.compiled_library(torch.__version__, None) == path
    assert native_cache.compiled_library(torch.__version__, "sm_80") is None
    assert native_cache.compiled_library("0.0", "sm_90") is None
    assert native_cache.compiled_library("0.1", None) is None


def test_a_compiled_library_is_preferred(cache):
    if not native.native_status().loaded:
        pytest.skip("no native library to stand for a compiled one")
    path = entry(cache, native.gpu_arch() or "sm_90")
    shutil.copyfile(native.native_status().path, path)
    (found, loaded, _), _ = status_of_a_new_process(KVPAGER_CACHE=str(cache.parent), KVPAGER_NATIVE="")
    assert (Path(found), loaded) == (path, True)
    (found, loaded, _), _ = status_of_a_new_process(KVPAGER_CACHE=str(cache.parent), KVPAGER_NATIVE="1")
    assert Path(found) == ROOT / "python" / "kvpager" / "_C.abi3.so"


def test_a_compiled_library_that_does_not_load_is_said(cache):
    path = entry(cache, native.gpu_arch() or "sm_90")
    (found, _, _), log = status_of_a_new_process(KVPAGER_CACHE=str(cache.parent), KVPAGER_NATIVE="")
    assert Path(found) == ROOT / "python" / "kvpager" / "_C.abi3.so"
    assert f"the packaged library is tried instead: `{path}` does not load" in log


@pytest.mark.parametrize("arch", ["sm_75", "90", "gfx90a", "sm_9.0"])
def test_an_unknown_architecture_is_refused(cache, arch):
    with pytest.raises(ConfigError, match=f"`arch`: wanted sm_80 or newer, as in sm_90, got {arch}"):
        native_cache.compile_library(torch.__version__, arch)


def test_a_failing_nvcc_is_shown(cache, tmp_path, monkeypatch):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "$@"\nexit 1\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(ConfigError, match="the CUDA kernels can't be compiled: could not compile") as caught:
        native_cache.compile_library(torch.__version__, "sm_90a")
    assert "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_90,code=compute_90" in str(caught.value)
    assert not list(cache.rglob("*.so"))


def test_without_sources_it_is_said(cache, monkeypatch):
    monkeypatch.setattr(native_cache, "source_root", lambda: None)
    assert native_cache.compiled_library(torch.__version__, None) is None
    with pytest.raises(ConfigError, match="no sources to compile beside"):
        native_cache.compile_library(torch.__version__, "sm_90")


def test_the_wheel_gets_a_tree_that_can_be_compiled(tmp_path, monkeypatch):
    pytest.importorskip("maturin")
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the backend extends it
    spec = importlib.util.spec_from_file_location("kvpager_build", ROOT / "build_backend" / "kvpager_build.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    backend.stage_sources(ROOT, tmp_path / "_sources")
    monkeypatch.setattr(native_cache, "_PACKAGE", tmp_path)
    assert native_cache.source_root() == tmp_path / "_sources"
    assert native_cache.source_digest(tmp_path / "_sources") == native_cache.source_digest(ROOT)
    assert not (tmp_path / "_sources" / "csrc" / "testing").exists()
