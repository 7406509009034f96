"""What compiled CUDA kernels say of themselves without running: registers, spills, the instructions of their loops.

Pure functions over text: the output of `ptxas -v`, of `cuobjdump -sass`, and the budgets that stand in kernel sources.
A budget is a comment line like

    // budget: kernel=decode_kernel registers=168 shared=4096 spills=0 threads=128 loads16=16 mma=32

and holds for every instance of that kernel template; `kernel=decode_kernel<bfloat16` only for those whose name begins
so, and wins over the shorter one. `registers` and `spills` (bytes stored and loaded) and `shared` (static bytes of a
block) are upper bounds; `loads16` and `mma` are the least 16-byte loads and tensor core instructions of a thread in one
pass of the main loop. `threads` is the size of a block; `arch=sm_90` limits a budget to one architecture.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

WARP = 32
REGISTERS_PER_SM = 65536
MAX_WARPS_PER_SM = 64


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture: registers a thread, static shared bytes a block, bytes spilled."""

    kernel: str
    arch: str
    registers: int
    shared: int
    spills: int


@dataclass(frozen=True)
class Budget:
    """What a kernel may take, and what its main loop must hold; None where the source says nothing."""

    kernel: str
    registers: int
    shared: int
    spills: int
    threads: int | None = None
    loads16: int = 0
    mma: int = 0
    arch: str | None = None


@dataclass(frozen=True)
class Loop:
    """One pass of a loop: warp instructions, of these loads by width in bytes a thread, and tensor core ones."""

    instructions: int
    mma: int
    loads: dict[int, int] = field(default_factory=dict)

    @property
    def wide_bytes(self) -> int:
        """Bytes that a warp loads in 16- and 8-byte pieces: K and V, not tables."""
        return WARP * sum(width * count for width, count in self.loads.items() if width >= 8)

    @property
    def instructions_per_kb(self) -> float:
        """Warp instructions for 1,024 of those bytes."""
        return 1024 * self.instructions / self.wide_bytes if self.wide_bytes else 0.0


@dataclass(frozen=True)
class Report:
    """All that is known of one kernel on one architecture. `loop` is None if it has none."""

    resources: Resources
    budget: Budget | None
    loop: Loop | None

    @property
    def resident_warps(self) -> int:
        """Warps that the registers leave room for on one SM; 0 without `threads` in the budget."""
        if self.budget is None or not self.budget.threads:
            return 0
        warps = -(-self.budget.threads // WARP)
        per_warp = -(-self.resources.registers // 8) * 8 * WARP
        return min(REGISTERS_PER_SM // (per_warp * warps), MAX_WARPS_PER_SM // warps) * warps

    @property
    def bytes_in_flight(self) -> int:
        """Bytes an SM has asked for when every resident warp has issued the loads of one pass of its main loop."""
        return self.resident_warps * self.loop.wide_bytes if self.loop else 0


def short_name(demangled: str) -> str:
    """`void kvpager::cuda::f<kvpager::float16, (int)4>(kvpager::P, …)` -> `f<float16,4>`."""
    name = demangled.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for at, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            name = name[:at]
            break
    return re.sub(r"\((?:unsigned )?\w+\)|\w+::|\s", "", name)


_COMPILING = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_ptxas(log: str) -> Iterator[Resources]:
    """Every kernel that `ptxas -v` (or `nvcc -Xptxas -v`) speaks of, by its mangled name."""
    kernel, arch, spills = "", "", 0
    for line in log.splitlines():
        if found := _COMPILING.search(line):
            (kernel, arch), spills = found.groups(), 0
        elif found := _SPILLS.search(line):
            spills = int(found[1]) + int(found[2])
        elif kernel and (found := _USED.search(line)):
            yield Resources(kernel, arch, int(found[1]), int(found[2] or 0), spills)
            kernel = ""


def parse_budgets(source: str) -> Iterator[Budget]:
    """The budgets of a kernel source.

    Raises:
        ValueError: a line that begins like one and is none.
    """
    for line in re.findall(r"^\s*//\s*budget:(.*)$", source, re.MULTILINE):
        given = dict(word.split("=", 1) for word in line.split() if "=" in word)
        numbers = {name: value for name, value in given.items() if name not in ("kernel", "arch")}
        missing = {"kernel", "registers", "shared", "spills"} - given.keys()
        unknown = given.keys() - Budget.__dataclass_fields__.keys()
        if missing or unknown or len(given) != len(line.split()):
            raise ValueError(f"not a budget: `{line.strip()}` ({', '.join(sorted(missing | unknown)) or 'syntax'})")
        kernel, arch = given["kernel"], given.get("arch")
        yield Budget(kernel, arch=arch, **{name: int(value) for name, value in numbers.items()})


def budget_of(kernel: str, arch: str, budgets: Iterable[Budget]) -> Budget | None:
    """The most particular budget for a kernel's short name."""
    fitting = [
        budget
        for budget in budgets
        if budget.arch in (None, arch)
        and (kernel.split("<")[0] == budget.kernel or ("<" in budget.kernel and kernel.startswith(budget.kernel)))
    ]
    return max(fitting, key=lambda budget: (len(budget.kernel), budget.arch is not None), default=None)


_FUNCTION = re.compile(r"Function : (\w+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_BRANCH_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
T = TypeVar("T")


def parse_sass(listing: str) -> dict[str, Loop | None]:
    """The main loop of every function of `cuobjdump -sass`, by mangled name."""
    parts = _FUNCTION.split(listing)[1:]
    return {name: main_loop(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def main_loop(body: str) -> Loop | None:
    """One pass of the loop that has the most tensor core instructions outside the loops in it (these count as one pass
    each); without such instructions, of the innermost loop that loads the most bytes."""
    code = [(int(at, 16), name, operands) for at, name, operands in _INSTRUCTION.findall(body)]
    spans = set()
    for at, name, operands in code:
        target = _BRANCH_TARGET.search(operands.strip()) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.add((int(target[1], 16), at))

    def rank(span: tuple[int, int]) -> tuple[int, bool, int, int]:
        inside = [one for one in spans if one != span and span[0] <= one[0] and one[1] <= span[1]]
        own = [name for at, name in pass_of(span) if not any(first <= at <= last for first, last in inside)]
        loop = _loop([name for _, name in pass_of(span)])
        return _loop(own).mma, not inside, loop.wide_bytes, loop.instructions

    def pass_of(span: tuple[int, int]) -> list[tuple[int, str]]:
        return [(at, name) for at, name, _ in code if span[0] <= at <= span[1]]

    return _loop([name for _, name in pass_of(max(spans, key=rank))]) if spans else None


def _loop(names: list[str]) -> Loop:
    loads: dict[int, int] = {}
    for name in names:
        if name.startswith(("LDG.", "LDGSTS.")):
            bits = re.search(r"\.(128|64|U?S?16|U?S?8)\b", name)
            width = int(bits[1].lstrip("US")) // 8 if bits else 4
            loads[width] = loads.get(width, 0) + 1
    return Loop(len(names), sum(name.startswith(("HMMA", "IMMA", "QMMA")) for name in names), loads)


def complaints(report: Report) -> Iterator[str]:
    """What of a kernel is not within its budget, in words; nothing if all is."""
    taken, budget, loop = report.resources, report.budget, report.loop
    where = f"{taken.kernel} on {taken.arch}"
    if budget is None:
        name = taken.kernel.split("<")[0]
        yield f"{name}: no budget in the sources (`// budget: kernel={name} registers=… shared=… spills=…`)"
        return
    for name in ("registers", "shared", "spills"):
        if getattr(taken, name) > getattr(budget, name):
            yield f"{where}: {name} {getattr(taken, name)}, budget {getattr(budget, name)}"
    found = {"loads16": loop.loads.get(16, 0) if loop else 0, "mma": loop.mma if loop else 0}
    for name, number in found.items():
        if number < getattr(budget, name):
            yield f"{where}: {number} {name} in its main loop, at least {getattr(budget, name)} wanted"


def as_table(reports: Iterable[Report]) -> str:
    """A Markdown table, for docs/kernels.md."""
    columns = ("kernel", "arch", "registers", "shared", "spills", "16-byte loads", "mma", "instructions", "per KB")
    rows = ["| " + " | ".join((*columns, "KB in flight per SM")) + " |", "|---" * (len(columns) + 1) + "|"]
    for report in reports:
        taken, loop = report.resources, report.loop
        cells = [f"`{taken.kernel}`", taken.arch, taken.registers, taken.shared, taken.spills]
        if loop:
            per_kb = f"{loop.instructions_per_kb:.0f}" if loop.wide_bytes else "-"
            flight = f"{report.bytes_in_flight / 1024:.0f}" if report.bytes_in_flight else "-"
            cells += [loop.loads.get(16, 0), loop.mma, loop.instructions, per_kb, flight]
        else:
            cells += ["-"] * 5
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)
