"""How many instructions the metadata plane executes: `make instructions`, `make instructions-update`.

Times differ from run to run and from machine to machine; counts of executed instructions don't. callgrind (a tool of
valgrind) runs each row of `benches/metadata` once and counts inside its `counted_region`, the same operations that the
bench times. The counts are kept in `instructions.json`, together with the compiler that made them; a change that makes
a row grow by more than 5 % fails, so it is either mended or kept on purpose by `make instructions-update`.

    python benches/instructions.py             compare with what is kept; exit status 1 on growth
    python benches/instructions.py --update    keep today's counts
    python benches/instructions.py --flat      instructions per operation in a pool of 10^7 blocks over those in one
                                               of 10^4 (minutes; keeps nothing); exit status 1 above 1.1
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).with_name("instructions.json")
ROWS = (
    "append",
    "append_indexed",
    "step",
    "step_indexed",
    "prompts_held",
    "prompts_evicting",
    "decode_delta",
    "decode_rebuild",
    "release",
)
ALLOWED_GROWTH = 0.05

FLAT_ROWS = ("append", "release", "evict")
FLAT_BLOCKS = (10_000, 10_000_000)
ALLOWED_FLAT_RATIO = 1.1

# glibc picks its copy routines by the processor; the plain ones, so that the counts are those of any x86-64 machine.
TOO_NEW = ("AVX2", "AVX2_Usable", "AVX512F", "AVX512F_Usable", "AVX512VL", "ERMS", "FSRM", "AVX_Fast_Unaligned_Load")
PLAIN_GLIBC = "glibc.cpu.hwcaps=" + ",".join(f"-{feature}" for feature in TOO_NEW)


class CannotCountError(Exception):
    """Something that counting needs is missing; the text says what, and what to do about it."""


@dataclass(frozen=True)
class Count:
    """What callgrind saw inside `counted_region` of one run, per operation."""

    operations: int
    instructions: float
    events: dict[str, float]


def build(bench: str) -> Path:
    """Builds the bench and returns the path of its executable."""
    command = ["cargo", "bench", "--quiet", "--locked", "--no-run", "--bench", bench, "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise CannotCountError(f"cargo could not build the bench `{bench}`")
    for message in map(json.loads, done.stdout.splitlines()):
        if message.get("executable") and message["target"]["name"] == bench:
            return Path(message["executable"])
    raise CannotCountError(f"cargo built no bench `{bench}`")


def parse_callgrind(text: str) -> dict[str, int]:
    """Events and their totals, from callgrind's output file."""
    names = re.search(r"^events: (.+)$", text, flags=re.MULTILINE)
    totals = re.search(r"^totals: (.+)$", text, flags=re.MULTILINE)
    if names is None or totals is None:
        raise CannotCountError("callgrind wrote no totals")
    values = [int(value) for value in totals[1].split()]
    # Events that stayed 0 to the last one are left off.
    values += [0] * (len(names[1].split()) - len(values))
    return dict(zip(names[1].split(), values, strict=True))


def count(executable: Path, *arguments: str, cache: bool = False) -> Count:
    """Runs the bench under callgrind, counting inside `counted_region` alone."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise CannotCountError("`valgrind` is not installed (Debian, Ubuntu: `apt-get install valgrind`)")
    with tempfile.NamedTemporaryFile(prefix="callgrind.") as output:
        command = [valgrind, "--quiet", "--tool=callgrind", f"--callgrind-out-file={output.name}"]
        command += ["--toggle-collect=*counted_region*", f"--cache-sim={'yes' if cache else 'no'}"]
        environment = {"GLIBC_TUNABLES": PLAIN_GLIBC}
        done = subprocess.run(
            [*command, str(executable), *arguments], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode != 0:
            raise CannotCountError(f"{executable.name} {' '.join(arguments)} failed under valgrind:\n{done.stderr}")
        events = parse_callgrind(Path(output.name).read_text(encoding="utf-8"))
    operations = json.loads(done.stdout)["operations"]
    if not events["Ir"] or not operations:
        raise CannotCountError(f"`{' '.join(arguments)}` counted nothing: is `counted_region` inlined?")
    per_operation = {name: total / operations for name, total in events.items()}
    return Count(operations, per_operation["Ir"], per_operation)


def toolchain() -> str:
    """Version and target of the compiler: counts of different ones are not comparable."""
    verbose = subprocess.run(["rustc", "-vV"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(": ", 1) for line in verbose.splitlines() if ": " in line)
    return f"rustc {fields['release']} ({fields['commit-hash'][:9]}) for {fields['host']}"


def compare(kept: dict[str, Any], counted: dict[str, float], made_by: str) -> Iterator[tuple[str, bool]]:
    """One line a row, and whether the row passes."""
    if kept["toolchain"] != made_by:
        wanted = kept["toolchain"]
        raise CannotCountError(f"the kept counts are of {wanted}, this is {made_by}: `make instructions-update`")
    yield f"{'instructions an operation':<28}{'kept':>12}{'now':>12}{'change':>9}", True
    for row, now in counted.items():
        before = kept["instructions_per_operation"].get(row)
        if before is None:
            yield f"{row:<28}{'-':>12}{now:>12.1f}  not kept yet: `make instructions-update`", False
            continue
        change = now / before - 1
        grew, fell = change > ALLOWED_GROWTH, change < -ALLOWED_GROWTH
        verdict = f"  GREW by more than {ALLOWED_GROWTH:.0%}" if grew else "  keep it: `make instructions-update`"
        yield f"{row:<28}{before:>12.1f}{now:>12.1f}{change:>+9.1%}{verdict if grew or fell else ''}", not grew


def run_rows(update: bool) -> bool:
    """Counts every row; keeps the counts or compares them. False if a row grew."""
    executable = build("metadata")
    counted = {row: round(count(executable, "--count", row).instructions, 1) for row in ROWS}
    made_by = toolchain()
    if update:
        kept = {"toolchain": made_by, "instructions_per_operation": counted}
        KEPT.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        print(f"kept in {KEPT.relative_to(ROOT)}:", json.dumps(counted))
        return True
    verdicts = list(compare(json.loads(KEPT.read_text(encoding="utf-8")), counted, made_by))
    print("\n".join(line for line, _ in verdicts))
    return all(passed for _, passed in verdicts)


def run_flat() -> bool:
    """Counts each operation in a small and a large pool, with simulated caches. False if one is not flat."""
    executable = build("flatness")
    small, large = FLAT_BLOCKS
    print(f"{'an operation, in a pool of':<28}{small:>12,}{large:>14,}{'ratio':>8}")
    flat = True
    for row in FLAT_ROWS:
        few, many = (count(executable, "--count", row, "--blocks", str(n), cache=True) for n in FLAT_BLOCKS)
        ratio = many.instructions / few.instructions
        flat &= ratio <= ALLOWED_FLAT_RATIO
        verdict = "" if ratio <= ALLOWED_FLAT_RATIO else f"  above {ALLOWED_FLAT_RATIO}"
        print(f"{row + ', instructions':<28}{few.instructions:>12.2f}{many.instructions:>14.2f}{ratio:>8.3f}{verdict}")
        for label, events in (("first", ("D1mr", "D1mw")), ("last", ("DLmr", "DLmw"))):
            misses = [sum(counted.events[event] for event in events) for counted in (few, many)]
            print(f"{row + f', {label}-level misses':<28}{misses[0]:>12.3f}{misses[1]:>14.3f}")
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--update", action="store_true", help="keep today's counts")
    modes.add_argument("--flat", action="store_true", help="compare a pool of 10^7 blocks with one of 10^4")
    arguments = parser.parse_args()
    if platform.machine() != "x86_64":
        sys.exit(f"the kept counts are of x86_64, this machine is {platform.machine()}")
    try:
        passed = run_flat() if arguments.flat else run_rows(arguments.update)
    except CannotCountError as missing:
        sys.exit(f"cannot count: {missing}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
