"""The checks before anything is timed: build, tests on the device, compute-sanitizer, the decode script.

Each is a command of its own; its output is shown when it fails.
"""

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What compute-sanitizer runs: every kernel on small shapes; it slows them a hundredfold.
SMALL_SUITE = ("tests/ops/test_cuda.py", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """A command. `skip` says why it is not run; `environment` is added to that of this process."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    skip: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step: "passed", "failed" or "skipped: why"."""

    name: str
    outcome: str
    seconds: float


def all_steps(python: str = sys.executable, sanitizer: str | None = None) -> list[Step]:
    """In order. `sanitizer` is compute-sanitizer's path, None where there is none."""
    script = (python, "examples/qwen3_decode.py", "--device", "cuda", "--check")
    missing = "" if sanitizer else "no compute-sanitizer in PATH"
    steps = [
        Step("build", (python, "build_backend/native_build.py", "--require-cuda"), {}),
        Step("budgets", (python, "tools/check_cuda.py"), {}),
        Step("tests on the device", (python, "-m", "pytest", "-q", "tests/ops"), {}),
    ]
    for tool in ("memcheck", "racecheck"):
        command = (
            sanitizer or "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            "--target-processes",
            "all",
        )
        # Each tensor an allocation of its own, or a step out of one lands in the next unseen.
        steps.append(
            Step(
                tool, (*command, python, "-m", "pytest", *SMALL_SUITE), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, missing
            )
        )
    steps.append(Step("decode script, eager", (*script, "--enforce-eager"), {}))
    steps.append(Step("decode script, captured graphs", script, {}))
    return steps


def find_sanitizer() -> str | None:
    """compute-sanitizer, in PATH or where the toolkit puts it."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def run(step: Step, environment: dict[str, str]) -> Outcome:
    """Run a step in the repository's root; shows what it said if it fails."""
    if step.skip:
        return Outcome(step.name, f"skipped: {step.skip}", 0.0)
    started = time.monotonic()
    try:
        done = subprocess.run(
            step.command, cwd=ROOT, env={**environment, **step.environment}, capture_output=True, text=True, check=False
        )
        said, passed = done.stdout + done.stderr, done.returncode == 0
    except OSError as error:
        said, passed = str(error), False
    if not passed:
        print(f"--- {step.name} failed: {' '.join(step.command)}\n{said[-6000:]}\n---", flush=True)
    return Outcome(step.name, "passed" if passed else "failed", time.monotonic() - started)
