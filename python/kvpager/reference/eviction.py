"""Which cached block is given up when space is needed: three policies behind one small interface.

A policy orders the blocks that are cached (indexed, without holders, not fenced). A hit takes a block out of the order,
letting it go puts it back at the young end. Every operation is O(1): a dict keeps the order in which keys were added.

A prefix is useless without its beginning, so a block must never be given up before the blocks that continue it. Nobody
has to look for that: whoever holds a block holds all blocks before it too, and lets the last one go first. So

    of a block and one that continues it, both cached, the continuing one entered the order earlier,

and the oldest block is never continued by another. `Slru` and `S3Fifo` keep this in both of their queues (see there).
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

    def evicted(self, tokens: tuple[int, ...]) -> None:
        """A victim with these tokens is given up."""

    def indexed(self, block: int, parent: int | None, tokens: tuple[int, ...]) -> None:
        """`block` has a node for these tokens now, below that of the block `parent`; None: it is a first block."""

    def forget(self, block: int) -> None:
        """`block` has lost its content: what was noted about it is void."""

    def forget_evicted(self) -> None:
        """What was evicted before is void."""

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


class Lru(EvictionPolicy):
    """Least recently used first. Being young again is all that a hit brings; nothing else is noted about a block."""

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

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Slru(EvictionPolicy):
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


class S3Fifo(EvictionPolicy):
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Vinayak: FIFO queues are all you need for cache eviction, SOSP 2023).

    A block counts its hits, up to three. Released without one it enters the *small* queue, with one the *main* queue,
    which holds at most nine tenths of the pool. Beyond that main's hand looks at its oldest block: one that was hit
    goes round again with a hit fewer, one without goes to the young end of small. Victims are taken from small while
    there are any. A *ghost* remembers what was evicted by a fingerprint of its tokens, in as many places as the pool
    has blocks; what is indexed again under one that it remembers starts with a hit.

    Why a block is still never given up before one that continues it: a hit counts for the whole prefix, and the ghost's
    only below a block that has one, so a block never has more hits than the one it continues. So blocks in main leave
    it by (hits, place), the continuing one first: it stands before in that order when the other enters, and the hand
    keeps it so. (It sends the other round only as the oldest, so with more hits than the continuing one.) What is in
    small was not hit, and entered it in the order of release or demotion. And none in main continues one in small: that
    one was hit as well, and was demoted later.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_main = 9 * num_blocks // 10
        self._hits: dict[int, int] = {}  # of blocks that have any, whatever their state
        self._belongs_to_main: set[int] = set()  # there, or there when they were taken out
        self._small: dict[int, None] = {}
        self._main: dict[int, None] = {}
        self._ghost = [0] * num_blocks  # fingerprints, each at its place

    def add(self, block: int) -> None:
        """Enter the queue that the block belongs to; one block may have to leave main for that."""
        if block not in self._hits and block not in self._belongs_to_main:
            self._small[block] = None
            return
        self._belongs_to_main.add(block)
        self._main[block] = None
        if len(self._main) > self._max_main:
            demoted = self._turn()
            del self._main[demoted]
            self._belongs_to_main.remove(demoted)
            self._small[demoted] = None

    def remove(self, block: int) -> None:
        """Leave, from anywhere in either queue."""
        queue = self._small if block in self._small else self._main
        del queue[block]

    def oldest(self) -> int:
        """The oldest in small; if there is none, the one at which main's hand stops."""
        return next(iter(self._small)) if self._small else self._turn()

    def hit(self, block: int) -> None:
        """One hit more, up to three."""
        self._hits[block] = min(self._hits.get(block, 0) + 1, 3)

    def evicted(self, tokens: tuple[int, ...]) -> None:
        """Remember the fingerprint, in the place of another one."""
        print_ = fingerprint(tokens)
        self._ghost[print_ * len(self._ghost) >> 32] = print_

    def indexed(self, block: int, parent: int | None, tokens: tuple[int, ...]) -> None:
        """A hit for what was given up lately, if what it continues has one."""
        print_ = fingerprint(tokens)
        place = print_ * len(self._ghost) >> 32
        if self._ghost[place] == print_:
            self._ghost[place] = 0
            if parent is None or parent in self._hits:
                self.hit(block)

    def forget(self, block: int) -> None:
        """New content has no hits and belongs to no queue yet."""
        self._hits.pop(block, None)
        self._belongs_to_main.discard(block)

    def forget_evicted(self) -> None:
        """An empty ghost."""
        self._ghost = [0] * len(self._ghost)

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from sorted(self._main, key=lambda block: self._hits.get(block, 0))  # a round for each hit

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _turn(self) -> int:
        """The oldest block in main without a hit; those before it go round with a hit fewer."""
        while (oldest := next(iter(self._main))) in self._hits:
            self._hits[oldest] -= 1
            if self._hits[oldest] == 0:
                del self._hits[oldest]
            del self._main[oldest]
            self._main[oldest] = None
        return oldest


def fingerprint(tokens: tuple[int, ...]) -> int:
    """32 bits of these tokens, never 0: FNV-1a over the ids, then mixed."""
    mixed = 0x811C9DC5
    for token_id in tokens:
        mixed = (mixed ^ token_id) * 0x01000193 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    return mixed ^ mixed >> 13 | 1


# By name, the default first.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "slru": Slru, "s3fifo": S3Fifo}


def make_policy(name: str | None, num_blocks: int) -> EvictionPolicy:
    """The policy of this name; None: the default."""
    policy = POLICIES.get("lru" if name is None else name)
    if policy is None:
        *others, last = (f"`{each}`" for each in POLICIES)
        raise ConfigError(f"`eviction_policy`: wanted {', '.join(others)} or {last}, got {name}")
    return policy(num_blocks)
