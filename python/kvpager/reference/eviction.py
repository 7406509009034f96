"""Which cached block is given up when space is needed: two policies behind one small interface.

A policy orders the blocks that are cached (indexed, without holders, not fenced). A hit takes a block out of the order,
letting it go puts it back at the young end. Every operation is O(1): a dict keeps the order in which keys were added.

A prefix is useless without its beginning, so a block must never be given up before the blocks that continue it. Nobody
has to look for that: whoever holds a block holds all blocks before it too, and lets the last one go first. So

    of a block and one that continues it, both cached, the continuing one entered the order earlier,

and the oldest block is never continued by another. `Slru` keeps this in both of its segments (see there).
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from kvpager.errors import ConfigError


class EvictionPolicy(Protocol):
    """An order of the cached blocks, oldest first."""

    def add(self, block: int) -> None:
        """`block` is cached from now on, and the youngest."""

    def remove(self, block: int) -> None:
        """`block` is not cached any more: it was hit, or is about to be given up."""

    def oldest(self) -> int:
        """The next victim."""

    def hit(self, block: int) -> None:
        """A request found the content of `block`."""

    def forget(self, block: int) -> None:
        """`block` has lost its content: what was noted about it is void."""

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._order: dict[int, None] = {}

    def add(self, block: int) -> None:
        """Enter at the young end."""
        self._order[block] = None

    def remove(self, block: int) -> None:
        """Leave, from anywhere in the order."""
        del self._order[block]

    def oldest(self) -> int:
        """The block that was let go longest ago."""
        return next(iter(self._order))

    def hit(self, block: int) -> None:
        """Being young again is all that a hit brings, and `add` sees to that."""

    def forget(self, block: int) -> None:
        """Nothing is noted about blocks."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Slru:
    """Segmented LRU (Karedla, Love, Wherry: Caching strategies to improve disk system performance, IEEE Computer 1994).

    One pass over many prompts that never come back (a scan) pushes everything out of an LRU cache. Here a block starts
    on *probation*, and only a hit makes it *protected*; victims are taken from probation while there are any. The
    protected segment holds at most two thirds of the pool (the paper found 60 to 80 % best): what overflows goes back
    to the young end of probation, the oldest first.

    Why a block is still never given up before one that continues it: a hit marks the whole prefix, so a marked block
    follows marked ones only; the mark is lost in the order of age, in which the continuing block comes first, and both
    then enter probation in that order. So of the two either both are in one segment, the continuing one older, or the
    continuing one alone is on probation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_protected = 2 * num_blocks // 3
        self._hit: set[int] = set()  # whatever their state
        self._probation: dict[int, None] = {}
        self._protected: dict[int, None] = {}

    def add(self, block: int) -> None:
        """Enter the segment that the block has earned; the oldest protected block may have to leave its own."""
        if block not in self._hit:
            self._probation[block] = None
            return
        self._protected[block] = None
        if len(self._protected) > self._max_protected:
            demoted = next(iter(self._protected))
            del self._protected[demoted]
            self._hit.remove(demoted)
            self._probation[demoted] = None

    def remove(self, block: int) -> None:
        """Leave, from anywhere in either segment."""
        segment = self._probation if block in self._probation else self._protected
        del segment[block]

    def oldest(self) -> int:
        """The oldest on probation; if there is none, the oldest protected one."""
        return next(iter(self))

    def hit(self, block: int) -> None:
        """Protected, when it is let go."""
        self._hit.add(block)

    def forget(self, block: int) -> None:
        """New content has to earn its own protection."""
        self._hit.discard(block)

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "slru": Slru}  # by name, the default first


def make_policy(name: str | None, num_blocks: int) -> EvictionPolicy:
    """The policy of this name; None: the default."""
    policy = POLICIES.get("lru" if name is None else name)
    if policy is None:
        *others, last = (f"`{each}`" for each in POLICIES)
        raise ConfigError(f"`eviction_policy`: wanted {', '.join(others)} or {last}, got {name}")
    return policy(num_blocks)
