"""How csrc/ is laid out: which files see tensors, where an op stands, and that a type of codes can't be half there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
REGISTERED = re.compile(r'library\.impl\("(\w+)"')


@pytest.fixture(scope="module")
def build_module():
    path = CSRC.parent / "build_backend" / "native_build.py"
    spec = importlib.util.spec_from_file_location("native_build_of_layout", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def sources(device):
    return [path for path in sorted((CSRC / device).rglob("*")) if path.suffix in (".cpp", ".cu", ".h", ".cuh")]


def reaches_torch(build_module, path):
    files = build_module._with_includes(path)
    return any("#include <torch/" in file.read_text() for file in files)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_op_stands_in_the_file_of_its_name_and_no_other_file_knows_torch(build_module, device):
    ops = set()
    for path in sources(device):
        registered = REGISTERED.findall(path.read_text())
        assert registered in ([], [path.stem]), path
        ops.update(registered)
        knows_torch = reaches_torch(build_module, path)
        assert knows_torch == (bool(registered) or path.name == "scope.h"), path
    only_cpu = {"linear", "rank_tokens", "rms_norm", "silu_mul"}
    both = {
        "copy_blocks", "gather_kv", "merge_attention", "paged_attention", "paged_prefill", "qk_norm_rope_write",
        "swap_blocks", "take_errors", "update_tables", "write_kv",
    }  # fmt: skip
    assert ops == (both | only_cpu if device == "cpu" else both)


def test_kernels_of_several_instruction_sets_share_no_header_of_the_standard_library_with_inline_code(build_module):
    """The linker would merge what two sets share by name (csrc/cpu/runtime/isa.h)."""
    allowed = {"cfloat", "cmath", "cstdint", "cstring", "immintrin.h", "type_traits"}
    for path in (CSRC / "cpu").rglob("*.isa.cpp"):
        for file in build_module._with_includes(path):
            assert set(re.findall(r"#include <([^>]+)>", file.read_text())) <= allowed, (path, file)


# --- a type of codes


@pytest.fixture(scope="module")
def compiles(tmp_path_factory):
    """`compiles(source, types)`: whether a source does, beside a copy of csrc/ whose types.h was changed by `types`."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    tree = tmp_path_factory.mktemp("types")
    shutil.copytree(CSRC, tree / "csrc")

    def compiles(source, types=lambda text: text):
        (tree / "csrc" / "types.h").write_text(types((CSRC / "types.h").read_text()))
        (tree / "source.cpp").write_text(source)
        command = (*compiler.split(), "-std=c++20", "-fsyntax-only", "-DKVPAGER_EMULATE", str(tree / "source.cpp"))
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    return compiles


USES = {
    "largest number": "constexpr float largest = kvpager::CodeTraits<TYPE>::kLargest;",
    "widen": "float wide(TYPE code) { return kvpager::widen(code); }",
    "narrow": "TYPE code(float number) { return kvpager::narrow<TYPE>(number); }",
    "to float16 on CUDA": """
        #include "csrc/cuda/device/codes.cuh"
        void use(uint32_t four, uint32_t& a, uint32_t& b) { kvpager::cuda::f16_of_codes<TYPE>(four, a, b); }
    """,
}


@pytest.mark.parametrize("use", USES)
def test_f233_a_type_of_codes_without_a_rule_does_not_compile(compiles, use):
    source = '#include "csrc/types.h"\nstruct third { uint8_t bits; };\n'
    assert compiles(source + USES[use].replace("TYPE", "kvpager::fp8_e4m3"))
    assert not compiles(source + USES[use].replace("TYPE", "third"))


def with_third(traits, narrow):
    """Changes types.h: a third type in the list, with these traits and this rule of rounding."""

    def change(text):
        text = text.replace(
            "#define KVPAGER_FOR_CODES(X, ...)",
            '#define KVPAGER_FOR_CODES(X, ...) X(third, Byte, "uint8", __VA_ARGS__)',
        )
        text = text.replace("struct fp8_e4m3 {", "struct third { uint8_t bits; };\nstruct fp8_e4m3 {")
        text = text.replace("// The type of all arithmetic over T", f"{traits}\n// The type of all arithmetic over T")
        text = text.replace(
            "KVPAGER_HD constexpr float widen(int8_code",
            "KVPAGER_HD constexpr float widen(third number) { return number.bits; }\n"
            "KVPAGER_HD constexpr float widen(int8_code",
        )
        return text.replace(
            "} else {\n    static_assert(std::is_same_v<T, accumulate_t<T>>",
            f"{narrow}}} else {{\n    static_assert(std::is_same_v<T, accumulate_t<T>>",
        )

    return change


TRAITS = "template <> struct CodeTraits<third> { static constexpr float kLargest = 99; };"
SYMMETRIC = "} else if constexpr (std::is_same_v<T, third>) { return third{uint8_t(number > 0 ? 99 : 0)};"


def test_f233_the_list_takes_no_type_whose_rules_are_missing_or_do_not_agree(compiles):
    source = '#include "csrc/types.h"\n'
    assert compiles(source)
    assert not compiles(source, with_third("", ""))
    assert not compiles(source, with_third(TRAITS, ""))  # no rule of rounding
    assert not compiles(source, with_third(TRAITS, SYMMETRIC))  # which does not reach the largest negative number
