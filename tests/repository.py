"""What the tests about the whole repository read: its files, and a source without the tests it carries."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@cache
def tracked_files() -> tuple[Path, ...]:
    """What git tracks, or would if it were added; each file that is there."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("not a checkout of git")
    return tuple(path for line in done.stdout.splitlines() if (path := ROOT / line).is_file())


def before_tests(path: Path) -> str:
    """A source up to the unit tests that stand at its end."""
    return re.split(r"\n#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod \w+ \{", path.read_text())[0]
