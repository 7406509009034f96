"""Pins and fences: two reasons, besides the tables, why a block is not given up.

A *pin* is the caller's hold on a cached prefix: a system prompt that must not be evicted however full the pool gets.
Its blocks are live. A *fence* is about time: work on a device is late, and a block that is let go here may still be
read or written there. With fences, such a block waits until the caller says that the work is done.
"""

from collections.abc import Iterable
from typing import Any

from kvpager.errors import ArgumentError, StateError
from kvpager.reference.admission import Admitting
from kvpager.reference.arguments import MAX_INT64, read_int, read_items, read_text, read_token_ids
from kvpager.reference.index import Item


class Pinning(Admitting):
    """`pin_prefix` and `unpin`; `advance_epoch` and `retire`."""

    def pin_prefix(
        self, token_ids: Any, *, salt: str | None = None, adapter: str | None = None, items: Iterable[Item] = ()
    ) -> int:
        """Hold the blocks of the longest cached prefix, up to the last full one; the id of the pin, never used twice.

        At most `max_pinned_blocks` different blocks may be pinned. O(tokens compared).
        """
        ids = read_token_ids(token_ids)
        namespace = read_text("salt", salt), read_text("adapter", adapter)
        matched = self._match(namespace, read_items(items, len(ids)), ids, len(ids) // self.block_size)
        pinned = self._pinned_blocks()
        more = sum(node.block not in pinned for node in matched)
        if len(pinned) + more > self._max_pinned:
            limit = f"`max_pinned_blocks`: {len(pinned)} of {self._max_pinned} are pinned"
            raise StateError(f"pinning {more} more blocks exceeds {limit}")
        for node in matched:
            self._pool.share(node.block)
        pin = self._next_pin
        self._next_pin += 1
        self._pins[pin] = [node.block for node in matched]
        return pin

    def unpin(self, pin: int) -> None:
        """Let go of what a pin holds, last block first. O(blocks)."""
        number = read_int("pin", pin)
        if number not in self._pins:
            raise ArgumentError("pin", "the id of a pin that is held", number)
        for block in reversed(self._pins.pop(number)):
            self._pool.drop(block)
        self._pool.settle()

    def _pinned_blocks(self) -> set[int]:
        return {block for blocks in self._pins.values() for block in blocks}

    def advance_epoch(self) -> int:
        """Close the current epoch; its number. What is let go from now on belongs to the next one. O(1)."""
        self._pool.epoch += 1
        return self._pool.epoch - 1

    def retire(self, epoch: int) -> None:
        """Say that all work up to the end of `epoch` is done: what it fenced is cached or free now. O(those blocks)."""
        last = self._pool.epoch - 1
        number = read_int("epoch", epoch)
        if not 0 <= number <= min(last, MAX_INT64):
            wanted = f"a closed epoch, 0 to {last}" if last >= 0 else "a closed epoch, none is closed yet"
            raise ArgumentError("epoch", wanted, number)
        self._pool.retired = max(self._pool.retired, number)
        self._pool.settle()
