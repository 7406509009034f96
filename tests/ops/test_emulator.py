"""The emulator of csrc/testing/ itself: right kernels pass under every schedule, each planted fault is caught.

The kernels and their faults are in csrc/testing/faults.cpp. A fault counts as caught when some schedule gives a wrong
result or stops with the report named here.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "testing" / "faults.cpp"
SEEDS = range(5)
PLAIN = ("-O1",)
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WRONG = "wrong"
# How each fault shows; what the sanitizers see without the emulator's help is below.
FAULTS = {
    "missing_barrier": WRONG,
    "divergent_shuffle": "deadlock",
    "mixed_collectives": "lanes of one warp in different collectives",
    "divergent_barrier": "deadlock",
    "early_arrival": WRONG,
    "wrong_fragment_bf16": WRONG,
    "wrong_fragment_f16": WRONG,
    "not_transposed": WRONG,
    "bulk_without_wait": WRONG,
    "bulk_refilled_early": WRONG,
    "cp_async_without_wait": WRONG,
    "cp_async_refilled_early": WRONG,
    "misaligned_copy": "cp.async from an address that is not aligned to 16 bytes",
    "past_shared_memory": "a write past the end of shared memory",
}
SANITIZER_FAULTS = {"block_out_of_range": "heap-buffer-overflow", "past_shared_memory": "heap-buffer-overflow"}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """`build(flags)`: the program of the small kernels, compiled once for each set of flags."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = {}

    def compiled(flags):
        if flags not in built:
            built[flags] = tmp_path_factory.mktemp("faults") / "faults"
            warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
            command = (*compiler.split(), "-std=c++20", "-g", *warnings, *flags, str(SOURCE), "-o", str(built[flags]))
            subprocess.run(command, check=True)
        return built[flags]

    return compiled


def run(program, *arguments, seed):
    environment = {**os.environ, "KVPAGER_EMULATE_SEED": str(seed), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run((program, *arguments), env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


def test_every_case_is_listed(build):
    assert set(run(build(PLAIN), seed=0).split()) == {*FAULTS, *SANITIZER_FAULTS}


@pytest.mark.parametrize("flags", [PLAIN, SANITIZED], ids=["plain", "sanitized"])
@pytest.mark.parametrize("name", [*FAULTS, "block_out_of_range"])
def test_right_kernels_pass_under_every_schedule(build, name, flags):
    assert [run(build(flags), name, seed=seed) for seed in SEEDS] == ["right"] * len(SEEDS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(build, name):
    assert any(FAULTS[name] in run(build(PLAIN), name, "fault", seed=seed) for seed in SEEDS)


@pytest.mark.parametrize("name", SANITIZER_FAULTS)
def test_the_sanitizer_sees_what_leaves_a_buffer(build, name):
    report = run(build(SANITIZED), name, "fault", seed=1)
    assert SANITIZER_FAULTS[name] in report
    assert "faults.cpp:" in report


def test_a_deadlock_says_who_waits_where(build):
    report = run(build(PLAIN), "divergent_shuffle", "fault", seed=0)
    assert "warp 0 lanes 0000ffff: __shfl_down_sync of lanes ffffffff at faults.cpp:" in report
    assert "warp 0 lanes ffff0000: __syncthreads at faults.cpp:" in report


def test_a_machine_without_the_assembly_switch_agrees(build):
    program = build(("-O1", "-DKVPAGER_EMULATE_UCONTEXT"))
    for name in ("missing_barrier", "bulk_refilled_early"):
        assert run(program, name, seed=3) == "right"
        assert any(run(program, name, "fault", seed=seed) != "right" for seed in SEEDS)
