"""The scripts of benches/ read what the tools write, and judge it rightly. Nothing is timed here."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benches_{name}", BENCHES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


instructions = load("instructions")
metadata = load("metadata_python")

KEPT = {"toolchain": "rustc 1", "instructions_per_operation": {"append": 100.0, "release": 50.0}}


def verdicts(**counted: float) -> dict[str, tuple[str, bool]]:
    _, *lines = instructions.compare(KEPT, counted, "rustc 1")
    return {line.split()[0]: (line, passed) for line, passed in lines}


def test_growth_above_five_per_cent_fails() -> None:
    told = verdicts(append=104.9, release=52.6)
    assert told["append"][1]
    assert "+4.9%" in told["append"][0]
    assert not told["release"][1]
    assert "GREW" in told["release"][0]


def test_a_fall_passes_and_asks_to_be_kept() -> None:
    line, passed = verdicts(append=90.0)["append"]
    assert passed
    assert "instructions-update" in line


def test_a_row_that_is_not_kept_fails() -> None:
    line, passed = verdicts(step=1.0)["step"]
    assert not passed
    assert "not kept yet" in line


def test_counts_of_another_compiler_are_refused() -> None:
    with pytest.raises(instructions.CannotCountError, match="the kept counts are of rustc 1, this is rustc 2"):
        list(instructions.compare(KEPT, {"append": 1.0}, "rustc 2"))


def test_callgrinds_totals_are_read() -> None:
    text = "version: 1\nevents: Ir Dr D1mr\nfn=(1)\n16 400\ntotals: 1200 34\n"
    assert instructions.parse_callgrind(text) == {"Ir": 1200, "Dr": 34, "D1mr": 0}
    with pytest.raises(instructions.CannotCountError, match="no totals"):
        instructions.parse_callgrind("version: 1\n")


def test_missing_valgrind_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda _: None)
    with pytest.raises(instructions.CannotCountError, match="`valgrind` is not installed"):
        instructions.count(Path("bench"), "--count", "append")


def rust_rows() -> list[str]:
    """The keys in workloads.rs."""
    source = (BENCHES / "metadata" / "workloads.rs").read_text(encoding="utf-8")
    return re.findall(r'Self::\w+ => "(\w+)",', source)


def test_the_scripts_know_the_rows_of_the_bench() -> None:
    assert list(instructions.ROWS) == rust_rows()
    assert set(metadata.CALLS) == set(rust_rows())
    kept = json.loads(instructions.KEPT.read_text(encoding="utf-8"))
    assert list(kept["instructions_per_operation"]) == rust_rows()


def test_the_workloads_are_the_same_in_both_languages() -> None:
    source = (BENCHES / "metadata" / "workloads.rs").read_text(encoding="utf-8")
    constants = dict(re.findall(r"const (\w+): usize = ([\d_]+);", source))
    for name in ("BLOCK_SIZE", "BATCH", "NUM_STEPS", "APPEND_POOL", "NUM_PROMPTS", "PROMPT_TOKENS", "SHARED_TOKENS",
                 "HOLDING_POOL", "EVICTING_POOL", "WINDOW", "MAX_BLOCKS", "DECODE_STEPS"):  # fmt: skip
        assert getattr(metadata, name) == int(constants[name]), name


def test_what_python_adds_is_held_against_the_bar() -> None:
    core = [dict.fromkeys(metadata.CALLS, 1.0)] * 3
    turns = {
        "numpy": [dict.fromkeys(metadata.CALLS, 2.6)] * 3,
        "torch": [dict.fromkeys(metadata.CALLS, 5.2)] * 3,
        "lists": [dict.fromkeys(metadata.CALLS, 9.0)] * 3,
    }
    rows = {(row.row, row.kind): row for row in metadata.judge(core, turns)}
    assert rows["append", "numpy"].met is False  # 1.6 µs in one call
    assert rows["prompts_held", "numpy"].met is True  # in three
    assert rows["append", "torch"].met is False  # 2.6 µs for two tensors
    assert rows["decode_rebuild", "torch"].met is True  # for six
    assert rows["append", "lists"].met is None
    assert ("release", "lists") not in rows
    table = metadata.table(list(rows.values()))
    assert re.search(r"append +numpy +1 +2 +2\.600 .* 1\.600 +a call +1\.600 +1\.0 +MISSED", table)
    assert re.search(r"append +torch +1 +2 +5\.200 .* 4\.200 +a tensor +1\.300 +1\.2 +MISSED", table)
