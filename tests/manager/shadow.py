"""What must be true of the bytes: a toy cache with one value a slot, written and copied as an engine would.

The value that a layer writes for a token depends on the whole past: salt and adapter, every token before, the medium
that a placeholder stands for, and the weights (which change when the index is reset). So a value here is a digest of
all that, and two sequences agree on a value only if they agree on the past. After every operation:

- every computed token of every sequence reads its own value, through its table (or, while a copy of its block is owed,
  through the source): so each hit found what was written for exactly this past, and nobody wrote over another's rows;
- the rows of every indexed block are those it was indexed with;
- with fences, a block is handed out for writing only when the epoch that last touched it is retired.
"""

from dataclasses import dataclass, field

UNTOLD_VALUES = 3


@dataclass
class Truth:
    """What a sequence consists of. `told`: whose ids the manager knows; `rest`: of the prompt, not appended yet."""

    namespace: tuple
    items: tuple = ()
    tokens: list = field(default_factory=list)
    told: list = field(default_factory=list)
    values: list = field(default_factory=list)
    rest: list = field(default_factory=list)
    pending: set = field(default_factory=set)  # positions appended, not written yet
    root: int = 0

    def extend(self, tokens, told):
        for token in tokens:
            position = len(self.tokens)
            medium = next(((key, position - a) for a, b, key in self.items if a <= position < b), None)
            before = self.values[-1] if self.values else self.root
            self.values.append(hash((before, token, medium)))
            self.tokens.append(token)
            self.told.append(told)

    def cut(self, n):
        for column in (self.tokens, self.told, self.values):
            del column[n:]
        self.items = tuple((a, min(b, n), key) for a, b, key in self.items if a < n)
        self.rest = []
        self.pending = {position for position in self.pending if position < n}


class Shadow:
    """The toy cache of one manager, and the truth about its sequences."""

    def __init__(self, manager):
        self.manager = manager
        self.size = manager.block_size
        self.rows = [None] * (manager.num_blocks * self.size)
        self.sequences = {}
        self.generation = 0
        self.indexed_rows = {}  # node id -> rows of its block when it was first seen
        self.last_touched = {}  # block -> epoch
        self.faults = []
        self._watch_hand_outs()

    def _watch_hand_outs(self):
        pool = self.manager._pool
        take = pool.take

        def watched_take():
            block = take()
            if pool.fences and self.last_touched.get(block, -1) > pool.retired:
                self.faults.append(f"block {block} handed out, epoch {self.last_touched[block]} is not retired")
            return block

        pool.take = watched_take

    # What the generator asks ------------------------------------------------------------------------------------------

    def length(self, sequence_id):
        return len(self.sequences[sequence_id].tokens) if sequence_id in self.sequences else 0

    def next_ids(self, sequence_id, start, count):
        """What the tokens from position `start` on will be, unless a caller says otherwise."""
        truth = self.sequences.get(sequence_id)
        rest = truth.rest[start - len(truth.tokens) :] if truth else []
        return (rest + [(sequence_id + start + nth) % UNTOLD_VALUES // 2 for nth in range(len(rest), count)])[:count]

    def untold(self, sequence_id, n):
        truth = self.sequences.get(sequence_id)
        return [position for position, told in enumerate(truth.told[:n]) if not told] if truth else []

    def must_copy_first(self, operation):
        """Whether an engine would run the owed copies before this: it wrote nothing since they came to be owed.

        Only the commit of a token that itself waits for a copy is refused, so that one may be tried.
        """
        name, *arguments = operation
        if not self.manager._pool.owed:
            return False
        if name == "fork_sequence":
            return not self.manager._caching
        if name not in ("commit", "commit_batch"):
            return False
        rows = [arguments[:2]] if name == "commit" else zip(*arguments[:2], strict=False)
        return any(
            position < n
            for sequence_id, n in rows
            if sequence_id in self.sequences and not self._waits_for_copy(sequence_id, n)
            for position in self.sequences[sequence_id].pending
        )

    def _waits_for_copy(self, sequence_id, n):
        sequence = self.manager._sequences[sequence_id]
        index = sequence.owed_from // self.size
        blocks = sequence.table[index : index + 1]
        return n > sequence.owed_from and any(block in self.manager._pool.owed for block in blocks)

    # What an engine does ----------------------------------------------------------------------------------------------

    def follow(self, operation, result):
        """Do what an engine does after this operation succeeded, then look at every row."""
        name, *arguments = operation
        getattr(self, f"after_{name}", lambda *_: None)(result, *arguments)
        self._write_pending()
        self.check()

    def check(self):
        pool, size = self.manager._pool, self.size
        for sequence_id, sequence in self.manager._sequences.items():
            truth = self.sequences[sequence_id]
            for position in range(self.manager._computed(sequence)):
                if position in truth.pending:
                    continue  # without an index a token counts as computed before it is written
                block = sequence.table[position // size]
                block = pool.owed.get(block, block)
                if self.rows[block * size + position % size] != truth.values[position]:
                    self.faults.append(f"position {position} of sequence {sequence_id} reads another's value")
        for block, node in self.manager._index._by_block.items():
            rows = self.rows[block * size : (block + 1) * size]
            if None in rows or self.indexed_rows.setdefault(node.node_id, rows) != rows:
                self.faults.append(f"indexed block {block} was written")
        for block, count in enumerate(pool.ref_counts):
            if count:
                self.last_touched[block] = pool.epoch
        assert self.faults == []

    def _write_pending(self):
        """Keys and values are written as soon as the owed copies are run."""
        if self.manager._pool.owed:
            return
        for sequence_id, truth in self.sequences.items():
            table = self.manager._sequences[sequence_id].table
            for position in truth.pending:
                block = table[position // self.size]
                self.rows[block * self.size + position % self.size] = truth.values[position]
            truth.pending.clear()

    def _append(self, sequence_id, count, token_ids):
        truth = self.sequences[sequence_id]
        start = len(truth.tokens)
        told = [nth < len(truth.rest) or token_ids is not None for nth in range(count)]
        tokens = self.next_ids(sequence_id, start, count) if token_ids is None else token_ids
        for token, is_told in zip(tokens, told, strict=True):
            truth.extend([token], is_told)
        del truth.rest[:count]
        truth.pending.update(range(start, start + count))

    def _new(self, sequence_id, namespace, items=()):
        truth = Truth(namespace, tuple(items))
        truth.root = hash((self.generation, namespace))
        self.sequences[sequence_id] = truth
        return truth

    def after_create_sequence(self, _, sequence_id):
        self._new(sequence_id, (None, None))

    def after_admit(self, result, sequence_id, token_ids, options):
        truth = self._new(sequence_id, (options.get("salt"), options.get("adapter")), options.get("items", ()))
        computed = result[0]
        length = self.manager.sequence_length(sequence_id)
        truth.extend(token_ids[:length], True)
        truth.rest = list(token_ids[length:])
        truth.pending = set(range(computed, length))

    def after_append_token(self, _, sequence_id, token_id=None):
        self._append(sequence_id, 1, None if token_id is None else [token_id])

    def after_append_tokens(self, _, sequence_id, n):
        self._append(sequence_id, *((n, None) if isinstance(n, int) else (len(n), n)))

    def after_slot_mapping(self, _, ids, counts, token_ids):
        start = 0
        for sequence_id, count in zip(ids, counts or [1] * len(ids), strict=True):
            self._append(sequence_id, count, None if token_ids is None else token_ids[start : start + count])
            start += count

    def after_commit(self, _, sequence_id, n, token_ids=None):
        self.after_commit_batch(_, [sequence_id], [n], token_ids)

    def after_commit_batch(self, _, ids, ns, token_ids=None):
        for sequence_id, n in zip(ids, ns, strict=True):
            truth = self.sequences[sequence_id]
            if self.manager._caching and any(position < n for position in truth.pending):
                self.faults.append(f"sequence {sequence_id} was committed before it was written")
            if token_ids is not None:
                truth.told[:n] = [True] * n

    def after_release_sequence(self, _, sequence_id):
        del self.sequences[sequence_id]

    def after_truncate_sequence(self, _, sequence_id, n):
        self.sequences[sequence_id].cut(n)
        if n == 0:  # begins anew
            truth = self.sequences[sequence_id]
            truth.root = hash((self.generation, truth.namespace))

    def after_fork_sequence(self, _, parent, child, num_tokens=None):
        source = self.sequences[parent]
        n = len(source.tokens) if num_tokens is None else num_tokens
        truth = Truth(source.namespace, source.items, list(source.tokens), list(source.told), list(source.values))
        truth.cut(n)
        truth.root = source.root if n else hash((self.generation, truth.namespace))
        self.sequences[child] = truth

    def after_take_copies(self, pairs):
        for source, destination in pairs:
            for block in (source, destination):
                self.last_touched[block] = self.manager._pool.epoch
            self.rows[destination * self.size : (destination + 1) * self.size] = self.rows[
                source * self.size : (source + 1) * self.size
            ]

    def after_reset_prefix_cache(self, _):
        self.generation += 1
        for truth in self.sequences.values():
            if not truth.tokens:
                truth.root = hash((self.generation, truth.namespace))
