"""Who owns which block of a paged key/value cache: the tables, and how sequences come and go.

A language model keeps a key and a value for every token it has seen. How long a sequence will grow is not known when it
starts, so one contiguous buffer per sequence either wastes memory or must be moved. Operating systems solved this long
ago: cut the memory into *blocks* of `block_size` token positions and give every sequence a *block table*, its own map
from logical block (token position // block_size) to physical block. Any free block will do for any sequence:

    block_size 4, sequence 7 of length 7:   table [5, 2]   positions 0..3 in block 5, positions 4..6 in block 2
    the *slot* of position 6                = table[6 // 4] * 4 + 6 % 4 = 2 * 4 + 2 = 10

All of this is bookkeeping; keys and values lie elsewhere, at the slots that are handed out here. The manager is put
together from the files beside this one, each about one thing:

- `pool.py`: the states of a block, its holders, the free list, the copies owed;
- `appending.py`: slots for new tokens, and why nobody ever writes what another may read (copy-on-write);
- `index.py`, `admission.py`, `eviction.py`: finding what was computed before, and what is given up for it;
- `pins.py`: what is held on purpose, and what a device may still be busy with;
- here: sequences that start, fork, roll back and end.

Every call does all of its work or none: what could fail is worked out before anything changes. The costs are those of
the Rust version; this one is written to be read.
"""

from kvpager.errors import StateError
from kvpager.reference.admission import Committing
from kvpager.reference.arguments import COUNT, ID, check_length, read_natural
from kvpager.reference.index import clip_items
from kvpager.reference.pins import Pinning
from kvpager.reference.state import Sequence
from kvpager.reference.tensors import TensorFace


class KVBlockManager(TensorFace, Committing, Pinning):
    """The contract of ``kvpager.KVBlockManager``, which documents each call in full; for one thread at a time."""

    # Blocks for the caller --------------------------------------------------------------------------------------------

    def allocate_block(self) -> int:
        """Take a block for the caller himself, outside any sequence. O(1)."""
        self._pool.require(1)
        block = self._pool.take()
        self._held_by_caller.add(block)
        return block

    def free_block(self, block_id: int) -> None:
        """Give back a block got from `allocate_block`. O(1)."""
        block = self._read_block(block_id)
        if block not in self._held_by_caller:
            raise StateError(f"block {block} is not held by a caller")
        self._held_by_caller.remove(block)
        self._pool.drop(block)
        self._pool.settle()

    # Sequences --------------------------------------------------------------------------------------------------------

    def create_sequence(self, sequence_id: int) -> None:
        """Start an empty sequence. It holds no block until its first token. O(1)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        self._check_new(sequence_id)
        self._sequences[sequence_id] = Sequence()

    def release_sequence(self, sequence_id: int) -> None:
        """Forget a sequence and give its blocks back, last block first. O(blocks)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        sequence = self._find(sequence_id)
        if sequence_id in self._batch_rows:
            row = self._batch_rows[sequence_id]
            raise StateError(f"sequence {sequence_id} is row {row} of a batch, remove it first")
        self._cut(sequence, 0)
        del self._sequences[sequence_id]

    def truncate_sequence(self, sequence_id: int, n: int) -> None:
        """Roll back to the first `n` tokens (rejected drafts, say), surplus blocks last first. O(blocks freed).

        Everything known about later positions is forgotten, the rest of the prompt too. A tail that is shared or
        indexed is not copied now: the next append sees to that.
        """
        sequence_id, length = read_natural("sequence_id", sequence_id, ID), read_natural("n", n, COUNT)
        sequence = self._find(sequence_id)
        check_length("n", length, sequence.length)
        self._cut(sequence, length)

    def fork_sequence(self, parent: int, child: int, num_tokens: int | None = None) -> None:
        """Start `child` with the first `num_tokens` tokens of `parent` (default: all), sharing blocks. O(blocks).

        Nothing is copied now, the partly filled tail included: whoever appends to it first gets his own copy then.
        """
        parent, child = read_natural("parent", parent, ID), read_natural("child", child, ID)
        length = None if num_tokens is None else read_natural("num_tokens", num_tokens, COUNT)
        source = self._find(parent)
        self._check_new(child)
        length = source.length if length is None else length
        check_length("num_tokens", length, source.length)
        shared = source.table[: self._blocks_for(length)]
        self._check_readable(parent, source, shared)
        for block in shared:
            self._pool.share(block)
        self._sequences[child] = Sequence(
            length=length,
            computed=length,
            table=shared,
            namespace=source.namespace,
            items=clip_items(source.items, length),
            token_ids=source.token_ids[:length],
            num_indexed=min(source.num_indexed, length // self.block_size),
            stale=source.stale and length > 0,
        )

    def _check_readable(self, parent: int, source: Sequence, shared: list[int]) -> None:
        """Refuse a fork whose child would read what is not written: a copy not run yet, or tokens not committed."""
        for block in shared:
            if block in self._pool.owed:
                wait = f"block {block} still waits for its copy of block {self._pool.owed[block]}"
                raise StateError(f"sequence {parent} can't be forked here: {wait} (run `take_copies` first)")
        first = self._computed(source)  # the first token that is not committed, if there is one
        index = first // self.block_size
        if first < source.length and index < len(shared):
            lacks = f"block {shared[index]} holds tokens that are not committed"
            raise StateError(f"sequence {parent} can't be forked here: {lacks}")

    def _cut(self, sequence: Sequence, length: int) -> None:
        while len(sequence.table) > self._blocks_for(length):
            self._pool.drop(sequence.table.pop())
        sequence.forget_from(length, self.block_size)
        self._pool.settle()

    def take_copies(self) -> list[tuple[int, int]]:
        """The owed (source, destination) pairs in the order they came to be owed, now the caller's to run. O(pairs)."""
        return self._pool.take_copies()
