"""Both implementations under one set of tests, and the helpers that arrange and observe them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import kvpager.block_manager
import kvpager.reference

Make = Callable[..., Any]


@pytest.fixture(params=["rust", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    """The manager class: `make(num_blocks, block_size)`."""
    classes = {"rust": kvpager.block_manager.KVBlockManager, "reference": kvpager.reference.KVBlockManager}
    return classes[request.param]


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
        names = ("num_blocks", "live", "cached", "fenced", "free", "num_sequences", "num_copies", "peak_live")
        return {
            "free_blocks": manager.free_blocks,
            "stats": {name: getattr(stats, name) for name in names},
            "sequences": {i: (s.sequence_length, s.block_table) for i, s in manager.sequences.items()},
            "usage": manager.usage,
            "fragmentation": manager.internal_fragmentation_tokens(),
        }

    return observe
