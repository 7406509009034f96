"""The properties that catch whole kinds of faults (tests/cases.md, kinds 1 to 8), on both implementations.

They see a manager from outside, as an engine does. `test_differential.py` checks the same kinds with every operation
there is, and looks inside.
"""

import random
from array import array
from itertools import takewhile

import pytest

from kvpager import KVBlockManager
from kvpager.errors import KVPagerError, OutOfBlocksError, SequenceTooLongError

WORLDS = [(num_blocks, size) for num_blocks in (1, 2, 3, 4, 6) for size in (1, 2, 4)]


class Engine:
    """A manager and a cache of one value a slot; the value of a token is a digest of it and all before it."""

    def __init__(self, manager):
        self.manager = manager
        self.cache = [None] * (manager.num_blocks * manager.block_size)
        self.tokens = {}  # of each sequence
        self.roots = {}

    def values(self, tokens, root):
        """What belongs at each position."""
        values = []
        for token in tokens:
            values.append(hash((values[-1] if values else root, token)))
        return values

    def write(self, sequence_id, start):
        """Run the owed copies, then write everything from position `start` on, and commit it."""
        size, manager = self.manager.block_size, self.manager
        for source, destination in manager.take_copies():
            rows = self.cache[source * size : (source + 1) * size]
            self.cache[destination * size : (destination + 1) * size] = rows
        tokens = self.tokens[sequence_id]
        values = self.values(tokens, self.roots[sequence_id])
        for position, slot in enumerate(manager.slots(sequence_id, start, len(tokens)), start):
            self.cache[slot] = values[position]
        manager.commit(sequence_id, len(tokens))

    def admit(self, sequence_id, prompt, **options):
        admission = self.manager.admit(sequence_id, prompt, **options, out=array("q", [0] * len(prompt)))
        self.tokens[sequence_id] = list(prompt)
        self.roots[sequence_id] = str(sorted(options.items()))
        self.write(sequence_id, admission.num_computed_tokens)
        return admission.num_computed_tokens

    def append(self, sequence_id, tokens):
        start = self.manager.sequence_length(sequence_id)
        self.manager.append_tokens(sequence_id, tokens)
        self.tokens[sequence_id] += tokens
        self.write(sequence_id, start)

    def fork(self, parent, child, num_tokens):
        self.manager.fork_sequence(parent, child, num_tokens)
        self.tokens[child] = self.tokens[parent][:num_tokens]
        self.roots[child] = self.roots[parent]

    def truncate(self, sequence_id, n):
        self.manager.truncate_sequence(sequence_id, n)
        del self.tokens[sequence_id][n:]

    def release(self, sequence_id):
        self.manager.release_sequence(sequence_id)
        del self.tokens[sequence_id], self.roots[sequence_id]

    def check(self):
        """Every sequence reads its own past; the audit is clean."""
        for sequence_id, tokens in self.tokens.items():
            slots = self.manager.slots(sequence_id, 0, len(tokens))
            assert [self.cache[slot] for slot in slots] == self.values(tokens, self.roots[sequence_id])
        assert self.manager.check_invariants() == []
        stats = self.manager.stats
        assert stats.live + stats.cached + stats.fenced + stats.free == stats.num_blocks
        assert stats.indexed <= stats.num_blocks


def act(rng, engine, size, options=()):
    """One random action; drafts and rejections, forks and hits, all with few token values."""
    manager, alive = engine.manager, sorted(engine.tokens)
    free = [i for i in range(4) if i not in alive]
    choice = rng.random()
    if (choice < 0.35 or not alive) and free:
        prompt = [rng.choice((0, 0, 0, 1))] * rng.randint(1, 3 * size)
        if rng.random() < 0.3:
            prompt[rng.randrange(len(prompt))] = 2
        engine.admit(free[0], prompt, **dict(rng.choice(options or [()])))
        return
    if not alive:
        return
    sequence_id = rng.choice(alive)
    length = manager.sequence_length(sequence_id)
    if choice < 0.6:
        engine.append(sequence_id, [rng.choice((0, 0, 1)) for _ in range(rng.randint(1, size + 1))])
    elif choice < 0.7 and free:
        engine.fork(sequence_id, free[0], rng.randint(0, length))
    elif choice < 0.82:
        engine.truncate(sequence_id, rng.randint(0, length))
    else:
        engine.release(sequence_id)


def play(manager, seed, num_actions, each=lambda engine: None, options=()):
    """Random actions; refusals leave no trace and are made up for by a release."""
    rng, engine = random.Random(seed), Engine(manager)
    for _ in range(num_actions):
        try:
            act(rng, engine, manager.block_size, options)
        except OutOfBlocksError:
            if engine.tokens:
                engine.release(rng.choice(sorted(engine.tokens)))
        except SequenceTooLongError:
            pass
        engine.check()
        each(engine)
    return engine


@pytest.mark.parametrize(("num_blocks", "size"), WORLDS)
def test_property_1_ownership_accounting(make_caching, observe, num_blocks, size):
    """The audit holds after every action, a lookup changes nothing, and letting go of everything leaves nothing."""
    manager = make_caching(num_blocks, size)

    def look(engine):
        before = observe(manager)
        manager.match_prefix([0] * (2 * size))
        manager.can_admit(99, [0])
        manager.block_states()
        assert observe(manager) == before

    engine = play(manager, num_blocks, 60, look)
    for sequence_id in list(engine.tokens):
        engine.release(sequence_id)
    stats = observe(manager)["stats"]
    assert (stats["live"], stats["fenced"]) == (0, 0)
    assert sorted(manager.free_blocks) == list(range(num_blocks))
    manager.reset_prefix_cache()
    assert manager.stats.free == num_blocks
    assert sorted(manager.allocate_block() for _ in range(num_blocks)) == list(range(num_blocks))


@pytest.mark.parametrize(("num_blocks", "size"), WORLDS)
@pytest.mark.parametrize("eviction_policy", KVBlockManager.eviction_policies)
def test_property_2_and_5_no_stale_identity_and_no_write_into_shared_data(
    make_caching, num_blocks, size, eviction_policy
):
    """What a hit attaches was written for exactly these tokens; no write reaches what others read (`Engine.check`)."""
    options = [(), (), (("salt", "a"),), (("adapter", "a"),)]
    for seed in range(3):
        engine = play(make_caching(num_blocks, size, eviction_policy=eviction_policy), seed, 120, options=options)
        for sequence_id in list(engine.tokens):
            engine.release(sequence_id)
        for value in (0, 1):  # whatever is still found reads as it should
            engine.admit(9, [value] * (num_blocks * size))
            engine.check()
            engine.release(9)


def test_property_2_with_the_index_off_nothing_is_ever_found(make_caching):
    manager = make_caching(4, 2, enable_prefix_caching=False)

    def look(engine):
        assert [manager.match_prefix([value] * 8) for value in (0, 1)] == [0, 0]

    play(manager, 2, 150, look)
    assert manager.stats.indexed == manager.stats.num_hit_tokens == 0


def what_each_token_depends_on(prompt, items):
    """Of each position: its token, or which row of which medium stands there."""
    media = {p: (key, p - start, stop - start) for start, stop, key in items for p in range(start, stop)}
    return [(token, media.get(position)) for position, token in enumerate(prompt)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_property_3_weak_key(make_caching, size):
    """Of two requests that differ in anything that changes K/V, the second is hit no further than both agree."""
    rng = random.Random(size)
    met = set()

    def request():
        prompt = [rng.choice((0, 0, 1)) for _ in range(rng.randint(1, 4 * size))]
        options = {name: rng.choice(("", "a", "ab")) for name in ("salt", "adapter") if rng.random() < 0.2}
        if rng.random() < 0.4:
            start = rng.randrange(len(prompt))
            options["items"] = [(start, rng.randint(start + 1, len(prompt)), rng.choice("xy"))]
        return prompt, options

    for _ in range(250):
        manager = make_caching(8, size)
        first, options = request()
        other, other_options = request()
        if rng.random() < 0.6:
            other = first[: rng.randint(1, len(first))] + other
        if rng.random() < 0.5:
            other_options = dict(options)
        if other_options.get("items", [(0, 0, "")])[-1][1] > len(other):
            continue
        manager.admit(1, first, **options, out=array("q", [0] * len(first)))
        manager.commit(1, len(first))
        pair = [
            what_each_token_depends_on(p, o.get("items", ())) for p, o in ((first, options), (other, other_options))
        ]
        common = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
        if any(options.get(name) != other_options.get(name) for name in ("salt", "adapter")):
            common = 0
        hit = manager.match_prefix(other, **other_options)
        assert hit <= common
        assert hit == min(common // size, (len(other) - 1) // size) * size
        met.add(hit > 0)
    assert met == {True, False}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_property_4_boundary_arithmetic(make_caching, size):
    """For every length and every chunk: blocks, hits and slots are what the formulas say; no position twice."""
    for length in range(1, 4 * size + 2):
        for chunk in range(1, length + 1):
            manager = make_caching(10, size)
            prompt = list(range(100, 100 + length))
            computed, slots = [], []
            admission = manager.admit(1, prompt, num_new_tokens=chunk)
            slots += admission.slots.tolist()
            while True:
                done = manager.sequence_length(1)
                computed += range(len(computed), done)
                manager.commit(1, done)
                if done == length:
                    break
                slots += manager.append_tokens(1, min(chunk, length - done))
            table = manager.block_table(1)
            assert computed == list(range(length))
            assert len(table) == -(-length // size)
            assert slots == [table[p // size] * size + p % size for p in range(length)]
            assert manager.stats.indexed == length // size
            hits = (length - 1) // size * size
            assert manager.match_prefix(prompt) == hits
            assert manager.match_prefix([*prompt, 7]) == length // size * size
            again = manager.admit(2, prompt)
            assert (again.num_computed_tokens, len(again.slots)) == (hits, length - hits)
            assert again.slots.tolist() == manager.slots(2, hits, length)


@pytest.mark.parametrize("eviction_policy", KVBlockManager.eviction_policies)
@pytest.mark.parametrize("size", [1, 2])
def test_property_6_eviction_and_pinning(make_caching, eviction_policy, size):
    """Victims are cached, in the order of the model, a tail before what it continues; k blocks evict exactly k."""
    for seed in range(12):
        rng = random.Random(seed)
        manager = make_caching(8, size, eviction_policy=eviction_policy)
        order = []  # the model of LRU: the prompts' blocks, oldest first
        prompts = [[value] * (rng.randint(1, 3) * size) + [9] for value in range(3)]
        for step in range(12):
            prompt = rng.choice(prompts)
            try:
                manager.admit(step, prompt)
            except OutOfBlocksError:
                continue
            manager.commit(step, len(prompt))
            table = manager.block_table(step)
            manager.release_sequence(step)
            indexed = table[: len(prompt) // size]
            order = [block for block in order if block not in table] + indexed[::-1]
        pinned = manager.pin_prefix(prompts[0])
        held = [block for block in range(8) if manager.block_info(block).num_pins]
        order = [block for block in order if block not in held and manager.block_info(block).is_indexed]
        cached = [block for block in manager.free_blocks if manager.block_info(block).is_indexed]
        assert sorted(cached) == sorted(order)
        if eviction_policy == "lru":
            assert cached == order
        before, num_free = manager.stats.num_evictions, manager.stats.free
        for block in [*manager.free_blocks[:num_free], *cached]:
            hits = [manager.match_prefix([*prompt, 5]) for prompt in prompts]
            assert manager.allocate_block() == block
            now = [manager.match_prefix([*prompt, 5]) for prompt in prompts]
            lost = sum(then - hit for then, hit in zip(hits, now, strict=True))
            assert lost == (size if block in cached else 0)  # the last block of one chain, never a hole
        assert manager.stats.num_evictions - before == len(cached)
        with pytest.raises(OutOfBlocksError):
            manager.allocate_block()
        assert manager.stats.live == 8
        manager.unpin(pinned)
        assert manager.num_free_blocks == len(held)


def scenario(engine):
    """A scenario that allocates in every way there is, one step after the other."""
    manager = engine.manager
    yield lambda: engine.admit(1, [1, 2, 3, 4, 5])
    yield lambda: engine.fork(1, 2, 5)
    yield lambda: engine.append(2, [6])  # a copy
    yield lambda: engine.append(1, [7, 8, 9])  # in place, then a block
    yield lambda: engine.admit(3, [1, 2, 3, 4, 5, 6, 7])  # two hits
    yield lambda: engine.truncate(3, 3)
    yield lambda: engine.append(3, [4])  # a copy out of an indexed block
    yield lambda: engine.fork(1, 4, 8)
    yield lambda: manager.slot_mapping_for_append([1, 2, 4, 4], [1, 3, 1, 2], out=array("q", [0] * 7))
    yield lambda: manager.allocate_block()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_property_7_failure_is_atomic(make_caching, observe, size):
    """Each allocation of the scenario is made to fail in turn: nothing has changed, and trying again succeeds."""
    num_failures = 0
    for room in range(1, 26):
        manager = make_caching(40, size)
        ballast = [manager.allocate_block() for _ in range(40 - room)]
        engine = Engine(manager)
        for step in scenario(engine):
            while True:
                before, cache = observe(manager), list(engine.cache)
                try:
                    step()
                    break
                except OutOfBlocksError:
                    assert (observe(manager), engine.cache) == (before, cache)
                    num_failures += 1
                    manager.free_block(ballast.pop())
        lengths = [manager.sequence_length(sequence_id) for sequence_id in (1, 2, 3, 4)]
        assert lengths == [9, 9, 4, 11]
        assert manager.check_invariants() == []
    assert num_failures > 20


def test_property_7_refusals_of_all_kinds_change_nothing(make_caching, observe):
    manager = make_caching(3, 2, max_sequence_length=5, max_pinned_blocks=0)
    engine = Engine(manager)
    engine.admit(1, [1, 2, 3])
    manager.fork_sequence(1, 2)
    manager.append_tokens(2, [4])
    before = observe(manager)
    refused = [
        lambda: manager.admit(1, [1]),
        lambda: manager.admit(3, [1] * 6),
        lambda: manager.admit(3, [1, 2, 5]),
        lambda: manager.admit(3, [1, 2, 5], items=[(2, 2, "x")]),
        lambda: manager.admit(3, [1], out=array("i", [0])),
        lambda: manager.append_token(1, -1),
        lambda: manager.append_tokens(1, [4, 5, 6]),
        lambda: manager.append_tokens(1, [4, 5]),
        lambda: manager.slot_mapping_for_append([2, 1], [1, 1], [5]),
        lambda: manager.slot_mapping_for_append([2, 1], [1, 2], out=array("q", [0] * 3)),
        lambda: manager.commit(2, 4),
        lambda: manager.commit_batch([1, 2], [3, 4]),
        lambda: manager.commit_batch([1, 2], [3, 3], [7]),
        lambda: manager.fork_sequence(2, 3),
        lambda: manager.pin_prefix([1, 2]),
        lambda: manager.unpin(0),
        lambda: manager.retire(0),
        lambda: manager.allocate_block(),
        lambda: manager.free_block(0),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(KVPagerError):
            call()
        assert observe(manager) == before, number


@pytest.mark.parametrize("watermark", [0, 2])
@pytest.mark.parametrize("num_blocks", [3, 5])
def test_property_8_progress(make_caching, watermark, num_blocks):
    """First come, first served, the youngest preempted: every request that fits the pool ends, the others are told."""
    size = 2
    manager = make_caching(num_blocks, size, watermark_blocks=min(watermark, num_blocks))
    rng = random.Random(8)
    most = num_blocks * size
    waiting = [(i, [rng.randrange(2) for _ in range(rng.randint(1, most))]) for i in range(30)]
    lengths = {i: min(most, len(tokens) + rng.randint(0, 3)) for i, tokens in waiting}
    with pytest.raises(SequenceTooLongError):
        manager.can_admit(99, [0] * (most + 1))
    engine, running, preempted, num_steps = Engine(manager), [], set(), 0
    while waiting or running:
        num_steps += 1
        assert num_steps < 40 * sum(lengths.values())
        while waiting and manager.can_admit(waiting[0][0], waiting[0][1]):
            i, tokens = waiting.pop(0)
            resumed = {"resumed": True} if i in preempted else {}
            admission = manager.admit(i, tokens, **resumed, out=array("q", [0] * len(tokens)))
            engine.tokens[i], engine.roots[i] = list(tokens), "[]"
            engine.write(i, admission.num_computed_tokens)
            running.append(i)
        assert running  # never nothing running while something waits
        for i in list(running):
            if i not in running:
                continue
            if len(engine.tokens[i]) >= lengths[i]:
                engine.release(i)
                running.remove(i)
                continue
            while i in running:
                try:
                    engine.append(i, [rng.randrange(2)])
                    break
                except OutOfBlocksError:
                    victim = running.pop()
                    preempted.add(victim)
                    waiting.insert(0, (victim, engine.tokens[victim]))
                    engine.release(victim)
        engine.check()
    assert manager.stats.live == 0
