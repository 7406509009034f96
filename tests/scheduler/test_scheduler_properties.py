"""What the scheduler promises, on random traces; and each of its steps against the readable one.

Small worlds find most faults: few blocks, short blocks, few distinct tokens, so that prompts share prefixes.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from kvpager import reference
from kvpager.errors import SequenceTooLongError
from kvpager.reference import scheduler as readable

NUM_TRACES = 60


@dataclass(frozen=True)
class Arrival:
    number: int
    step: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Trace:
    num_blocks: int
    block_size: int
    options: dict[str, Any]
    arrivals: tuple[Arrival, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(a.prompt) + a.max_tokens for a in self.arrivals)


def make_trace(seed: int, *, overload: bool = False) -> Trace:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4])
    num_blocks = rng.randint(3, 12) * 4 // block_size
    room = num_blocks * block_size
    stem = [rng.randint(1, 3) for _ in range(room)]
    arrivals = []
    for number in range(rng.randint(2, 12)):
        length = rng.randint(1, max(1, room - 1))
        shared = rng.randint(0, length)
        prompt = stem[:shared] + [rng.randint(1, 3) for _ in range(length - shared)]
        max_tokens = rng.randint(1, max(1, min(12, room - length + 1)))
        arrivals.append(Arrival(number, 0 if overload else rng.randint(0, 12), tuple(prompt), max_tokens))
    rows = rng.randint(1, 6)
    options = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": rows + rng.choice([0, 1, 3, 60]),
        "watermark_blocks": rng.choice([0, 0, 1, 2]),
        "cached": rng.random() < 0.7,
    }
    return Trace(num_blocks, block_size, options, tuple(sorted(arrivals, key=lambda a: (a.step, a.number))))


@pytest.mark.parametrize("seed", range(NUM_TRACES))
def test_every_step_is_that_of_the_readable_scheduler(worlds: Any, seed: int) -> None:
    trace = make_trace(seed)
    world = worlds.make(trace.num_blocks, trace.block_size, **dict(trace.options))
    options = dict(trace.options)
    manager = reference.KVBlockManager(trace.num_blocks, trace.block_size, enable_prefix_caching=options.pop("cached"))
    oracle = readable.Scheduler(manager, **options)
    arrivals = list(trace.arrivals)
    step = 0
    while arrivals or world.scheduler.has_unfinished or oracle.waiting or oracle.running:
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.pop(0)
            world.add(step * 100 + arrival.number, list(arrival.prompt), arrival.max_tokens)
            oracle.add(readable.Request(step * 100 + arrival.number, list(arrival.prompt), arrival.max_tokens))
        num_steps, num_ended = len(world.steps), len(world.ended)
        computed = world.step()
        expected = oracle.step(lambda request: worlds.next_token(request.token_ids))
        assert {number: n for number, n in computed.items() if n} == expected.num_tokens
        if len(world.steps) > num_steps:
            assert [s.sequence_id for s in world.steps[-1].preempted] == expected.preempted
            left = [number for number in expected.admitted if number not in expected.preempted]
            assert [s.sequence_id for s in world.steps[-1].admitted] == left
        assert sorted(s.sequence_id for s in world.ended[num_ended:]) == sorted(expected.ended)
        step += 1
    assert manager.stats.live == 0


@pytest.mark.parametrize("seed", range(100, 100 + NUM_TRACES))
def test_progress_order_and_budgets_under_overload(worlds: Any, seed: int) -> None:
    """All arrive at once. Every request ends in time, with its solo tokens; nobody gives way to a younger one."""
    trace = make_trace(seed, overload=True)
    world = worlds.make(trace.num_blocks, trace.block_size, **dict(trace.options))
    sequences = [world.add(a.number, list(a.prompt), a.max_tokens) for a in trace.arrivals]
    first_run: list[int] = []
    steps = before_it = 0
    bounds = {}
    for arrival, sequence in zip(trace.arrivals, sequences, strict=True):
        before_it += len(arrival.prompt) + arrival.max_tokens
        bounds[sequence] = before_it
    while world.scheduler.has_unfinished:
        oldest = min((s for s in sequences if s.finish_reason is None), key=lambda s: s.rank)
        computed = world.step()
        steps += 1
        assert computed[oldest.sequence_id] >= 1, "the oldest always advances, so no step stands still"
        planned = world.steps[-1]
        for victim in planned.preempted:
            assert all(s.rank < victim.rank for s in world.scheduler.running), "no one younger stays"
        first_run += [s.arrival for s in planned.admitted if s.num_preemptions == 0]
        assert len(planned.input_ids) <= trace.options["max_num_batched_tokens"]
        assert planned.batch_step.num_rows <= trace.options["max_num_seqs"]
        for sequence in sequences:
            assert sequence.finish_reason or steps < bounds[sequence], "it has to be done by now"
    assert first_run == sorted(first_run)
    assert sequences[0].num_preemptions == 0
    assert steps <= trace.num_tokens
    assert [s.output_token_ids for s in sequences] == [
        worlds.solo(list(a.prompt), a.max_tokens) for a in trace.arrivals
    ]
    assert world.manager.stats.live == 0
    assert world.manager.num_sequences == 0


@pytest.mark.parametrize("seed", range(400, 400 + NUM_TRACES))
def test_progress_with_priorities_under_overload(worlds: Any, seed: int) -> None:
    """More comes than fits, of three priorities, at any time: it ends in time, and nobody gives way to a worse one."""
    rng = random.Random(seed)
    trace = make_trace(seed, overload=seed % 2 == 0)
    world = worlds.make(trace.num_blocks, trace.block_size, **dict(trace.options))
    arrivals, sequences = list(trace.arrivals), []
    steps, last_arrival = 0, max(a.step for a in trace.arrivals)
    while arrivals or world.scheduler.has_unfinished:
        while arrivals and arrivals[0].step <= steps:
            arrival = arrivals.pop(0)
            sequences.append(
                world.add(arrival.number, list(arrival.prompt), arrival.max_tokens, priority=rng.choice([0, 0, 1, 2]))
            )
        steps += 1
        if not world.scheduler.has_unfinished:
            continue
        computed = world.step()
        planned = world.steps[-1]
        # A step that leaves all waiting and none running would compute nothing; none does.
        assert computed
        assert sum(computed.values()) >= len(computed) - len(planned.admitted)
        assert len(planned.input_ids) <= trace.options["max_num_batched_tokens"]
        for victim in planned.preempted:
            assert all(s.rank < victim.rank for s in world.scheduler.running), "whoever stays is better"
        best = min((s for s in sequences if s.sequence_id in computed), key=lambda s: s.rank)
        assert computed[best.sequence_id] >= 1, "the best that runs advances"
    assert steps <= last_arrival + 1 + 2 * trace.num_tokens
    for arrival, sequence in zip(trace.arrivals, sequences, strict=True):
        assert sequence.output_token_ids == worlds.solo(list(arrival.prompt), arrival.max_tokens)
    assert world.manager.stats.live == 0
    assert world.manager.num_sequences == 0


@pytest.mark.parametrize("seed", range(200, 200 + NUM_TRACES))
def test_anything_may_happen_and_nothing_leaks(worlds: Any, seed: int) -> None:
    """Priorities, forks, aborts, failed steps: whoever is not aborted gets his solo tokens; all blocks come back."""
    rng = random.Random(seed)
    trace = make_trace(seed)
    world = worlds.make(trace.num_blocks, trace.block_size, **dict(trace.options))
    arrivals, sequences, parents = list(trace.arrivals), [], {}
    step = 0
    while arrivals or world.scheduler.has_unfinished:
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.pop(0)
            prompt, new, priority = list(arrival.prompt), arrival.max_tokens, rng.choice([0, 0, 1])
            num_forks = rng.choice([0, 0, 1, 2]) if trace.options["max_num_seqs"] > 2 else 0
            ids = [10 * arrival.number + n for n in range(1 + num_forks)]
            forks = [world.sequence(n, prompt, rng.randint(1, new), priority=priority) for n in ids[1:]]
            parent = world.add(ids[0], prompt, new, priority=priority, pending=forks)
            parents.update(dict.fromkeys((parent, *forks), prompt))
            sequences += [parent, *forks]
        step += 1
        chance = rng.random()
        if chance < 0.08 and sequences:
            world.scheduler.finish(rng.choice(sequences), "abort")
        elif chance < 0.12:
            world.scheduler.restart_all()
        elif chance < 0.16:
            planned = world.scheduler.schedule()
            if planned is not None:
                world.manager.take_copies()
                if rng.random() < 0.5:
                    world.scheduler.commit(planned)
                world.scheduler.restart_all()
                assert world.manager.check_invariants() == []
        else:
            world.step()
        assert step < 10_000
    for sequence, prompt in parents.items():
        assert sequence.finish_reason in ("length", "abort")
        expected = worlds.solo(prompt, sequence.max_tokens)
        if sequence.finish_reason == "length":
            assert sequence.output_token_ids == expected
        else:
            assert sequence.output_token_ids == expected[: sequence.num_generated_tokens]
    assert world.manager.stats.live == 0
    assert world.manager.num_sequences == 0
    assert world.followed.rows == []


@pytest.mark.parametrize("seed", range(300, 320))
def test_what_can_not_fit_is_refused_and_nothing_else(worlds: Any, seed: int) -> None:
    rng = random.Random(seed)
    world = worlds.make(rng.randint(1, 5), rng.randint(1, 4))
    room = world.manager.num_blocks * world.manager.block_size
    for number in range(12):
        length, new = rng.randint(1, room + 3), rng.randint(1, 4)
        if length + new - 1 > room:
            with pytest.raises(SequenceTooLongError):
                world.add(number, [number] * length, new)
        else:
            world.add(number, [number] * length, new)
    world.run()
