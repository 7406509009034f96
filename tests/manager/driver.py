"""Random operations on a manager, in worlds so small that boundaries, shared tails and empty pools are always near.

`World` says how the managers are made, `random_operation` draws what mostly makes sense in the present state, `answer`
runs it and gives what came back, `visible` shows everything that can be seen without changing it. `shadow.py` keeps
what must be true of the bytes. Token ids are drawn from three values, in prompts that share beginnings.
"""

from array import array
from dataclasses import dataclass, field

from kvpager._core import KVBlockManager
from kvpager.errors import KVPagerError

STATS = (
    "num_blocks",
    "live",
    "cached",
    "fenced",
    "free",
    "num_sequences",
    "num_copies",
    "peak_live",
    "indexed",
    "pinned",
    "num_hit_tokens",
    "num_queried_tokens",
    "num_resumed_tokens",
    "num_evictions",
)
SALTS = (None,) * 16 + ("", "a")


@dataclass(frozen=True)
class World:
    """How a manager is made."""

    num_blocks: int
    block_size: int
    options: dict = field(default_factory=dict)

    def make(self, manager_class, **more):
        return manager_class(self.num_blocks, self.block_size, **self.options, **more)


def random_world(rng, num_blocks, block_size):
    """A pool of this shape, mostly with an index, the rest by chance."""
    options = {
        "enable_prefix_caching": rng.random() < 0.85,
        "fences": rng.random() < 0.4,
        "eviction_policy": rng.choice(KVBlockManager.eviction_policies),
        "watermark_blocks": min(num_blocks, rng.choice((0, 0, 0, 0, 1, 2))),
        "max_pinned_blocks": rng.choice((None, None, min(num_blocks, 1), min(num_blocks, 2))),
        "max_sequence_length": rng.choice((None, None, None, num_blocks * block_size // 2 + 1)),
    }
    return World(num_blocks, block_size, options)


# Calls ----------------------------------------------------------------------------------------------------------------


def into(code, size, call):
    """What `call` writes into an array of `size` elements; untouched if it fails."""
    out = array(code, [-7] * size)
    try:
        result = call(out)
    except KVPagerError:
        assert set(out) <= {-7}
        raise
    return out, result


def admit(manager, sequence_id, token_ids, options):
    out, admission = into(
        "q", len(token_ids) + 1, lambda out: manager.admit(sequence_id, token_ids, **options, out=out)
    )
    assert admission.slots is out
    return admission.num_computed_tokens, out.tolist()


def slot_mapping(manager, ids, counts, token_ids):
    size = len(ids) if counts is None else min(99, max(0, sum(counts)))
    return into("q", size, lambda out: manager.slot_mapping_for_append(ids, counts, token_ids, out=out))[0].tolist()


def block_tables(manager, ids, max_blocks):
    size = len(ids) * max_blocks
    return into("i", size, lambda out: manager.get_block_table_tensor(ids, out=out))[0].tolist()


def seq_lens(manager, ids):
    return into("i", len(ids), lambda out: manager.get_seq_lens_tensor(array("q", ids), out=out))[0].tolist()


def block_info(manager, block):
    info = manager.block_info(block)
    return [getattr(info, name) for name in INFO]


INFO = ["block_id", "state", "ref_count", "owners", "num_pins", "is_held", "is_indexed", "num_filled", "eviction_rank"]
SPECIAL_CALLS = {
    "admit": admit,
    "can_admit": lambda m, sequence_id, token_ids, options: m.can_admit(sequence_id, token_ids, **options),
    "match_prefix": lambda m, token_ids, options: m.match_prefix(token_ids, **options),
    "pin_prefix": lambda m, token_ids, options: m.pin_prefix(token_ids, **options),
    "slot_mapping": slot_mapping,
    "block_tables": block_tables,
    "seq_lens": seq_lens,
    "block_info": block_info,
    "fragmentation": lambda m, *a: m.internal_fragmentation_tokens(*a),
}


def answer(manager, operation):
    """What the call returns, or class, text and values of the error it raises."""
    name, *arguments = operation
    try:
        if name in SPECIAL_CALLS:
            return SPECIAL_CALLS[name](manager, *arguments)
        return getattr(manager, name)(*arguments)
    except KVPagerError as error:
        return type(error), str(error), vars(error)


def is_error(result):
    """Whether `answer` gave an error."""
    return isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], type)


def visible(manager):
    """Everything a manager shows."""
    stats = manager.stats
    ids = manager.sequence_ids()
    return {
        "free_blocks": manager.free_blocks,
        "num_free_blocks": manager.num_free_blocks,
        "stats": [getattr(stats, name) for name in STATS],
        "sequences": [
            (i, manager.sequence_length(i), manager.num_computed_tokens(i), manager.block_table(i)) for i in ids
        ],
        "states": manager.block_states(),
        "fragmentation": manager.internal_fragmentation_tokens(),
        "audit": manager.check_invariants(),
    }


# Random operations ----------------------------------------------------------------------------------------------------

WEIGHTS = {
    "admit": 16,
    "append_token": 6,
    "append_tokens": 4,
    "slot_mapping": 6,
    "commit": 22,
    "commit_batch": 6,
    "create_sequence": 1,
    "fork_sequence": 8,
    "truncate_sequence": 6,
    "release_sequence": 9,
    "take_copies": 4,
    "match_prefix": 1,
    "can_admit": 1,
    "pin_prefix": 1,
    "unpin": 1.5,
    "advance_epoch": 2,
    "retire": 5,
    "allocate_block": 0.5,
    "free_block": 1,
    "reset_prefix_cache": 0.15,
    "locate": 0.3,
    "slots": 0.3,
    "block_tables": 0.4,
    "seq_lens": 0.3,
    "fragmentation": 0.3,
    "block_info": 1,
}
NAMES_OF, WEIGHTS_OF = list(WEIGHTS), list(WEIGHTS.values())


class Draw:
    """Draws operations that mostly make sense, now and then one that is wrong."""

    def __init__(self, rng, reference, shadow):
        self.rng, self.reference, self.shadow = rng, reference, shadow
        self.alive = reference.sequence_ids()

    def operation(self):
        name = self.rng.choices(NAMES_OF, WEIGHTS_OF)[0]
        if self.reference.num_free_blocks == 0 and self.sometimes(0.5):
            name = self.relief()
        elif len(self.alive) < 2 and self.sometimes(0.4):
            name = "admit"
        if name == "free_block" and not self.reference._held_by_caller and self.sometimes(0.7):
            name = "release_sequence"
        if name == "retire" and self.reference._pool.retired == self.reference._pool.epoch - 1 and self.sometimes(0.9):
            name = "advance_epoch"
        return (name, *getattr(self, name, self.nothing)())

    def relief(self):
        """Something that gives blocks back, by what holds them."""
        reasons = {
            "free_block": len(self.reference._held_by_caller),
            "unpin": sum(map(len, self.reference._pins.values())),
            "retire": 2 * len(self.reference._pool.fenced),
            "release_sequence": len(self.alive),
            "truncate_sequence": len(self.alive) / 3,
            "take_copies": len(self.reference._pool.owed),
        }
        return self.rng.choices(list(reasons), list(reasons.values()))[0]

    def nothing(self):
        return ()

    def sometimes(self, chance):
        return self.rng.random() < chance

    def an_id(self):
        return self.rng.choice(self.alive) if self.alive and self.sometimes(0.95) else self.rng.randrange(5)

    def a_new_id(self):
        free = [i for i in range(max(4, self.reference.num_blocks // 6)) if i not in self.alive]
        return self.rng.choice(free) if free and self.sometimes(0.97) else self.rng.randrange(5)

    def a_count(self):
        size = self.reference.block_size
        count = self.rng.choice((0, 1, 1, 1, 2, 3, size, size + 1))
        return count if self.sometimes(0.98) else self.rng.choice((-1, 10**6, 2**63 - 1, 2**63))

    def a_position(self, sequence_id):
        length = self.reference.sequence_length(sequence_id) if sequence_id in self.alive else 3
        return self.rng.randint(0, length) if self.sometimes(0.95) else self.rng.choice((-1, length + 1, 2**64))

    def a_prompt(self):
        size = self.reference.block_size
        most = min(self.reference.num_blocks * size, self.reference._max_length or 99) + self.sometimes(0.05)
        length = min(
            most,
            self.rng.randint(
                self.sometimes(0.95), self.rng.choice((1, 2, 3, 4, self.reference.num_blocks // 5)) * size + 1
            ),
        )
        value = self.rng.choice((0, 0, 0, 0, 1))
        prompt = [value] * length
        if length and self.sometimes(0.25):
            prompt[self.rng.randrange(length)] = self.rng.randrange(3)
        if self.sometimes(0.01):
            prompt.append(self.rng.choice((-1, 2**31)))
        return prompt

    def a_namespace(self, prompt):
        options = {}
        for name in ("salt", "adapter"):
            if (value := self.rng.choice(SALTS)) is not None:
                options[name] = value
        if prompt and self.sometimes(0.08):
            start = self.rng.randrange(len(prompt))
            stop = self.rng.randint(start + 1, len(prompt)) if self.sometimes(0.97) else start
            options["items"] = [(start, stop, self.rng.choice("xy"))]
            if stop < len(prompt) and self.sometimes(0.3):
                options["items"].append((stop, len(prompt), self.rng.choice("xy")))
        return options

    def true_ids(self, sequence_id, start, count):
        """What the tokens will be; now and then not what the prompt says."""
        ids = self.shadow.next_ids(sequence_id, start, min(max(count, 0), 40))
        if ids and self.sometimes(0.02):
            ids[self.rng.randrange(len(ids))] = self.rng.choice((0, 1, 2, -1, 2**31))
        return ids

    def create_sequence(self):
        return (self.a_new_id(),)

    def admit(self):
        prompt = self.a_prompt()
        options, size = self.a_namespace(prompt), self.reference.block_size
        if self.sometimes(0.3):
            options["num_new_tokens"] = self.rng.choice((self.a_count(), size, 2 * size))
        if self.sometimes(0.1):
            options["reserve_blocks"] = self.rng.choice((0, 1, 2, self.reference.num_blocks, 2**64 - 1))
        if self.sometimes(0.2):
            options["resumed"] = True
        return self.a_new_id(), prompt, options

    can_admit = admit

    def match_prefix(self):
        prompt = self.a_prompt()
        return prompt, self.a_namespace(prompt)

    pin_prefix = match_prefix

    def append_token(self):
        sequence_id = self.an_id()
        length = self.shadow.length(sequence_id)
        return (sequence_id, *(self.true_ids(sequence_id, length, 1) if self.sometimes(0.8) else ()))

    def append_tokens(self):
        sequence_id, count = self.an_id(), self.a_count()
        if self.sometimes(0.25):
            return sequence_id, count
        return sequence_id, self.true_ids(sequence_id, self.shadow.length(sequence_id), count)

    def slot_mapping(self):
        ids = [self.an_id() for _ in range(self.rng.randrange(4))]
        counts = [self.a_count() for _ in ids] + [1] * self.sometimes(0.01) if self.sometimes(0.6) else None
        if self.sometimes(0.25):
            return ids, counts, None
        lengths = {}
        told = []
        for sequence_id, count in zip(ids, counts or [1] * len(ids), strict=False):
            start = lengths.get(sequence_id, self.shadow.length(sequence_id))
            told += self.true_ids(sequence_id, start, count)
            lengths[sequence_id] = start + max(0, count)
        return ids, counts, told

    def a_commit(self, sequence_id):
        if sequence_id not in self.alive or self.sometimes(0.04):
            return self.a_position(sequence_id)
        computed = self.reference.num_computed_tokens(sequence_id)
        length = self.reference.sequence_length(sequence_id)
        return length if self.sometimes(0.8) else self.rng.randint(computed, length)

    def late_ids(self, rows):
        """The ids of the positions that nobody told; now and then one too many."""
        if self.sometimes(0.25):
            return ()
        seen = set()
        ids = []
        for sequence_id, n in rows:
            for position in self.shadow.untold(sequence_id, min(max(n, 0), 99)):
                if (sequence_id, position) not in seen:
                    seen.add((sequence_id, position))
                    ids.append(self.shadow.sequences[sequence_id].tokens[position])
        return (ids + [0] * self.sometimes(0.02),)

    def an_unwritten_id(self):
        reference = self.reference
        ids = [i for i in self.alive if reference.num_computed_tokens(i) < reference.sequence_length(i)]
        return self.rng.choice(ids) if ids and self.sometimes(0.7) else self.an_id()

    def commit(self):
        sequence_id = self.an_unwritten_id()
        n = self.a_commit(sequence_id)
        return sequence_id, n, *self.late_ids([(sequence_id, n)])

    def commit_batch(self):
        ids = [self.an_unwritten_id() for _ in range(self.rng.randrange(4))]
        ns = [self.a_commit(sequence_id) for sequence_id in ids]
        return ids, ns + [0] * self.sometimes(0.01), *self.late_ids(list(zip(ids, ns, strict=True)))

    def release_sequence(self):
        return (self.an_id(),)

    def truncate_sequence(self):
        sequence_id = self.an_id()
        return sequence_id, self.a_position(sequence_id)

    def fork_sequence(self):
        parent = self.an_id()
        child = self.a_new_id()
        if self.sometimes(0.4):
            return parent, child
        if parent in self.alive and self.sometimes(0.5):
            return parent, child, self.reference.num_computed_tokens(parent)
        return parent, child, self.a_position(parent)

    def unpin(self):
        pins = [pin for pin, blocks in self.reference._pins.items() if blocks or self.sometimes(0.1)]
        return (self.rng.choice(pins) if pins and self.sometimes(0.9) else self.rng.choice((-1, 0, 1, 2**70)),)

    def retire(self):
        last = self.reference._pool.epoch - 1
        return (last if self.sometimes(0.6) else self.rng.randint(-1, last + 1),)

    def free_block(self):
        held = sorted(self.reference._held_by_caller)
        return (self.rng.choice(held) if held and self.sometimes(0.9) else self.a_block(),)

    def a_block(self):
        return self.rng.randrange(-1, self.reference.num_blocks + 1)

    def block_info(self):
        return (self.a_block(),)

    def locate(self):
        return self.truncate_sequence()

    def slots(self):
        sequence_id = self.an_id()
        return sequence_id, *sorted((self.a_position(sequence_id), self.a_position(sequence_id)))

    def block_tables(self):
        return [self.an_id() for _ in range(self.rng.randrange(4))], self.rng.randrange(6)

    def seq_lens(self):
        return ([self.an_id() for _ in range(self.rng.randrange(4))],)

    def fragmentation(self):
        return (self.an_id(),)


def random_operation(rng, reference, shadow):
    """An operation that mostly makes sense in the present state."""
    operation = Draw(rng, reference, shadow).operation()
    return ("take_copies",) if shadow.must_copy_first(operation) else operation
