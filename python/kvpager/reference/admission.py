"""Admission and commit: how a prompt finds what was computed before, and how what is computed now comes to be found.

`admit` walks the index from the root of the prompt's namespace, block by block, and attaches what it finds: those
tokens need not be computed again. At least the last prompt token is left, for a model gives the first new token only to
who computes something. `commit` says that keys and values are written; a block that becomes full by that gets its node.
Not earlier: a forward pass that fails must not leave a block behind that others find.
"""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

from kvpager.errors import ArgumentError, OutOfBlocksError, SequenceTooLongError, StateError
from kvpager.records import Admission
from kvpager.reference.arguments import (
    COUNT,
    ID,
    read_flag,
    read_items,
    read_natural,
    read_naturals,
    read_text,
    read_token_ids,
)
from kvpager.reference.buffers import open_room
from kvpager.reference.index import Item, Namespace, Node, items_of_block
from kvpager.reference.state import ManagerState, Sequence


class AdmitOptions(TypedDict, total=False):
    """The options of `admit`; the defaults stand in `Admitting._plan`.

    Attributes:
        num_new_tokens: most slots to reserve; None: for all tokens that remain to be computed.
        reserve_blocks: blocks that must be left to hand out afterwards; of this and the watermark the larger one is
            kept back.
        salt, adapter, items: what tells equal tokens apart; see `index.py`.
        resumed: whether the request was here before, so that what it finds is no hit in the eyes of its user.
    """

    num_new_tokens: int | None
    reserve_blocks: int | None
    salt: str | None
    adapter: str | None
    items: Iterable[Item]
    resumed: bool


class Admitting(ManagerState):
    """`admit` and what looks like it: `can_admit`, `match_prefix`."""

    def admit(
        self, sequence_id: int, token_ids: Any, *, out: Any = None, **options: Unpack[AdmitOptions]
    ) -> Admission[Any]:
        """Create a sequence from its prompt: match, attach, reserve the slots of the tokens to compute next.

        O(tokens given + slots).
        """
        sequence_id, sequence, matched, num_new = self._plan(sequence_id, token_ids, **options)
        resumed = options.get("resumed", False)
        target = open_room(out, num_new)  # the last thing that can fail
        for node in matched:
            self._pool.share(node.block)
            if not resumed:
                self._pool.cached.hit(node.block)
        num_matched = len(matched) * self.block_size
        sequence.table = [node.block for node in matched]
        sequence.num_indexed = len(matched)
        sequence.computed = num_matched
        sequence.length = num_matched + num_new
        while len(sequence.table) < self._blocks_for(sequence.length):
            sequence.table.append(self._pool.take())
        self._sequences[sequence_id] = sequence
        self._count_hits(len(sequence.token_ids), num_matched, resumed)
        positions = range(num_matched, sequence.length)
        size = self.block_size
        return Admission(num_matched, target.fill([sequence.table[p // size] * size + p % size for p in positions]))

    def can_admit(self, sequence_id: int, token_ids: Any, **options: Unpack[AdmitOptions]) -> bool:
        """Whether `admit` would find the blocks now. What no waiting can cure is raised as `admit` raises it."""
        try:
            self._plan(sequence_id, token_ids, **options)
        except OutOfBlocksError:
            return False
        return True

    def match_prefix(
        self, token_ids: Any, *, salt: str | None = None, adapter: str | None = None, items: Iterable[Item] = ()
    ) -> int:
        """Tokens that `admit` would find computed. Changes nothing. O(tokens compared)."""
        ids = read_token_ids(token_ids)
        namespace = read_text("salt", salt), read_text("adapter", adapter)
        return len(self._match(namespace, read_items(items, len(ids)), ids, _most_hits(ids, self.block_size))) * (
            self.block_size
        )

    def _plan(
        self,
        sequence_id: int,
        token_ids: Any,
        *,
        num_new_tokens: int | None = None,
        reserve_blocks: int | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        items: Iterable[Item] = (),
        resumed: bool = False,
    ) -> tuple[int, Sequence, list[Node], int]:
        """All that can be refused: the id, the sequence to be, the nodes it will attach and its new tokens."""
        sequence_id = read_natural("sequence_id", sequence_id, ID)
        ids = read_token_ids(token_ids)
        most_new = None if num_new_tokens is None else read_natural("num_new_tokens", num_new_tokens, COUNT)
        reserve = 0 if reserve_blocks is None else read_natural("reserve_blocks", reserve_blocks, COUNT)
        namespace = read_text("salt", salt), read_text("adapter", adapter)
        sequence = Sequence(namespace=namespace, items=read_items(items, len(ids)), token_ids=list(ids))
        read_flag("resumed", resumed)
        self._check_new(sequence_id)
        self._check_max_length(len(ids))
        needed = self._blocks_for(len(ids))
        if needed > self.num_blocks:
            shape = f"{needed} blocks of {self.block_size} tokens"
            raise SequenceTooLongError(f"{len(ids)} tokens need {shape}, the pool has {self.num_blocks}")
        matched = self._match(namespace, sequence.items, ids, _most_hits(ids, self.block_size))
        num_matched = len(matched) * self.block_size
        num_new = len(ids) - num_matched
        if most_new is not None:
            num_new = min(num_new, most_new)
        # While nothing is live nothing runs that could grow into the watermark, and waiting would be for ever.
        # The caller's own reserve holds even then: he knows who will take it, and whom he admitted without a slot the
        # pool can't see.
        watermark = max(self._watermark if self._pool.num_live > 0 else 0, reserve)
        num_cached = sum(self._pool.state(node.block) == "cached" for node in matched)
        needed = self._blocks_for(num_matched + num_new) - len(matched) + watermark
        self._pool.require(needed, matched=num_cached, watermark=watermark)
        return sequence_id, sequence, matched, num_new

    def _match(self, namespace: Namespace, items: tuple[Item, ...], token_ids: list[int], most: int) -> list[Node]:
        """The longest chain of nodes, `most` at most, that names a prefix of these tokens."""
        chain: list[Node] = []
        parent: Namespace | Node = namespace
        for start in range(0, most * self.block_size, self.block_size):
            stop = start + self.block_size
            node = self._index.find(parent, tuple(token_ids[start:stop]), items_of_block(items, start, stop))
            if node is None:
                break
            chain.append(node)
            parent = node
        return chain

    def _count_hits(self, num_queried: int, num_matched: int, resumed: bool) -> None:
        if not self._caching:
            return
        if resumed:
            self._num_resumed_tokens += num_matched
        else:
            self._num_queried_tokens += num_queried
            self._num_hit_tokens += num_matched


class Committing(ManagerState):
    """`commit`, `commit_batch`, `reset_prefix_cache`."""

    def commit(self, sequence_id: int, n: int, token_ids: Any = None) -> None:
        """Say that the first `n` tokens are written. O(1 + ids + blocks that became full).

        `token_ids`: the ids of the positions below `n` that aren't known yet, in order.
        """
        rows = [(read_natural("sequence_id", sequence_id, ID), read_natural("n", n, COUNT))]
        told = None if token_ids is None else read_token_ids(token_ids)
        self._find(rows[0][0])
        self._commit_rows(rows, told, "n")

    def commit_batch(self, ids: Any, ns: Any, token_ids: Any = None) -> None:
        """`commit` for each row, in order, all or none; the rows' token ids come one after the other."""
        rows = read_naturals("ids", ids, ID)
        lengths = read_naturals("ns", ns, COUNT)
        told = None if token_ids is None else read_token_ids(token_ids)
        if len(lengths) != len(rows):
            raise ArgumentError("ns", f"one length for each of {len(rows)} ids", f"{len(lengths)} lengths")
        for sequence_id in rows:
            self._find(sequence_id)
        self._commit_rows(list(zip(rows, lengths, strict=True)), told, "ns")

    def reset_prefix_cache(self) -> None:
        """Forget every node, for example because the weights changed. Cached blocks become free. O(blocks).

        Sequences go on, but their keys and values are of old: nothing of them is indexed again, until they are
        truncated to nothing and begin anew. O(blocks + sequences).
        """
        self._pool.forget_all_content()
        for sequence in self._sequences.values():
            sequence.num_indexed = 0
            sequence.stale = sequence.length > 0

    def _commit_rows(self, rows: list[tuple[int, int]], token_ids: list[int] | None, argument: str) -> None:
        self._check_lengths(rows, argument)
        unknown = self._unknown_positions(rows)
        if token_ids is not None and len(token_ids) != len(unknown):
            wanted = f"{len(unknown)} ids, one for each position not known yet"
            raise ArgumentError("token_ids", wanted, f"{len(token_ids)} ids")
        if self._caching:
            for sequence_id, n in rows:
                self._check_copied(sequence_id, n)
        for (sequence, position), token_id in zip(unknown, token_ids or [], strict=token_ids is not None):
            sequence.learn_id(position, token_id)
        if self._caching:
            for sequence_id, n in rows:
                sequence = self._sequences[sequence_id]
                before, sequence.computed = sequence.computed, n
                self._index_full_blocks(sequence, before)
            self._pool.settle()

    def _check_lengths(self, rows: list[tuple[int, int]], argument: str) -> None:
        """Each `n` must lie between the computed tokens, after the rows before it, and the length."""
        computed: dict[int, int] = {}
        for sequence_id, n in rows:
            sequence = self._sequences[sequence_id]
            low = computed.get(sequence_id, self._computed(sequence))
            if not low <= n <= sequence.length:
                span = f"{low} to {sequence.length} tokens" if self._caching else f"the {sequence.length} tokens"
                single = "" if self._caching else " of the sequence"
                batch = f" for sequence {sequence_id}" if self._caching else f" of sequence {sequence_id}"
                raise ArgumentError(argument, span + (single if argument == "n" else batch), n)
            computed[sequence_id] = n

    def _unknown_positions(self, rows: list[tuple[int, int]]) -> list[tuple[Sequence, int]]:
        """The committed positions whose id nobody told yet, row by row, each once."""
        found: dict[tuple[int, int], Sequence] = {}
        for sequence_id, n in rows:
            sequence = self._sequences[sequence_id]
            for position in range(n):
                if sequence.known_id(position) is None:
                    found.setdefault((sequence_id, position), sequence)
        return [(sequence, position) for (_, position), sequence in found.items()]

    def _check_copied(self, sequence_id: int, n: int) -> None:
        """A token that was appended into a copy still owed is not written: where to is not even filled yet."""
        sequence = self._sequences[sequence_id]
        first = sequence.owed_from
        index = first // self.block_size
        if n <= first or index >= len(sequence.table) or sequence.table[index] not in self._pool.owed:
            return
        block = sequence.table[index]
        wait = f"block {block} still waits for its copy of block {self._pool.owed[block]}"
        raise StateError(f"sequence {sequence_id} can't be committed to {n} tokens: {wait} (run `take_copies` first)")

    def _index_full_blocks(self, sequence: Sequence, before: int) -> None:
        """Give the blocks that became full since `before` tokens were computed their nodes.

        If another block has the same content already, the table is pointed at that one and the own block is let go: two
        equal prompts computed in one step end on the same blocks. A block whose ids aren't all known gets no node, and
        nor does what follows it, for a node is the child of a node.
        """
        size = self.block_size
        for index in range(before // size, sequence.computed // size):
            start, stop = index * size, (index + 1) * size
            tokens = tuple(token_id for token_id in sequence.token_ids[start:stop] if token_id is not None)
            if sequence.stale or sequence.num_indexed != index or len(tokens) < size:
                return
            parent, items = self._chain_end(sequence), items_of_block(sequence.items, start, stop)
            own, node = sequence.table[index], self._index.find(parent, tokens, items)
            if node is None:
                node = self._index.insert(parent, tokens, items, own)
                above = parent.block if isinstance(parent, Node) else None
                self._pool.cached.indexed(own, above, tokens)
            else:
                sequence.table[index] = node.block
                self._pool.share(node.block)
                self._pool.drop(own)
            sequence.num_indexed += 1


def _most_hits(token_ids: list[int], block_size: int) -> int:
    """Blocks that may be found for a prompt: the last token is left to compute."""
    return max(0, len(token_ids) - 1) // block_size
