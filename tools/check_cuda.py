"""Compiles the CUDA kernels without a GPU and holds them to the budgets that stand in their sources.

For sm_80, sm_90 and as PTX for what is newer. Every kernel must stay within its budget (registers, shared memory,
spills) and, where the budget asks for it, load 16 bytes at a time and use tensor cores in its main loop; the budgets'
grammar is in cuda_static.py. Exit status 1 and a line for each kernel that does not.

An nvcc is looked for in CUDA_HOME, CUDA_PATH, PATH and the installed pip packages. If there is none, the pip packages
of the minor version of the CUDA run time that the installed torch pins are put into build/nvcc-venv (about 100 MB).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "tools")]

from cuda_static import (  # noqa: E402
    Report,
    as_table,
    budget_of,
    complaints,
    parse_budgets,
    parse_ptxas,
    parse_sass,
    short_name,
)
from native_build import BuildError, CudaObject, compile_cuda, find_cuda  # noqa: E402

NVCC_VENV = ROOT / "build" / "nvcc-venv"
SASS_ARCHS = ("sm_80", "sm_90")
# Of one minor version; cccl counts its own.
NVCC_PACKAGES = (
    "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-nvdisasm",
    "nvidia-cuda-cuobjdump",
)  # fmt: skip
DEFAULT_CUDA = "13.2"  # what a torch that pins none (a CPU build) gets


def pinned_cuda(requirements: list[str]) -> str:
    """`13.2` from torch's requirement `cuda-toolkit[…]==13.2.2` or `nvidia-cuda-runtime-cu12==12.8.90`."""
    for requirement in requirements:
        if found := re.match(r"(?:cuda-toolkit|nvidia-cuda-runtime)[\w\[\], -]*\s*\(?==(\d+\.\d+)", requirement):
            return found[1]
    return DEFAULT_CUDA


def installed_nvcc(venv_folder: Path) -> Path | None:
    """The toolkit that pip put into an environment of its own."""
    return next(iter(sorted(venv_folder.glob("lib/python*/site-packages/nvidia/cu*/bin/nvcc"))), None)


def toolkit(version: str) -> Path:
    """An nvcc's home, installed first if there is none."""
    try:
        return find_cuda()
    except BuildError:
        pass
    if installed_nvcc(NVCC_VENV) is None:
        print(f"no nvcc here: installing the pip packages of CUDA {version} into {NVCC_VENV}", flush=True)
        venv.create(NVCC_VENV, with_pip=True)
        packages = [*(f"{name}=={version}.*" for name in NVCC_PACKAGES), "nvidia-cuda-cccl"]
        subprocess.run((NVCC_VENV / "bin" / "python", "-m", "pip", "install", "--quiet", *packages), check=True)
    nvcc = installed_nvcc(NVCC_VENV)
    if nvcc is None:
        raise BuildError(f"the pip packages of CUDA {version} brought no nvcc")
    return nvcc.parents[1]


def tool_of(home: Path, name: str) -> str:
    """Beside nvcc, or in PATH."""
    beside = home / "bin" / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BuildError(f"no {name} beside nvcc or in PATH (pip: nvidia-cuda-{name})")
    return found


def short_names(mangled: set[str]) -> dict[str, str]:
    """By the demangler that comes with every C++ compiler."""
    ordered = sorted(mangled)
    done = subprocess.run(("c++filt",), input="\n".join(ordered), capture_output=True, text=True, check=True)
    return {name: short_name(line) for name, line in zip(ordered, done.stdout.splitlines(), strict=True)}


def reports_of(objects: list[CudaObject], home: Path) -> list[Report]:
    """Every kernel on every architecture that has machine code, sorted."""
    sources = sorted(path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in (".cu", ".cuh", ".h"))
    budgets = [budget for source in sources for budget in parse_budgets(source.read_text())]
    environment = {**os.environ, "PATH": os.pathsep.join((str(home / "bin"), os.environ["PATH"]))}  # finds nvdisasm
    reports = []
    for built in objects:
        loops = {}
        for arch in SASS_ARCHS:
            command = (tool_of(home, "cuobjdump"), "-sass", "-arch", arch, str(built.object))
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            loops[arch] = parse_sass(done.stdout)
        found = list(parse_ptxas(built.log))
        names = short_names({one.kernel for one in found})
        for one in found:
            taken = type(one)(names[one.kernel], one.arch, one.registers, one.shared, one.spills)
            budget = budget_of(taken.kernel, taken.arch, budgets)
            reports.append(Report(taken, budget, loops.get(one.arch, {}).get(one.kernel)))
    return sorted(reports, key=lambda report: (report.resources.kernel, report.resources.arch))


def main() -> int:
    """Exit status 1 if a kernel does not compile or leaves its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print what is known of each kernel, as Markdown")
    parser.add_argument("--arch", default="sm_90", help="of the table (default sm_90; `all` for every one)")
    options = parser.parse_args()
    try:
        home = toolkit(pinned_cuda(metadata.requires("torch") or []))
        objects = compile_cuda(ROOT, home)
        reports = reports_of(objects, home)
    except (BuildError, ValueError) as error:
        print(f"cuda-check: {error}", file=sys.stderr)
        return 1
    if options.table:
        print(as_table(report for report in reports if options.arch in ("all", report.resources.arch)))
    problems = dict.fromkeys(line for report in reports for line in complaints(report))
    for line in problems:
        print(f"cuda-check: {line}", file=sys.stderr)
    verdict = f"{len(problems)} complaints" if problems else "all within their budgets"
    print(f"cuda-check: {len(reports)} kernels with nvcc of {home}: {verdict}")
    return 1 if problems or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
