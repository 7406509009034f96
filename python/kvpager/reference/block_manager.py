"""Who owns which block of a paged key/value cache: pool, tables, copy-on-write.

A language model keeps a key and a value for every token it has seen. How long a sequence will grow is not known when it
starts, so one contiguous buffer per sequence either wastes memory or must be moved. Operating systems solved this long
ago: cut the memory into *blocks* of `block_size` token positions and give every sequence a *block table*, its own map
from logical block (token position // block_size) to physical block. Any free block will do for any sequence:

    block_size 4, sequence 7 of length 7:   table [5, 2]   positions 0..3 in block 5, positions 4..6 in block 2
    the *slot* of position 6                = table[6 // 4] * 4 + 6 % 4 = 2 * 4 + 2 = 10

This file and `pool.py` do the bookkeeping alone; keys and values lie elsewhere, at the slots that are handed out here.

- The **pool** counts the holders of each block and keeps the free list.
- The **tables** say which blocks a sequence holds. Two sequences may name the same block: a fork shares its parent's
  blocks instead of copying them.
- **Owed copies**: nobody may write into a shared block, for the other holder would read the new bytes. So an append
  into a shared tail takes a new block, and owes a copy (source, destination) that the caller runs before he writes.

Every call does all of its work or none: what could fail is worked out before anything changes. The costs are those of
the Rust version; this one is written to be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpager.errors import (
    ArgumentError,
    ConfigError,
    DuplicateSequenceError,
    SlotError,
    StateError,
    UnknownSequenceError,
)
from kvpager.reference.arguments import COUNT, ID, MAX_INT64, check_length, read_int, read_natural, read_position
from kvpager.reference.audit import find_broken_invariants
from kvpager.reference.pool import BlockPool
from kvpager.reference.snapshots import PoolStats, SequenceState, SequenceView
from kvpager.reference.tensors import TensorFace

MAX_BLOCKS = 2**31 - 1  # block ids are int32 in the tables that kernels read


@dataclass(slots=True)
class _Sequence:
    """`table` has one entry for every started block, so always ceil(length / block_size) of them."""

    length: int = 0
    table: list[int] = field(default_factory=list)


class KVBlockManager(TensorFace):
    """The contract of ``kvpager.KVBlockManager``, which documents each call in full; for one thread at a time."""

    def __init__(self, num_physical_blocks: int, block_size: int, *, enable_prefix_caching: bool = False) -> None:
        """Create a pool of N = `num_physical_blocks` free blocks of S = `block_size` token positions each."""
        for argument, value in (("num_physical_blocks", num_physical_blocks), ("block_size", block_size)):
            if not 0 <= read_int(argument, value) <= MAX_INT64:
                raise ConfigError(f"`{argument}`: wanted 1 to 2^63-1, got {value}")
        if not 1 <= num_physical_blocks <= MAX_BLOCKS:
            raise ConfigError(f"`num_physical_blocks`: wanted 1 to {MAX_BLOCKS} blocks, got {num_physical_blocks}")
        if block_size < 1:
            raise ConfigError(f"`block_size`: wanted at least 1 token, got {block_size}")
        if num_physical_blocks * block_size > MAX_INT64:
            shape = f"{num_physical_blocks} blocks of {block_size} tokens"
            raise ConfigError(f"{shape}: the slots don't fit a 64-bit integer")
        if enable_prefix_caching:
            raise ConfigError("`enable_prefix_caching`: arrives with the prefix index, pass False")
        self.num_blocks = num_physical_blocks
        self.block_size = block_size
        self._pool = BlockPool(num_physical_blocks)
        self._sequences: dict[int, _Sequence] = {}
        self._held_by_caller: set[int] = set()

    # Blocks for the caller --------------------------------------------------------------------------------------------

    def allocate_block(self) -> int:
        """Take a block for the caller himself, outside any sequence. O(1)."""
        self._pool.require(1)
        block = self._pool.take()
        self._held_by_caller.add(block)
        return block

    def free_block(self, block_id: int) -> None:
        """Give back a block got from `allocate_block`. O(1)."""
        wanted = f"a block in 0..{self.num_blocks - 1}"
        block = read_natural("block_id", block_id, wanted)
        if block >= self.num_blocks:
            raise ArgumentError("block_id", wanted, block)
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
        self._sequences[sequence_id] = _Sequence()

    def append_token(self, sequence_id: int) -> int:
        """Give the next position of a sequence its slot. O(1)."""
        return self.append_tokens(sequence_id, 1)[0]

    def append_tokens(self, sequence_id: int, n: int) -> list[int]:
        """Give the next `n` positions their slots. O(n)."""
        work = [(read_natural("sequence_id", sequence_id, ID), read_natural("n", n, COUNT))]
        self._find(sequence_id)
        needed, _ = self._demand(work)
        self._pool.require(needed)
        return self._append_rows(work)

    def release_sequence(self, sequence_id: int) -> None:
        """Forget a sequence and give its blocks back, last block first. O(blocks)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        self._cut(self._find(sequence_id), 0)
        del self._sequences[sequence_id]

    def truncate_sequence(self, sequence_id: int, n: int) -> None:
        """Roll back to the first `n` tokens (rejected drafts, say), surplus blocks last first. O(blocks freed)."""
        sequence_id, length = read_natural("sequence_id", sequence_id, ID), read_natural("n", n, COUNT)
        sequence = self._find(sequence_id)
        check_length("n", length, sequence.length)
        self._cut(sequence, length)

    def commit(self, sequence_id: int, n: int) -> None:
        """Say that the first `n` tokens are written. Without the prefix index that only checks the number."""
        sequence_id, committed = read_natural("sequence_id", sequence_id, ID), read_natural("n", n, COUNT)
        length = self._find(sequence_id).length
        if committed != length:  # from the computed tokens to the length: here the two are one
            raise ArgumentError("n", f"the {length} tokens of the sequence", committed)

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
        for block in shared:
            if block in self._pool.owed:  # the child would read what is not copied yet
                wait = f"block {block} still waits for its copy of block {self._pool.owed[block]}"
                raise StateError(f"sequence {parent} can't be forked here: {wait} (run `take_copies` first)")
        for block in shared:
            self._pool.share(block)
        self._sequences[child] = _Sequence(length, shared)

    def _cut(self, sequence: _Sequence, length: int) -> None:
        while len(sequence.table) > self._blocks_for(length):
            self._pool.drop(sequence.table.pop())
        sequence.length = length
        self._pool.settle()

    # Appending: first count, then do ----------------------------------------------------------------------------------

    def _demand(self, rows: list[tuple[int, int]]) -> tuple[int, int | None]:
        """Count the blocks these appends would take, and name the first row for which the pool has too few.

        The rows are played through on paper, for an earlier row changes what a later one needs: a sequence named twice
        goes on from its new length, and of r sequences that share a tail only r - 1 need a copy, as the last one then
        has the tail to itself.
        """
        lengths: dict[int, int] = {}  # of sequences that an earlier row appended to; their tails are their own
        holders: dict[int, int] = {}  # of tails that are shared at the start
        needed, lacking = 0, None
        for row, (sequence_id, count) in enumerate(rows):
            if count == 0:
                continue
            sequence = self._sequences[sequence_id]
            length = lengths.get(sequence_id, sequence.length)
            if length % self.block_size != 0 and sequence_id not in lengths:
                tail = sequence.table[-1]
                if holders.setdefault(tail, self._pool.ref_counts[tail]) > 1:
                    holders[tail] -= 1
                    needed += 1
            needed += self._blocks_for(length + count) - self._blocks_for(length)
            lengths[sequence_id] = length + count
            if lacking is None and needed > len(self._pool.free):
                lacking = row
        return needed, lacking

    def _append_rows(self, rows: list[tuple[int, int]]) -> list[int]:
        """Append `count` tokens for each (sequence id, count), in order; the slots of all of them."""
        return [self._append_one(self._sequences[sequence_id]) for sequence_id, count in rows for _ in range(count)]

    def _append_one(self, sequence: _Sequence) -> int:
        offset = sequence.length % self.block_size
        if offset == 0:  # a block boundary: the first token of a new block
            sequence.table.append(self._pool.take())
        elif self._pool.ref_counts[sequence.table[-1]] > 1:  # a shared tail: the entry is replaced, the table not grown
            sequence.table[-1] = self._pool.copy_on_write(sequence.table[-1])
        sequence.length += 1
        return sequence.table[-1] * self.block_size + offset

    def take_copies(self) -> list[tuple[int, int]]:
        """The owed (source, destination) pairs in the order they came to be owed, now the caller's to run. O(pairs)."""
        return self._pool.take_copies()

    # Questions --------------------------------------------------------------------------------------------------------

    def locate(self, sequence_id: int, position: int) -> tuple[int, int]:
        """(physical block, offset in it) of a token that exists. O(1)."""
        sequence_id, position = read_natural("sequence_id", sequence_id, ID), read_position("position", position)
        sequence = self._find(sequence_id)
        if position >= sequence.length:
            raise SlotError(f"position {position} is past the {sequence.length} tokens of sequence {sequence_id}")
        return sequence.table[position // self.block_size], position % self.block_size

    def slots(self, sequence_id: int, start: int, stop: int) -> list[int]:
        """Slots of the existing tokens `start` to `stop` (exclusive). O(stop - start)."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        start, stop = read_position("start", start), read_position("stop", stop)
        length = self._find(sequence_id).length
        if not start <= stop <= length:
            wrong = f"positions {start} to {stop} are not a range"
            raise SlotError(f"{wrong} of the {length} tokens of sequence {sequence_id}")
        places = [self.locate(sequence_id, position) for position in range(start, stop)]
        return [block * self.block_size + offset for block, offset in places]

    def sequence_length(self, sequence_id: int) -> int:
        """Tokens that own a slot: the position of the next append."""
        return self._find(sequence_id).length

    def block_table(self, sequence_id: int) -> list[int]:
        """The physical blocks of a sequence, logical block 0 first."""
        return list(self._find(sequence_id).table)

    def sequence_ids(self) -> list[int]:
        """Ids of all sequences, ascending."""
        return sorted(self._sequences)

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """All sequences by id: a read-only view that gives frozen snapshots."""
        return SequenceView(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that exist."""
        return len(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take now."""
        return len(self._pool.free)

    @property
    def free_blocks(self) -> list[int]:
        """Ids of the free blocks in the order in which they will be handed out."""
        return self._pool.free[::-1]

    @property
    def usage(self) -> float:
        """Live blocks as a fraction of the pool."""
        return self._pool.num_live / self.num_blocks

    @property
    def stats(self) -> PoolStats:
        """Counters of this moment; none of them is counted on request."""
        return PoolStats(
            num_blocks=self.num_blocks,
            live=self._pool.num_live,
            cached=0,  # the prefix index will keep released blocks findable
            fenced=len(self._pool.fenced),
            free=len(self._pool.free),
            num_sequences=len(self._sequences),
            num_copies=self._pool.num_copies,
            peak_live=self._pool.peak_live,
        )

    def internal_fragmentation_tokens(self, sequence_id: int | None = None) -> int:
        """Positions of live blocks that hold no token, each block once; or of one sequence's blocks.

        Only the last block of a sequence can have any, so the waste is below `block_size` per sequence, whatever the
        lengths: that is what paging buys.
        """
        if sequence_id is not None:
            sequence = self._find(sequence_id)
            return len(sequence.table) * self.block_size - sequence.length
        filled: dict[int, int] = {}  # a shared block is as full as its longest holder makes it
        for sequence in self._sequences.values():
            for index, block in enumerate(sequence.table):
                tokens = min(sequence.length - index * self.block_size, self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        return self._pool.num_live * self.block_size - sum(filled.values())

    def check_invariants(self) -> list[str]:
        """Audit everything; one sentence for each thing that is broken, none if all is sound. O(blocks + entries)."""
        return find_broken_invariants(self)

    def invariants_ok(self) -> bool:
        """Whether the audit finds nothing."""
        return not self.check_invariants()

    def __repr__(self) -> str:
        pool = self._pool
        counts = (
            f"{pool.num_live} live, {len(pool.fenced)} fenced, {len(pool.free)} free; {len(self._sequences)} sequences"
        )
        return f"reference.KVBlockManager({self.num_blocks} blocks of {self.block_size} tokens: {counts})"

    # Small helpers ----------------------------------------------------------------------------------------------------

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)  # rounded up

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self._sequences:
            raise DuplicateSequenceError(sequence_id)

    def _find(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(read_natural("sequence_id", sequence_id, ID))
        if sequence is None:
            raise UnknownSequenceError(sequence_id)
        return sequence
