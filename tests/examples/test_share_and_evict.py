"""examples/share_and_evict.py runs, and the pool it draws is the one that its titles speak of."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "share_and_evict.py"


@cache
def steps(policy: str) -> dict[str, tuple[list[str], str]]:
    """Title of each step -> its cells and its figures."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--policy", policy], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    _, *blocks = done.stdout.strip().split("\n\n")
    return {title: (cells.split(), figures.strip()) for title, cells, figures in map(str.splitlines, blocks)}


def find(told: dict[str, tuple[list[str], str]], words: str) -> tuple[list[str], str]:
    return next(step for title, step in told.items() if words in title)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_each_step_shows_what_it_says(policy: str) -> None:
    told = steps(policy)
    for cells, figures in told.values():
        live, cached, fenced, free = (int(count) for count in re.findall(r"(?:live|cached|fenced|free) (\d+)", figures))
        assert len(cells) == 12 == live + cached + fenced + free
        assert sum(cell[0].isalpha() for cell in cells) == live
        assert sorted(int(cell) for cell in cells if cell.isdigit()) == list(range(cached))
    assert find(told, "shares their blocks")[0][:4] == ["AB*", "AB*", "A*", "A"]
    assert "8 of 13 tokens found, 5 computed" in find(told, "shares their blocks")[1]
    assert find(told, "not a block is copied")[0][:4] == ["ABC*", "ABC*", "AC*", "AC"]
    assert "copy block 3 to 6" in find(told, "copied before the write")[1]
    assert "need 8 blocks, 4 free of 12" in find(told, "is refused")[1]
    assert find(told, "is refused")[0] == find(told, "never a block under another")[0]
    assert "8 of 12 tokens found" in find(told, "still there")[1]


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("slru", 8)])
def test_a_scan_flushes_lru_and_spares_what_slru_protects(policy: str, found: int) -> None:
    assert f"{found} of the instructions' 8 tokens found" in find(steps(policy), "strangers pass")[1]
