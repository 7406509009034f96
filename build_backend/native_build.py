"""Builds csrc/ into the one native library, `_C.abi3.so`, against the stable ABI of the installed torch.

`build_native(root, out)` is called by the build backend; `python build_backend/native_build.py` builds in place. Only
a C++20 compiler and torch's headers are needed; where an nvcc is found (CUDA_HOME, CUDA_PATH, PATH, or the pip packages
nvidia-cuda-nvcc and friends) the CUDA kernels are compiled in, with a static CUDA run time, so that the same library
loads beside a torch without CUDA. Objects are kept in build/native/, named by the hash of all that goes into them, so
that a header that changes costs the sources that include it.
A source named `*.isa.cpp` is compiled once for each instruction set; the library picks one at run time
(csrc/cpu/runtime/isa.h). One named `*.cache.cu` is compiled once for each type of caches: that of the queries, and
every type of codes in the list of csrc/types.h.

What is missing is said in the report, never raised: without the library kvpager runs on its reference kernels.

Longer than 300 lines, because it is loaded by path, from a checkout and from the sources in the wheel: one file that
imports nothing beside it.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TORCH_TARGET = "0x020b000000000000"  # torch 2.11: the oldest whose stable ABI has all that csrc uses
CUDA_ARCHS = ("sm_80", "sm_90", "compute_90")  # the last is PTX, compiled by the driver of any newer GPU
COMMON_FLAGS = ("-std=c++20", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}")
# -O3, not -O2: plain loops are vectorised only there. No fast-math: NaN and inf have meanings here.
CXX_FLAGS = (*COMMON_FLAGS, "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
NVCC_FLAGS = (*COMMON_FLAGS, "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# Compiler flags of each instruction set of `*.isa.cpp` sources, by machine; the sets of csrc/cpu/runtime/isa.h.
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": _AVX2_FLAGS,
        "avx512": _AVX512_FLAGS,
        "avx512_bf16": (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16"),
    },
}
# Such sources vectorise by hand. gcc 12 takes the intrinsics' undefined registers for mistakes.
ISA_SOURCE_FLAGS = ("-fno-tree-vectorize", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
# For `make sanitize`: what is out of bounds or undefined stops the process, with the line.
SANITIZE_FLAGS = ("-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Not optimised: with -O1 the kernels of AVX-512 alone take gcc minutes, and their tests are small.
SANITIZED_CPU_FLAGS = ("-O0", *SANITIZE_FLAGS)
# Emulated kernels compile in seconds and run for minutes.
SANITIZED_EMULATED_FLAGS = ("-O1", *SANITIZE_FLAGS)
COMPILE_JOBS = 2
# Ours are named in quotes, from the folder of the file that includes them; the system's and torch's are not.
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass
class BuildReport:
    """What a build did.

    Attributes:
        out: where the library was asked for.
        built: whether it lies there now, up to date.
        reason: why not; empty if built.
        cuda: the GPU architectures compiled in; empty without CUDA kernels.
        cuda_reason: why there are none; empty if there are.
        compiled: sources that were compiled this time.
        reused: sources whose objects were up to date.
        seconds: wall time.
    """

    out: Path
    built: bool = False
    reason: str = ""
    cuda: tuple[str, ...] = ()
    cuda_reason: str = ""
    compiled: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.built:
            return f"native library not built: {self.reason}"
        done = f"{len(self.compiled)} compiled, {len(self.reused)} up to date, {self.seconds:.1f} s"
        cuda = f"CUDA kernels for {', '.join(self.cuda)}" if self.cuda else f"no CUDA kernels: {self.cuda_reason}"
        return f"native library at {self.out} ({done}; {cuda})"


class BuildError(Exception):
    """Why something can't be built, in one message."""


@dataclass(frozen=True)
class _Step:
    """One source and the command that compiles it, up to `-c source -o object`; its name in reports."""

    source: Path
    command: tuple[str, ...]
    object: Path
    name: str


def build_native(
    root: Path,
    out: Path,
    *,
    verbose: bool = False,
    sanitize: bool = False,
    cache: Path | None = None,
    archs: tuple[str, ...] = CUDA_ARCHS,
    require_cuda: bool = False,
) -> BuildReport:
    """Build csrc/ of the source tree `root` into the library `out`; see the module's header.

    With `sanitize`, only the CPU kernels, checked at run time by AddressSanitizer and UndefinedBehaviorSanitizer: a
    process that loads the result must have preloaded the former. Objects go to `cache` (build/ of the tree), CUDA
    kernels are compiled for `archs`; without them nothing is built if `require_cuda`. Returns at once when nothing
    changed. Never raises for what the machine lacks or a compiler refuses.
    """
    started = time.monotonic()
    report = BuildReport(out)
    cache = cache or root / "build" / ("sanitized" if sanitize else "native")
    try:
        torch_dir = _find_torch()
        compiler = _find_compiler()
        cache.mkdir(parents=True, exist_ok=True)
        cuda_objects: list[Path] = []
        cuda_flags: tuple[str, ...] = ()
        link_cuda: tuple[str, ...] = ()
        try:
            if sanitize:
                raise BuildError("left out of a sanitized build")
            cuda_home = find_cuda()
            cuda_steps = _cuda_steps(root, cache, torch_dir, compiler, cuda_home, archs)
            cuda_objects = _compile(cuda_steps, report, verbose)
            report.cuda = archs
            cuda_flags = (f'-DKVPAGER_CUDA_ARCHS="{" ".join(archs)}"',)
            link_cuda = (
                *(f"-L{cuda_home / name}" for name in ("lib64", "lib")),
                "-lcudart_static",
                "-ldl",
                "-lrt",
                "-lpthread",
            )
        except BuildError as error:
            report.cuda_reason = str(error)
            if require_cuda:
                raise
        steps = _cpu_steps(root, cache, torch_dir, compiler, (*cuda_flags, *(SANITIZED_CPU_FLAGS if sanitize else ())))
        objects = _compile(steps, report, verbose) + cuda_objects
        link = (*compiler, "-shared", *map(str, objects), f"-L{torch_dir / 'lib'}", "-ltorch_cpu", *link_cuda)
        link += SANITIZE_FLAGS if sanitize else ()
        _link(link, cache, out, verbose)
        report.built = True
    except BuildError as error:
        report.reason = str(error)
    report.seconds = time.monotonic() - started
    return report


def emulated_path(root: Path, sanitize: bool = False) -> Path:
    """Where tests look for the emulated kernels."""
    return root / "build" / ("sanitized" if sanitize else "native") / "emulated" / "kvpager_emulated.so"


def build_emulated(root: Path, out: Path, *, verbose: bool = False, sanitize: bool = False) -> BuildReport:
    """Build the CUDA kernels and their launchers for the CPU, on the emulator of csrc/testing/; for tests.

    The library registers the same ops under `kvpager_emulated`. Reports, and sanitizes, like `build_native`.
    """
    started = time.monotonic()
    report = BuildReport(out)
    cache = root / "build" / ("sanitized" if sanitize else "native") / "emulated"
    sanitize_flags = SANITIZED_EMULATED_FLAGS if sanitize else ()
    try:
        torch_dir = _find_torch()
        compiler = _find_compiler()
        cache.mkdir(parents=True, exist_ok=True)
        flags = ("-DKVPAGER_EMULATE", "-Wno-unknown-pragmas", "-isystem", str(torch_dir / "include"), "-x", "c++")
        command = (*compiler, *CXX_FLAGS, *sanitize_flags, *flags)
        steps = _steps_of_cuda_sources(root, cache, command, _version_of(compiler))
        objects = _compile(steps, report, verbose)
        link = (*compiler, "-shared", *map(str, objects), f"-L{torch_dir / 'lib'}", "-ltorch_cpu", *sanitize_flags)
        _link(link, cache, out, verbose)
        report.built = True
    except BuildError as error:
        report.reason = str(error)
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True)
class CudaObject:
    """A compiled CUDA source, and what the compiler said."""

    source: Path
    object: Path
    log: str


def compile_cuda(root: Path, cuda_home: Path) -> list[CudaObject]:
    """Compile the CUDA sources to the objects that a build would, or find them; `BuildError` if one fails."""
    cache = root / "build" / "native"
    cache.mkdir(parents=True, exist_ok=True)
    steps = _cuda_steps(root, cache, _find_torch(), _find_compiler(), cuda_home, CUDA_ARCHS)
    _compile(steps, BuildReport(cache), verbose=False)
    return [CudaObject(step.source, step.object, step.object.with_suffix(".log").read_text()) for step in steps]


def _find_torch() -> Path:
    """The folder of the installed torch, found without importing it (that takes a second)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed (`pip install 'torch>=2.11'`)")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "torch" / "csrc" / "stable" / "ops.h").exists():
        raise BuildError(
            f"torch {importlib.metadata.version('torch')} has no stable ABI headers; 2.11 or newer is needed"
        )
    return folder


def _find_compiler() -> tuple[str, ...]:
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise BuildError(f"`CXX` names `{asked[0]}`, which is not there")
        return tuple(asked)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise BuildError("no C++ compiler: none of c++, g++, clang++ in PATH (Debian, Ubuntu: `apt install g++`)")


def find_cuda() -> Path:
    """The toolkit's root: the folder that holds bin/nvcc; `BuildError` says where it was looked for."""
    candidates = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parents[1])
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(folder).glob("cu*"))
    for home in candidates:
        if (home / "bin" / "nvcc").exists():
            return home
    raise BuildError("no nvcc in CUDA_HOME, CUDA_PATH, PATH or the nvidia pip packages")


def _cpu_steps(
    root: Path, cache: Path, torch_dir: Path, compiler: tuple[str, ...], extra: tuple[str, ...]
) -> list[_Step]:
    command = (*compiler, *CXX_FLAGS, *extra, "-isystem", str(torch_dir / "include"))
    version = _version_of(compiler)
    sources = sorted((root / "csrc" / "cpu").rglob("*.cpp"))
    plain = [source for source in sources if not source.name.endswith(".isa.cpp")]
    steps = _steps(root, cache, plain, command, version)
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    for isa, flags in ISA_FLAGS.get(machine, {"baseline": ()}).items():
        with_isa = (*command, *ISA_SOURCE_FLAGS, *flags, f"-DKVPAGER_ISA={isa}")
        steps += _steps(root, cache, [s for s in sources if s not in plain], with_isa, version, isa)
    return steps


def _cuda_steps(
    root: Path,
    cache: Path,
    torch_dir: Path,
    compiler: tuple[str, ...],
    cuda_home: Path,
    archs: tuple[str, ...],
) -> list[_Step]:
    nvcc = str(cuda_home / "bin" / "nvcc")
    codes = tuple(f"-gencode=arch=compute_{arch.partition('_')[2]},code={arch}" for arch in archs)
    command = (nvcc, "-ccbin", compiler[0], *NVCC_FLAGS, *codes, "-isystem", str(torch_dir / "include"))
    return _steps_of_cuda_sources(root, cache, command, _version_of((nvcc,)) + _version_of(compiler))


def _steps_of_cuda_sources(root: Path, cache: Path, command: tuple[str, ...], version: str) -> list[_Step]:
    sources = sorted((root / "csrc" / "cuda").rglob("*.cu"))
    by_cache = [source for source in sources if source.name.endswith(".cache.cu")]
    steps = _steps(root, cache, [source for source in sources if source not in by_cache], command, version)
    for kind in ("query_type", *_code_types(root)) if by_cache else ():
        steps += _steps(root, cache, by_cache, (*command, f"-DKVPAGER_CACHE={kind}"), version, kind)
    return steps


def _code_types(root: Path) -> list[str]:
    """The types of codes: one object of a `*.cache.cu` each."""
    text = (root / "csrc" / "types.h").read_text()
    lines = text[text.index("#define KVPAGER_FOR_CODES(") :].partition("\n\n")[0]
    return re.findall(r"^ *X\((\w+),", lines, re.MULTILINE)


def _steps(
    root: Path, cache: Path, sources: list[Path], command: tuple[str, ...], version: str, variant: str = ""
) -> list[_Step]:
    """Each object is named by a hash of its source, its headers, the command, the compiler's and torch's version.

    `variant`: the instruction set or the type of caches that the command is for, where a source has several.
    """
    common = hashlib.sha256("\0".join((*command, version, importlib.metadata.version("torch"))).encode())
    steps = []
    for source in sources:
        digest = common.copy()
        for file in _with_includes(source):
            digest.update(file.read_bytes())
        stem = "_".join(source.relative_to(root / "csrc").with_suffix("").parts)
        target = cache / f"{stem}{source.suffix}{variant and '@'}{variant}-{digest.hexdigest()[:20]}.o"
        name = str(source.relative_to(root)) + (f" for {variant}" if variant else "")
        steps.append(_Step(source, command, target, name))
    return steps


def _with_includes(source: Path) -> list[Path]:
    """A source and all of csrc/ that it can include, sorted: whatever `#if` stands around an `#include "…"`."""
    found: set[Path] = set()
    new = {source.resolve()}
    while new:
        found |= new
        named = {(file.parent / name).resolve() for file in new for name in _INCLUDE.findall(file.read_text())}
        new = {file for file in named - found if file.exists()}  # the compiler says what is missing
    return sorted(found)


def _version_of(compiler: tuple[str, ...]) -> str:
    return _run((*compiler, "--version"), "does not run", verbose=False)


def _compile(steps: list[_Step], report: BuildReport, verbose: bool) -> list[Path]:
    """Compile what is not in the cache, a few at once; all of it or `BuildError`."""
    stale = [step for step in steps if not step.object.exists()]
    report.reused += [step.name for step in steps if step not in stale]

    def compile_one(step: _Step) -> None:
        for old in step.object.parent.glob(f"{step.object.name.rpartition('-')[0]}-*.*"):
            old.unlink(missing_ok=True)
        partial = step.object.with_suffix(f".{os.getpid()}.partial")
        command = (*step.command, "-c", str(step.source), "-o", str(partial))
        step.object.with_suffix(".log").write_text(_run(command, f"could not compile {step.name}", verbose))
        partial.replace(step.object)
        report.compiled.append(step.name)

    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        list(pool.map(compile_one, stale))
    return [step.object for step in steps]


def _link(command: tuple[str, ...], cache: Path, out: Path, verbose: bool) -> None:
    """Link into the cache, then put a copy at `out` by rename: a library that is loaded is not overwritten."""
    linked = cache / f"_C-{hashlib.sha256(chr(0).join(command).encode()).hexdigest()[:20]}.so"
    if not linked.exists():
        for old in cache.glob("_C-*.so"):
            old.unlink(missing_ok=True)
        partial = linked.with_suffix(f".{os.getpid()}.partial")
        _run((*command, "-o", str(partial)), "could not link the native library", verbose)
        partial.replace(linked)
    if out.exists() and out.read_bytes() == linked.read_bytes():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    shutil.copyfile(linked, partial)
    partial.replace(out)


def _run(command: tuple[str, ...], failure: str, verbose: bool) -> str:
    """What the command said, on both streams; `BuildError` if it fails."""
    if verbose:
        print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{failure}: {error}") from error
    if done.returncode:
        raise BuildError(f"{failure}:\n{shlex.join(command)}\n{done.stdout}{done.stderr}")
    if verbose:
        print(done.stdout + done.stderr, end="", flush=True)
    return done.stdout + done.stderr


def main() -> int:
    """Build in place; exit status 1 if that did not work."""
    parser = argparse.ArgumentParser(description="Build csrc/ into python/kvpager/_C.abi3.so.")
    parser.add_argument("--verbose", action="store_true", help="show the commands and what compilers say")
    parser.add_argument(
        "--sanitize", action="store_true", help="build into build/sanitized/_C.abi3.so, for `make sanitize`"
    )
    parser.add_argument("--require-cuda", action="store_true", help="fail if the CUDA kernels can't be compiled in")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="build the CUDA kernels for the CPU instead, for tests (see csrc/testing)",
    )
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    if options.emulated:
        report = build_emulated(
            root, emulated_path(root, options.sanitize), verbose=options.verbose, sanitize=options.sanitize
        )
        print(report)
        return 0 if report.built else 1
    out = root / ("build/sanitized/_C.abi3.so" if options.sanitize else "python/kvpager/_C.abi3.so")
    report = build_native(
        root, out, verbose=options.verbose, sanitize=options.sanitize, require_cuda=options.require_cuda
    )
    print(report)
    return 0 if report.built else 1


if __name__ == "__main__":
    sys.exit(main())
