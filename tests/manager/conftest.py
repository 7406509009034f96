"""Both implementations under one set of tests, and the helpers that arrange and observe them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvpager.manager
import kvpager.reference

sys.path.append(str(Path(__file__).parent))  # `driver` and `shadow`, which several test files use

import driver

Make = Callable[..., Any]
CLASSES = {"rust": kvpager.manager.KVBlockManager, "reference": kvpager.reference.KVBlockManager}


@pytest.fixture(params=["rust", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    """The manager class: `make(num_blocks, block_size)`."""
    return CLASSES[request.param]


@pytest.fixture(params=["rust", "rust, every hash equal", "reference"])
def make_caching(request: pytest.FixtureRequest) -> Make:
    """The same with the prefix index on: `make_caching(num_blocks, block_size, **options)`."""
    hook = {"_equal_hashes": True} if "equal" in request.param else {}
    return partial(CLASSES[request.param.split(",")[0]], enable_prefix_caching=True, **hook)


@dataclass(frozen=True)
class BatchKit:
    """What it takes to make a `DecodeBatch` of one implementation."""

    manager: Make
    batch: Any
    buffers: Any


BATCH_KITS = {
    "rust": BatchKit(CLASSES["rust"], kvpager.manager.DecodeBatch, kvpager.manager.BatchBuffers),
    "reference": BatchKit(CLASSES["reference"], kvpager.reference.DecodeBatch, kvpager.reference.BatchBuffers),
}


@pytest.fixture(params=BATCH_KITS.values(), ids=BATCH_KITS)
def batch_kit(request: pytest.FixtureRequest) -> BatchKit:
    """`DecodeBatch` and its manager, of either implementation."""
    return request.param


@pytest.fixture
def batch_kits() -> list[BatchKit]:
    """All implementations, the reference last."""
    return list(BATCH_KITS.values())


@pytest.fixture
def arrange() -> Callable[[Any, Sequence[int]], None]:
    """Make a fresh manager hand out these blocks next, in this order, then the others."""

    def arrange(manager: Any, order: Sequence[int]) -> None:
        others = [block for block in range(manager.num_blocks) if block not in order]
        for _ in range(manager.num_blocks):
            manager.allocate_block()
        for block in reversed([*order, *others]):
            manager.free_block(block)
        assert manager.free_blocks == [*order, *others]

    return arrange


@pytest.fixture
def observe() -> Callable[[Any], dict[str, Any]]:
    """Everything a manager shows, after an audit, without changing it."""

    def observe(manager: Any) -> dict[str, Any]:
        assert manager.check_invariants() == []
        stats = manager.stats
        return {
            "free_blocks": manager.free_blocks,
            "states": manager.block_states(),
            "stats": {name: getattr(stats, name) for name in driver.STATS},
            "computed": [manager.num_computed_tokens(i) for i in manager.sequences],
            "sequences": {i: (s.sequence_length, s.block_table) for i, s in manager.sequences.items()},
            "usage": manager.usage,
            "fragmentation": manager.internal_fragmentation_tokens(),
        }

    return observe
