"""The pool: which block is live, fenced or free, and which copies are owed between blocks.

A block is *live* while somebody holds it (a table entry, or a caller who asked for it), *fenced* while nobody holds it
but an owed copy still has to read it, and *free* otherwise. The three always sum to the pool. The manager decides who
holds what; here it is counted.
"""

from kvpager.errors import OutOfBlocksError


class BlockPool:
    """Reference counts, the free list and the ledger of owed copies of N blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # The free list is a stack: the block freed last is handed out first (its memory is the warmest), and a fresh
        # pool hands out 0, 1, 2, ...
        self.free = list(range(num_blocks - 1, -1, -1))
        # Blocks without holders that are not free yet, in the order in which they lost their last holder (the values
        # mean nothing: a dict is a set that remembers the order).
        self.fenced: dict[int, None] = {}
        # Copies not taken yet, destination -> source, in the order they came to be owed.
        self.owed: dict[int, int] = {}
        self.num_live = 0
        self.peak_live = 0
        self.num_copies = 0  # ever owed

    def require(self, needed: int, row: int | None = None) -> None:
        """Refuse a call that needs more blocks than are free. Asked before anything is taken."""
        if needed > len(self.free):
            raise OutOfBlocksError(needed, len(self.free), len(self.fenced), self.num_blocks, row)

    def take(self) -> int:
        """The next free block, with its first holder."""
        block = self.free.pop()
        self.ref_counts[block] = 1
        self.num_live += 1
        self.peak_live = max(self.peak_live, self.num_live)
        return block

    def share(self, block: int) -> None:
        """One holder more."""
        self.ref_counts[block] += 1

    def drop(self, block: int) -> None:
        """One holder fewer. With the last one goes the copy into this block, if one is owed: nobody would read it.

        Whether the block is free now or has to wait is found out by `settle`, at the end of the call.
        """
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.num_live -= 1
            self.owed.pop(block, None)
            self.fenced[block] = None

    def settle(self) -> None:
        """Blocks without holders become free, first come first, except those that an owed copy has yet to read."""
        sources = set(self.owed.values())
        for block in [block for block in self.fenced if block not in sources]:
            del self.fenced[block]
            self.free.append(block)

    def copy_on_write(self, source: int) -> int:
        """Give one of several holders of `source` a block of his own instead, and owe the copy of its bytes."""
        destination = self.take()
        self.ref_counts[source] -= 1
        self.owed[destination] = source
        self.num_copies += 1
        return destination

    def take_copies(self) -> list[tuple[int, int]]:
        """All owed (source, destination) pairs, oldest first; they are the caller's from now on."""
        pairs = [(source, destination) for destination, source in self.owed.items()]
        self.owed.clear()
        self.settle()
        return pairs
