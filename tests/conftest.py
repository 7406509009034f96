"""What several folders of tests share: the checkpoints of `checkpoints.py`, and one thread for small models."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
sys.path.append(str(TESTS))  # `checkpoints`, imported when the first test asks: it loads transformers


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints with random weights, and runners over them: a `checkpoints.Lab`."""
    from checkpoints import Lab

    return Lab(tmp_path_factory)


@pytest.fixture(scope="session")
def transformers_trace() -> Callable[..., Any]:
    """Records what transformers computes along given tokens: `checkpoints.trace_transformers`."""
    from checkpoints import trace_transformers

    return trace_transformers


@pytest.fixture(scope="module", autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread but for the operations' tests: a small model's second thread would only wait for the first."""
    threads = torch.get_num_threads()
    if not request.path.is_relative_to(TESTS / "ops"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
