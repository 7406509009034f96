"""The shape of the sources: no circle of imports, no file or function longer than it should be, no line over 120.

A file may be longer if its header says why, in a sentence "Longer than …, because …"; so may a function, in its
docstring or in the comment above it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT, before_tests, tracked_files

PYTHON = ROOT / "python"
COLUMNS, FUNCTION_LINES = 120, 50
FILE_LINES = {".rs": 400, ".py": 300, ".h": 300, ".cpp": 300, ".cuh": 300, ".cu": 300}
SIZED = ("python/kvpager", "rust/kvpager-core/src", "rust/kvpager-py/src", "csrc", "build_backend", "tools", "benches")
REASON = re.compile(r"\bLonger than [^.]*\bbecause\b")


# Circles of imports ---------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """`python/kvpager/ops/__init__.py` -> `kvpager.ops`."""
    return ".".join(path.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__")


def module_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run, or would be type-checked, when the module is imported: everything outside of functions."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from module_level(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from module_level(handler.body)


def imported_by(code: str, module: str, is_package: bool, modules: frozenset[str]) -> set[str]:
    """The modules among `modules` that `module` names in its module-level imports."""
    found: set[str] = set()
    for statement in module_level(ast.parse(code).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            up = statement.level - is_package
            parents = module.split(".")[: -up or None] if statement.level else []
            base = ".".join([*parents, *filter(None, [statement.module])])
            for alias in statement.names:
                member = f"{base}.{alias.name}"
                found.add(member if member in modules else base)
    return found & modules


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other, each sorted: Tarjan's strongly connected components of more than one."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for target in sorted(arrows.get(node, ())):
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == numbers[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1 or node in arrows.get(node, ()):
                found.append(sorted(component))

    for node in sorted(arrows):
        if node not in numbers:
            visit(node)
    return found


def test_no_circle_of_python_modules() -> None:
    paths = {module_name(path): path for path in (PYTHON / "kvpager").rglob("*.py")}
    modules = frozenset(paths)
    arrows = {
        name: imported_by(path.read_text(), name, path.stem == "__init__", modules) - {"kvpager"}
        for name, path in paths.items()
    }
    assert sum(map(len, arrows.values())) > len(arrows), "the imports were not read"
    assert circles(arrows) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import p.b", {"p.b"}),
        ("from p import b", {"p.b"}),
        ("from p.b import f", {"p.b"}),
        ("from . import b", {"p.b"}),
        ("from .b import f", {"p.b"}),
        ("if TYPE_CHECKING:\n    from p.b import T", {"p.b"}),
        ("try:\n    import p.b\nexcept ImportError:\n    import p.c", {"p.b", "p.c"}),
        ("def f():\n    import p.b", set()),
        ("from p import name", {"p"}),
    ],
)
def test_an_import_is_seen_however_it_is_written(code: str, expected: set[str]) -> None:
    assert imported_by(code, "p.a", False, frozenset({"p", "p.a", "p.b", "p.c"})) == expected


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"], ["d"]]


# Sizes ----------------------------------------------------------------------------------------------------------------


def sources(*suffixes: str) -> list[Path]:
    folders = tuple(f"{ROOT / folder}/" for folder in SIZED)
    return [path for path in tracked_files() if path.suffix in suffixes and str(path).startswith(folders)]


def header(text: str) -> str:
    """The docstring or the comment that a file begins with, in one line."""
    text = text.removeprefix("#!/usr/bin/env python3\n")
    if text.startswith(('"""', 'r"""')):
        return " ".join(text.split('"""')[1].split())
    lines = []
    for line in text.splitlines():
        if not line.startswith(("//", "#")):
            break
        lines.append(line.lstrip("/!# "))
    return " ".join(lines)


def test_files_are_short_or_say_why() -> None:
    """Rust counts up to its tests; everything else whole."""
    offenders = []
    for path in sources(*FILE_LINES):
        length = len(before_tests(path).splitlines())
        if length > FILE_LINES[path.suffix] and not REASON.search(header(path.read_text())):
            offenders.append(f"{path.relative_to(ROOT)}: {length} lines, {FILE_LINES[path.suffix]} wanted")
    assert offenders == []


def python_functions(path: Path) -> Iterator[tuple[str, int, str]]:
    """Name, lines of the body behind its docstring, and the docstring of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node) or ""
            body = node.body[1:] if told else node.body
            if body:
                yield node.name, (node.end_lineno or 0) - body[0].lineno + 1, " ".join(told.split())


RUST_HEAD = re.compile(r"^(?P<indent> *)(?:pub(?:\([a-z :]+\))? )?(?:(?:const|unsafe|async) )*fn (?P<name>\w+)")
C_HEAD = re.compile(r"^(?P<indent> *)(?:\w[\w:<>,&*\[\]]*[ &*]+)+(?P<name>[\w:]+)\((?!.*;$)")
NO_HEAD = re.compile(r"^ *(?:return|else|if|for|while|switch|using|#)\b|^[^(]* = ")


def braced_functions(text: str, head: re.Pattern[str]) -> Iterator[tuple[str, int, str]]:
    """The same of Rust, C++ and CUDA as their formatters lay them out: a body ends at a `}` as far in as its head."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = head.match(line)
        if found is None or NO_HEAD.match(line):
            continue
        opening = next((at for at in range(number, len(lines)) if lines[at].endswith(("{", ";", "}"))), number)
        signature = " ".join(lines[number : opening + 1])
        if not signature.endswith("{") or signature.count("(") != signature.count(")"):
            continue  # a declaration, a body on the line of its head, or the argument of a macro
        closing = found["indent"] + "}"
        end = next((at for at in range(opening + 1, len(lines)) if lines[at].startswith(closing)), None)
        assert end is not None, f"no end of `{line.strip()}`"
        above = []
        for earlier in reversed(lines[:number]):
            if not earlier.strip().startswith(("//", "#[", "template")):
                break
            above.append(earlier.strip().lstrip("/ "))
        yield found["name"], end - opening - 1, " ".join(reversed(above))


def functions_of(path: Path) -> Iterator[tuple[str, int, str]]:
    if path.suffix == ".py":
        return python_functions(path)
    head = RUST_HEAD if path.suffix == ".rs" else C_HEAD
    return braced_functions(before_tests(path), head)


def test_functions_are_short_or_say_why() -> None:
    """Lines of the body, without the signature and the docstring."""
    offenders = []
    for path in sources(*FILE_LINES):
        offenders += [
            f"{path.relative_to(ROOT)}: `{name}` has {length} lines, {FUNCTION_LINES} wanted"
            for name, length, told in functions_of(path)
            if length > FUNCTION_LINES and not REASON.search(told)
        ]
    assert offenders == []


MEASURED = {
    ".py": (
        'def f():\n    """Told."""\n    a = 1\n    return a\n',
        ("f", 2, "Told."),
    ),
    ".rs": (
        "impl A {\n    /// Told.\n    pub(crate) fn f(\n        a: u32,\n    ) -> u32 {\n        a\n    }\n}\n",
        ("f", 1, "Told."),
    ),
    ".h": (
        "// Told.\ntemplate <class T>\nstatic inline T* f(T* a) {\n  g(a);\n  return a;\n}\nint g(int);\n",
        ("f", 2, "Told. template <class T>"),
    ),
    ".cu": (
        "void f() {\n  for (int i = 0; i < 2; ++i) {\n    g(i);\n  }\n}\n",
        ("f", 3, ""),
    ),
}


@pytest.mark.parametrize("suffix", MEASURED)
def test_a_function_is_measured(tmp_path: Path, suffix: str) -> None:
    text, expected = MEASURED[suffix]
    (tmp_path / f"source{suffix}").write_text(text)
    assert list(functions_of(tmp_path / f"source{suffix}")) == [expected]


def test_a_reason_is_seen() -> None:
    assert REASON.search(header('"""What it is.\n\nLonger than 300 lines, because it is one table.\n"""\nX = 1\n'))
    assert REASON.search(header("// What it is. Longer than most, because\n// it is one table.\n#pragma once\n"))
    assert not REASON.search(header("// What it is.\nint longer;\n// Longer than most, because.\n"))


# Widths ---------------------------------------------------------------------------------------------------------------


def test_lines_are_at_most_120_columns() -> None:
    """Code and prose. A row of a Markdown table can't be wrapped, and a line that is one long word neither."""
    offenders = []
    for path in tracked_files():
        if path.suffix in {".lock", ".svg", ".json"} or "assets" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            table = path.suffix == ".md" and line.startswith("|")
            if len(line) > COLUMNS and not table and " " in line.strip(" -/#*"):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} columns, {COLUMNS} wanted")
    assert offenders == []
