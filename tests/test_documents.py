"""What the documents point to is there: links, headings, and the paths in backticks."""

import re
from functools import cache
from pathlib import Path

import pytest

from kvpager.ops.op import OPS

ROOT = Path(__file__).parent.parent
FOLDERS = ("benches/", "build_backend/", "csrc/", "docs/", "examples/", "fuzz/", "python/", "rust/", "tests/", "tools/")
SOURCES = {".py", ".pyi", ".rs", ".h", ".cpp", ".cu", ".cuh"}
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benches/*.md", "tests/*.md", "csrc/**/*.md")
    for path in ROOT.glob(pattern)
)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@cache
def all_paths() -> str:
    """Every file of the folders, one a line, each line begun and ended by a slash."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "target" not in path.parts)
    return "\n".join(f"/{path.relative_to(ROOT)}/" for path in files)


def is_there(word: str) -> bool:
    """Whether a path is there: from the root if it begins with a folder of the repository, else in any folder."""
    if word.startswith(FOLDERS):
        return any(ROOT.glob(word.rstrip("/")))
    return re.search(f"/{re.escape(word)}/".replace(r"\*", "[^/]*"), all_paths()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_are_there(page: Path) -> None:
    """Words in backticks that begin with a folder of the repository or end as a source does, also behind a command."""
    broken = []
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        for word in text.split():
            is_path = word.startswith(FOLDERS) or re.fullmatch(r"[\w./*-]+\.(py|rs|h|cpp|cu|cuh|md)", word)
            if is_path and "<" not in word and not is_there(word) and not (ROOT / word).exists():
                broken.append(word)
    assert broken == []


def test_paths_in_sources_are_there() -> None:
    """The same of whole paths in the comments and texts of sources; tests make up paths, so they are left out."""
    path_of_a_file = re.compile(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})[\w./-]+\.(?:py|rs|h|cpp|cu|cuh|md)\b")
    broken = {}
    for folder in ("python", "rust", "csrc", "build_backend", "benches", "tools", "examples", "fuzz"):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in SOURCES and not {"target", "_sources"} & set(source.parts):
                named = set(path_of_a_file.findall(source.read_text()))
                broken |= {
                    word: str(source.relative_to(ROOT))
                    for word in named
                    if not any((folder / word).exists() for folder in source.parents)  # a crate has folders of its own
                }
    assert broken == {}


def test_every_schema_is_documented() -> None:
    """docs/design/data-plane.md has each op's schema as it is registered, with the dimensions beside it."""
    page = (ROOT / "docs" / "design" / "data-plane.md").read_text()
    documented = re.sub(r"\s+", " ", re.sub(r"(?<=\w)\[[A-Z][^\]]*\]( (float32|int32))?", "", page)).replace("( ", "(")
    assert [name for name, op in OPS.items() if f"{name}{op.schema}" not in documented] == []


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("docs/design.md", True),
        ("csrc/**/*.cuh", True),
        ("docs/no such.md", False),
        ("ops/__init__.py", True),
        ("*.isa.cpp", True),
        ("design.py", False),
    ],
)
def test_a_path_is_looked_for(word: str, found: bool) -> None:
    assert is_there(word) == found
