"""The pool: in which state each block is, and which copies are owed between blocks.

A block is in one of four states, decided in this order; the four always sum to the pool:

- *live*: somebody holds it (a table entry, a pin, or a caller who asked for it);
- *fenced*: nobody holds it, but something may still touch it: an owed copy has yet to read it, or, with fences, work on
  a device that was started before it was let go;
- *cached*: neither, and the prefix index still finds its content: it is kept until the space is needed;
- *free*: the rest.

The manager decides who holds what; here it is counted.
"""

from kvpager.errors import OutOfBlocksError
from kvpager.reference.eviction import EvictionPolicy
from kvpager.reference.index import PrefixIndex

NO_FENCE = -1  # the epoch of blocks that wait for no device


class BlockPool:
    """Reference counts, the free list, the fence and the ledger of owed copies of N blocks."""

    def __init__(self, num_blocks: int, index: PrefixIndex, policy: EvictionPolicy, *, fences: bool) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.cached = policy  # the cached blocks, in the order in which they will be evicted
        self.fences = fences
        self.ref_counts = [0] * num_blocks
        # The free list is a stack: the block freed last is handed out first (its memory is the warmest), and a fresh
        # pool hands out 0, 1, 2, ...
        self.free = list(range(num_blocks - 1, -1, -1))
        # Blocks without holders that are not free or cached yet, in the order in which they lost their last holder,
        # each with the epoch whose work may still touch it.
        self.fenced: dict[int, int] = {}
        self.epoch = 0  # the one that is open
        self.retired = -1  # all work up to this epoch is done
        # Copies not taken yet, destination -> source, in the order they came to be owed.
        self.owed: dict[int, int] = {}
        self.num_live = 0
        self.peak_live = 0
        self.num_copies = 0  # ever owed
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take now: the free ones, and the cached ones, which then are evicted."""
        return len(self.free) + len(self.cached)

    def require(self, needed: int, row: int | None = None, *, matched: int = 0, watermark: int = 0) -> None:
        """Refuse a call that needs more blocks than there are. Asked before anything is taken.

        `matched`: cached blocks that this very call is about to hold, which therefore can't be its victims.
        """
        available = self.num_available - matched
        if needed > available:
            raise OutOfBlocksError(needed, available, len(self.fenced), self.num_blocks, row, watermark)

    def take(self) -> int:
        """The next block, with its first holder: a free one, else the one that the policy gives up."""
        if self.free:
            block = self.free.pop()
        else:
            block = self.cached.oldest()
            self.cached.remove(block)
            self.cached.evicted(self.index.node_of(block).key[1])
            self.forget_content(block)
            self.num_evictions += 1
        self._hold(block)
        return block

    def share(self, block: int) -> None:
        """One holder more. A block without holders comes back to life, wherever it waited."""
        if self.ref_counts[block] > 0:
            self.ref_counts[block] += 1
            return
        if block in self.fenced:
            del self.fenced[block]
        else:
            self.cached.remove(block)
        self._hold(block)

    def drop(self, block: int) -> None:
        """One holder fewer. With the last one goes the copy into this block, if one is owed: nobody would read it.

        Whether the block is free or cached now, or has to wait, is found out by `settle`, at the end of the call.
        """
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.num_live -= 1
            self.owed.pop(block, None)
            self.fenced[block] = self.epoch if self.fences else NO_FENCE

    def settle(self) -> None:
        """Blocks without holders become cached or free, in the order in which they lost the last one.

        Those stay back that an owed copy has yet to read or that work of an epoch not retired may touch.
        """
        sources = set(self.owed.values())
        for block, epoch in list(self.fenced.items()):
            if block not in sources and epoch <= self.retired:
                del self.fenced[block]
                if block in self.index:
                    self.cached.add(block)
                else:
                    self.free.append(block)

    def copy_on_write(self, source: int) -> int:
        """Give a holder of `source` a block of his own instead, and owe the copy of its bytes."""
        destination = self.take()
        self.owed[destination] = source
        self.num_copies += 1
        self.drop(source)
        return destination

    def take_copies(self) -> list[tuple[int, int]]:
        """All owed (source, destination) pairs, oldest first; they are the caller's from now on.

        They run in the current epoch, so with fences a source without holders waits until that one is retired. (The
        destinations have holders; when those let go, that is fenced as always.)
        """
        pairs = [(source, destination) for destination, source in self.owed.items()]
        self.owed.clear()
        for source, _ in pairs:
            if source in self.fenced and self.fences:
                self.fenced[source] = self.epoch
        self.settle()
        return pairs

    def forget_content(self, block: int) -> None:
        """Drop the index node of `block`."""
        self.index.drop(block)
        self.cached.forget(block)

    def forget_all_content(self) -> None:
        """Drop every node. Cached blocks become free in the order of eviction, so the youngest is handed out first."""
        for block in list(self.cached):
            self.cached.remove(block)
            self.free.append(block)
        for block in self.index.blocks():
            self.cached.forget(block)
        self.cached.forget_evicted()
        self.index.clear()

    def state(self, block: int) -> str:
        """`live`, `fenced`, `cached` or `free`."""
        if self.ref_counts[block] > 0:
            return "live"
        if block in self.fenced:
            return "fenced"
        return "cached" if block in self.index else "free"

    def _hold(self, block: int) -> None:
        self.ref_counts[block] = 1
        self.num_live += 1
        self.peak_live = max(self.peak_live, self.num_live)
