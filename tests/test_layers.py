"""The direction of imports, docs/design/layers.md: a module imports what its layer may reach, never upward."""

import ast
import tomllib
from pathlib import Path

import pytest

import kvpager

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "kvpager"

# Layer -> the layers right below it. A module may import whatever its layer leads to.
BELOW = {
    "errors": set(),
    "kinds": set(),
    "records": {"errors"},
    "cache_dtypes": {"errors"},
    "config": {"errors", "kinds", "cache_dtypes", "_core"},
    "_core": {"errors"},
    "manager": {"_core", "kinds", "records"},
    "scheduler": {"manager", "config"},
    "reference": {"records"},
    "native": {"errors"},
    "ops": {"native", "kinds", "cache_dtypes"},
    "huge_pages": {"errors"},
    "cache": {"ops", "config", "huge_pages"},
    "models": {"cache"},
    "loader": {"models", "huge_pages"},
    "tokenizer": {"config"},
    "sampling": {"ops", "kinds"},
    "runner": {"manager", "models"},
    "engine": {"scheduler", "runner", "sampling", "tokenizer", "loader"},
    "verify": {"engine"},
    "cli": {"verify"},
    "__main__": {"cli"},
}


def reachable(layer: str) -> set[str]:
    found: set[str] = set()
    todo = [layer]
    while todo:
        below = BELOW[todo.pop()] - found
        found |= below
        todo.extend(below)
    return found


def layer_of(module: str) -> str:
    """`kvpager.ops.tensors` -> `ops`; the package front itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(code: str, package: str) -> set[str]:
    """Every `kvpager...` module that the code of a file in `package` imports, also inside functions and type checks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            # `from kvpager import ops` names a submodule, `from kvpager.ops import x` a member
            found |= {f"kvpager.{alias.name}" for alias in node.names} if base == "kvpager" else {base}
    return {name for name in found if name == "kvpager" or name.startswith("kvpager.")}


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    module = ".".join(["kvpager", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    layer = layer_of(module)
    assert layer in BELOW, f"`{layer}` is no layer of docs/design/layers.md"
    allowed = reachable(layer) | {layer}
    package = ".".join(["kvpager", *path.relative_to(PACKAGE).parent.parts])
    for imported in imports_of(path.read_text(), package):
        target = layer_of(imported)
        if layer == "cli" and target in {"__version__", "native"}:
            continue
        assert target in allowed, f"`{module}` imports `{imported}`, upward or sideways"


@pytest.mark.parametrize(
    "code",
    [
        "import kvpager.engine",
        "from kvpager import engine",
        "from kvpager.engine import LLM",
        "from ..engine import LLM",
        "from .. import engine",
        "def f():\n    from kvpager.engine import LLM",
    ],
)
def test_an_upward_import_is_seen_however_it_is_written(code: str) -> None:
    assert {layer_of(name) for name in imports_of(code, "kvpager.ops")} == {"engine"}
    assert "engine" not in reachable("ops")


def test_type_checkers_see_the_public_names_that_are_imported_late() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == kvpager._HOMES


def test_every_layer_exists() -> None:
    present = {layer_of(f"kvpager.{path.relative_to(PACKAGE).parts[0].removesuffix('.py')}") for path in SOURCES}
    assert set(BELOW) - {"_core"} <= present


def test_the_documents_name_every_layer() -> None:
    described = (ROOT / "docs" / "design" / "layers.md").read_text()
    assert {layer for layer in BELOW if f"`{layer}`" not in described} == {"__main__"}


def test_the_core_crate_knows_no_python() -> None:
    manifest = tomllib.loads((ROOT / "rust" / "kvpager-core" / "Cargo.toml").read_text())
    assert set(manifest["dependencies"]) <= {"thiserror", "rustc-hash"}
    for path in (ROOT / "rust" / "kvpager-core" / "src").rglob("*.rs"):
        assert "unsafe" not in path.read_text().replace("forbid(unsafe_code)", ""), path
