"""What the README shows and the examples print is true: its code blocks and the small examples are run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README_PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", README_PYTHON, ids=range(len(README_PYTHON)))
def test_readme_code_runs_as_printed(code: str) -> None:
    """Each block runs in a fresh interpreter; a trailing `# comment` behind a print is what it must print."""
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in expected if line not in printed] == []


def test_readme_shows_the_three_uses() -> None:
    assert len(README_PYTHON) >= 3


def test_why_paged_prints_the_articles_numbers() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "why_paged.py"), "--requests", "40"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "7.3% of them used" in done.stdout  # 300 of 4,096 reserved slots
    assert "304 slots held" in done.stdout
    assert re.search(r"contiguous +AAAA\.\.\.CCCCDD\.\.\. +E is refused: 6 slots free, no 5 side by side", done.stdout)
    assert re.search(r"paged +AAAA\w*", done.stdout)
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    paged = next(row for name, row in rows.items() if name.startswith("paged"))
    maximum = next(row for name, row in rows.items() if name.startswith("maximum"))
    used = [float(re.search(r"([\d.]+)%", row).group(1)) for row in (maximum, paged)]  # type: ignore[union-attr]
    assert used[0] < 20 < 85 < used[1]
