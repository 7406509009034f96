"""The function that builds csrc/: what it keeps, what it rebuilds, and what it says when something is missing."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = 'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 1; }}\n'


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("native_build_tested", ROOT / "build_backend" / "native_build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module.build_native


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of two tiny CPU sources and one .cu, and an environment without CUDA."""
    for name in ("cpu/layers", "cpu/moves", "cuda/moves"):
        (tmp_path / "csrc" / name).mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "layers" / "op.cpp").write_text('#include "../../checks.h"\n' + CPP.format(name="one"))
    (tmp_path / "csrc" / "cpu" / "moves" / "op.cpp").write_text(CPP.format(name="two"))
    (tmp_path / "csrc" / "cuda" / "moves" / "op.cu").write_text("not C++")
    (tmp_path / "csrc" / "checks.h").write_text("#pragma once\n")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    folders = [path for path in os.environ["PATH"].split(os.pathsep) if not (Path(path) / "nvcc").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    return tmp_path


def test_only_what_changed_is_built_again(build, tree):
    out = tree / "package" / "_C.abi3.so"
    report = build(tree, out)
    assert report.built, report.reason
    assert sorted(report.compiled) == ["csrc/cpu/layers/op.cpp", "csrc/cpu/moves/op.cpp"]
    before = out.stat().st_mtime_ns
    report = build(tree, out)
    assert (report.built, report.compiled, len(report.reused)) == (True, [], 2)
    assert out.stat().st_mtime_ns == before
    (tree / "csrc" / "cpu" / "moves" / "op.cpp").write_text(CPP.format(name="three"))
    report = build(tree, out)
    assert (report.compiled, report.reused) == (["csrc/cpu/moves/op.cpp"], ["csrc/cpu/layers/op.cpp"])
    assert b"three" in out.read_bytes()
    out.unlink()
    assert build(tree, out).compiled == []
    assert out.exists()
    objects = list((tree / "build" / "native").glob("*.o"))
    assert len(objects) == 2  # outdated ones are dropped


def test_a_header_is_compiled_again_where_it_is_included(build, tree):
    """Through other headers too, also those that `#if` leaves out today; what nobody includes costs nothing."""
    out, csrc = tree / "_C.abi3.so", tree / "csrc"
    (csrc / "cpu" / "moves" / "op.cpp").write_text(
        '#if 0\n#  include "../../deep/first.h"\n#endif\n' + CPP.format(name="two")
    )
    (csrc / "deep").mkdir()
    (csrc / "deep" / "first.h").write_text('#pragma once\n#include "second.h"\n#include "first.h"\n#include "gone.h"\n')
    for header in ("deep/second.h", "deep/nobodys.h"):
        (csrc / header).write_text("#pragma once\n")
    assert len(build(tree, out).compiled) == 2
    compiled = {}
    for header in ("checks.h", "deep/second.h", "deep/nobodys.h", "deep/gone.h"):
        (csrc / header).write_text("#pragma once\n// another\n")
        compiled[header] = build(tree, out).compiled
    assert compiled == {
        "checks.h": ["csrc/cpu/layers/op.cpp"],
        "deep/second.h": ["csrc/cpu/moves/op.cpp"],
        "deep/nobodys.h": [],
        "deep/gone.h": ["csrc/cpu/moves/op.cpp"],
    }


def test_what_is_missing_is_said(build, tree, monkeypatch):
    out = tree / "_C.abi3.so"
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    report = build(tree, out)
    assert not report.built
    assert str(report) == "native library not built: `CXX` names `no-such-compiler`, which is not there"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tree))
    assert "no C++ compiler" in build(tree, out).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "torch is not installed" in build(tree, out).reason
    assert not out.exists()


def test_a_source_that_does_not_compile_is_shown(build, tree):
    (tree / "csrc" / "cpu" / "moves" / "op.cpp").write_text("int broken(\n")
    report = build(tree, tree / "_C.abi3.so")
    assert not report.built
    assert "could not compile csrc/cpu/moves/op.cpp" in report.reason
    assert "broken" in report.reason


def fake_nvcc(tree, script):
    """A toolkit whose nvcc is a shell script."""
    nvcc = tree / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc.parents[1]


def test_a_failing_nvcc_leaves_the_cpu_library(build, tree, monkeypatch):
    monkeypatch.setenv(
        "CUDA_HOME", str(fake_nvcc(tree, '[ "$1" = --version ] && echo 1 || { echo no GPU for you; exit 1; }'))
    )
    report = build(tree, tree / "_C.abi3.so")
    assert report.built
    assert report.cuda == ()
    assert "could not compile csrc/cuda/moves/op.cu" in report.cuda_reason
    assert "no GPU for you" in report.cuda_reason


def test_without_nvcc_the_report_says_where_it_looked(build, tree):
    report = build(tree, tree / "_C.abi3.so")
    if report.cuda_reason != "no nvcc in CUDA_HOME, CUDA_PATH, PATH or the nvidia pip packages":
        pytest.skip("this environment has the nvcc of the pip packages")
    assert "no CUDA kernels: no nvcc in CUDA_HOME" in str(report)


def test_a_source_for_types_of_caches_is_compiled_once_for_each(build, tree):
    module = sys.modules["native_build_tested"]
    (tree / "csrc" / "types.h").write_text(
        "#define KVPAGER_FOR_CODES(X, ...) \\\n"
        '  X(one_code, Char, "int8", __VA_ARGS__) \\\n  X(two_code, Byte, "b", __VA_ARGS__)\n'
        '\n#define OTHER(X) \\\n  X(three, Char, "int8")\n'
    )
    (tree / "csrc" / "cuda" / "moves" / "op.cu").unlink()
    source = 'extern "C" __attribute__((visibility("default"))) int f_##C() { return 1; }'
    (tree / "csrc" / "cuda" / "moves" / "kernel.cache.cu").write_text(
        f"#define DEFINE(C) {source}\n#define EACH(C) DEFINE(C)\nEACH(KVPAGER_CACHE)\n"
    )
    report = module.build_emulated(tree, tree / "emulated.so")
    assert report.built, report.reason
    name = "csrc/cuda/moves/kernel.cache.cu for"
    assert sorted(report.compiled) == [f"{name} one_code", f"{name} query_type", f"{name} two_code"]
    assert all(
        symbol in (tree / "emulated.so").read_bytes() for symbol in (b"f_query_type", b"f_one_code", b"f_two_code")
    )
