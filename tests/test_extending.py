"""docs/extending.md says which files an addition touches: each list is held against the files that know its example."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import ROOT, before_tests

PAGE = (ROOT / "docs" / "extending.md").read_text()
SUFFIXES = {".py", ".pyi", ".rs", ".h", ".cpp", ".cu", ".cuh"}


@dataclass(frozen=True)
class Recipe:
    """A section of the page: the expression that finds its example, and the files it lists, in order."""

    title: str
    search: str
    files: tuple[str, ...]


def read_recipes(page: str) -> list[Recipe]:
    recipes = []
    for section in page.split("\n## ")[1:]:
        title, text = section.split("\n", 1)
        search = re.search(r"^Search: `(.*)`$", text, flags=re.MULTILINE)
        assert search is not None, f"`{title}` has no line with its search"
        files = re.findall(r"^\d+\. `([^`]+)`", text, flags=re.MULTILINE)
        recipes.append(Recipe(title, search[1], tuple(files)))
    return recipes


RECIPES = read_recipes(PAGE)


def sources() -> list[Path]:
    """What is shipped: the folders of sources, without the tests of the crates and without what only tests run."""
    found = [path for folder in ("python", "rust", "csrc", "build_backend") for path in (ROOT / folder).rglob("*")]
    return [
        path
        for path in found
        if path.suffix in SUFFIXES and not {"tests", "testing", "target", "_sources"} & set(path.parts)
    ]


def files_that_know(search: str) -> set[str]:
    """Sources whose text or path matches; a crate's unit tests, behind the code of a file, do not count."""
    expression = re.compile(search, flags=re.MULTILINE)
    found = set()
    for path in sources():
        name = str(path.relative_to(ROOT))
        if expression.search(name) or expression.search(before_tests(path)):
            found.add(name)
    return found


def test_there_is_a_recipe_for_each_kind() -> None:
    assert [recipe.title for recipe in RECIPES] == [
        "A KV dtype", "An attention option", "An operation on CPU and CUDA", "An operation on the CPU alone",
        "An eviction policy", "A model", "An attention package", "An instruction set", "An error",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_a_recipe_lists_the_files_that_know_its_example(recipe: Recipe) -> None:
    assert len(set(recipe.files)) == len(recipe.files)
    assert sorted(recipe.files) == sorted(files_that_know(recipe.search))


def test_a_further_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "csrc" / "slru").mkdir(parents=True)
    (tmp_path / "csrc" / "slru" / "by_path.h").write_text("int a;\n")
    (tmp_path / "csrc" / "by_text.h").write_text("// slru\n")
    (tmp_path / "csrc" / "by_tests.rs").write_text("fn f() {}\n\n#[cfg(test)]\nmod tests {\n    // slru\n}\n")
    (tmp_path / "csrc" / "testing").mkdir()
    (tmp_path / "csrc" / "testing" / "slru.h").write_text("// slru\n")
    assert files_that_know("slru") == {"csrc/slru/by_path.h", "csrc/by_text.h"}
