"""Questions: where a token is, what the pool looks like, how full it is. Nothing here changes anything."""

from collections.abc import Mapping

from kvpager.errors import ArgumentError, SlotError
from kvpager.records import SequenceState, SequenceView
from kvpager.reference.arguments import ID, read_natural, read_position
from kvpager.reference.audit import find_broken_invariants
from kvpager.reference.snapshots import BlockInfo, PoolStats
from kvpager.reference.state import ManagerState


class Questions(ManagerState):
    """What a manager tells about its sequences, its blocks and itself."""

    # Sequences --------------------------------------------------------------------------------------------------------

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

    def num_computed_tokens(self, sequence_id: int) -> int:
        """Tokens whose keys and values are written, as far as was committed. Without an index: the length."""
        return self._computed(self._find(sequence_id))

    def block_table(self, sequence_id: int) -> list[int]:
        """The physical blocks of a sequence, logical block 0 first."""
        return list(self._find(sequence_id).table)

    def sequence_state(self, sequence_id: int) -> tuple[int, list[int]]:
        """(length, block table) of a sequence at one moment."""
        return self.sequence_length(sequence_id), self.block_table(sequence_id)

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

    # Blocks -----------------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take now, the cached ones included."""
        return self._pool.num_available

    @property
    def free_blocks(self) -> list[int]:
        """Ids of those blocks in the order in which they will be handed out: free ones, then cached ones."""
        return self._pool.free[::-1] + list(self._pool.cached)

    @property
    def usage(self) -> float:
        """Live blocks as a fraction of the pool."""
        return self._pool.num_live / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        """Holders of a block: table entries that name it, pins, and a caller who allocated it."""
        return self._pool.ref_counts[self._read_block(block_id)]

    def block_states(self) -> list[str]:
        """`live`, `fenced`, `cached` or `free` for each block. O(N)."""
        return [self._pool.state(block) for block in range(self.num_blocks)]

    def block_info(self, block_id: int) -> BlockInfo:
        """Everything about one block, for people. O(table entries)."""
        block = self._read_block(block_id)
        cached = list(self._pool.cached)
        return BlockInfo(
            block_id=block,
            state=self._pool.state(block),
            ref_count=self._pool.ref_counts[block],
            owners=tuple(sorted(i for i, sequence in self._sequences.items() if block in sequence.table)),
            num_pins=sum(block in blocks for blocks in self._pins.values()),
            is_held=block in self._held_by_caller,
            is_indexed=block in self._index,
            num_filled=self._filled_positions().get(block, 0),
            eviction_rank=cached.index(block) if block in cached else None,
        )

    def internal_fragmentation_tokens(self, sequence_id: int | None = None) -> int:
        """Positions of live blocks that hold no token, each block once; or of one sequence's blocks.

        Only the last block of a sequence can have any, so the waste is below `block_size` per sequence, whatever the
        lengths: that is what paging buys.
        """
        if sequence_id is not None:
            sequence = self._find(sequence_id)
            return len(sequence.table) * self.block_size - sequence.length
        live = {block: tokens for block, tokens in self._filled_positions().items() if self._pool.ref_counts[block]}
        return self._pool.num_live * self.block_size - sum(live.values())

    def _filled_positions(self) -> dict[int, int]:
        """Tokens in each block that has any. A shared block is as full as its longest holder makes it."""
        filled = dict.fromkeys(self._index.blocks(), self.block_size)
        for sequence in self._sequences.values():
            for index, block in enumerate(sequence.table):
                tokens = min(sequence.length - index * self.block_size, self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        return filled

    def _read_block(self, block_id: int) -> int:
        wanted = f"a block in 0..{self.num_blocks - 1}"
        block = read_natural("block_id", block_id, wanted)
        if block >= self.num_blocks:
            raise ArgumentError("block_id", wanted, block)
        return block

    # The whole --------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> PoolStats:
        """Counters of this moment. (The Rust version keeps each of them up to date, so that asking is free.)"""
        return PoolStats(
            num_blocks=self.num_blocks,
            live=self._pool.num_live,
            cached=len(self._pool.cached),
            fenced=len(self._pool.fenced),
            free=len(self._pool.free),
            num_sequences=len(self._sequences),
            num_copies=self._pool.num_copies,
            peak_live=self._pool.peak_live,
            indexed=len(self._index),
            pinned=len({block for blocks in self._pins.values() for block in blocks}),
            num_hit_tokens=self._num_hit_tokens,
            num_queried_tokens=self._num_queried_tokens,
            num_resumed_tokens=self._num_resumed_tokens,
            num_evictions=self._pool.num_evictions,
        )

    def check_invariants(self) -> list[str]:
        """Audit everything; one sentence for each thing that is broken, none if all is sound. O(blocks + entries)."""
        return find_broken_invariants(self)

    def invariants_ok(self) -> bool:
        """Whether the audit finds nothing."""
        return not self.check_invariants()

    def __repr__(self) -> str:
        pool = self._pool
        counts = [f"{pool.num_live} live"] + [f"{len(pool.cached)} cached"] * self._caching
        counts += [f"{len(pool.fenced)} fenced", f"{len(pool.free)} free"]
        shape = f"{self.num_blocks} blocks of {self.block_size} tokens"
        return f"reference.KVBlockManager({shape}: {', '.join(counts)}; {len(self._sequences)} sequences)"
