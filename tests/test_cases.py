"""tests/cases.md says which bug cases are tested: held against the names of the tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CASES = (ROOT / "tests" / "cases.md").read_text()
LISTED = dict(re.findall(r"^\| ([BF]\d{3}) \|.*\| ([^|]+) \|$", CASES, flags=re.MULTILINE))


def ids_in_test_names() -> set[str]:
    python = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    rust = [path.read_text() for path in (ROOT / "rust").rglob("*.rs")]
    names = re.findall(r"def test_([bf]\d{3})_", "\n".join(python)) + re.findall(r"fn ([bf]\d{3})_", "\n".join(rust))
    return {name.upper() for name in names}


def test_every_case_that_is_said_to_be_tested_is() -> None:
    tested = {case for case, here in LISTED.items() if here == "tested"}
    assert tested - ids_in_test_names() == set()


def test_every_tested_case_is_listed_as_tested() -> None:
    assert {case for case in ids_in_test_names() if LISTED.get(case) != "tested"} == set()


def test_every_other_case_says_what_it_waits_for() -> None:
    assert [case for case, here in LISTED.items() if here != "tested" and not here.startswith("waits for ")] == []
    assert sum(case.startswith("B") for case in LISTED) == 81
