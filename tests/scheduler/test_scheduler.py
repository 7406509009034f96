"""The scheduler's rules, one by one, on numbers small enough to follow by hand."""

from typing import Any

import numpy as np
import pytest

from kvpager import KVBlockManager
from kvpager.errors import ArgumentError, ConfigError, OutOfBlocksError, SequenceTooLongError, StateError
from kvpager.scheduler import Status


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_the_two_counters(worlds: Any) -> None:
    """(computed, generated) after a prefill of P and two decodes: (P, 1), (P + 1, 2), (P + 2, 3)."""
    world = worlds.make(8, 4)
    sequence = world.add(7, tokens(1, 6), 3)
    seen = []
    while world.scheduler.has_unfinished:
        world.step()
        computed = world.manager.sequences[7].sequence_length if sequence.row >= 0 else None
        seen.append((computed, sequence.num_generated_tokens))
    assert seen == [(6, 1), (7, 2), (None, 3)]
    assert sequence.output_token_ids == worlds.solo(tokens(1, 6), 3)
    assert (sequence.finish_reason, sequence.status) == ("length", Status.FINISHED)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("budget", [2, 64])
def test_b092_what_can_never_fit_is_refused(worlds: Any, first: bool, budget: int) -> None:
    """4 blocks of 4: a prompt of 20 is refused with the numbers, whoever else is there."""
    world = worlds.make(4, 4, max_num_batched_tokens=budget, max_num_seqs=2)
    if not first:
        small = world.add(2, tokens(1, 4), 4)
    with pytest.raises(SequenceTooLongError) as caught:
        world.add(1, tokens(1, 20), 1)
    assert str(caught.value) == (
        "20 prompt tokens and 1 new ones need 5 blocks of 4 tokens, 4 is the most; "
        "set `num_blocks` to at least 5, or lower `max_tokens` by 4"
    )
    if first:
        small = world.add(2, tokens(1, 4), 4)
    world.run()
    assert small.output_token_ids == worlds.solo(tokens(1, 4), 4)


def test_the_last_token_takes_no_slot(worlds: Any) -> None:
    world = worlds.make(4, 4)
    world.add(1, tokens(1, 13), 4)
    with pytest.raises(SequenceTooLongError, match="need 5 blocks"):
        world.add(2, tokens(1, 13), 5)
    world.run()


@pytest.mark.parametrize(("num_requests", "most_steps"), [(2, 64), (6, 384)])
def test_b093_progress_under_pressure(worlds: Any, num_requests: int, most_steps: int) -> None:
    """4 blocks of 4, prompts of 7 and 8 new tokens each: only one can be held to its end."""
    world = worlds.make(4, 4)
    prompts = [tokens(10 * n, 10 * n + 6) for n in range(num_requests)]
    sequences = [world.add(n, prompt, 8) for n, prompt in enumerate(prompts)]
    steps = world.run(most_steps)
    assert [s.output_token_ids for s in sequences] == [worlds.solo(prompt, 8) for prompt in prompts]
    assert world.ended == sequences, "first come first served"
    assert sequences[0].num_preemptions == 0
    assert world.scheduler.counts.num_preemptions >= 1
    assert steps <= 16 * num_requests


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_b094_the_victim_may_be_before_at_or_after_the_cursor(worlds: Any, victim: int) -> None:
    """Three at a block boundary with no block free; priorities say who gives way."""
    world = worlds.make(3, 4)
    sequences = [world.add(n, tokens(10 * n, 10 * n + 3), 4, priority=9 if n == victim else 0) for n in range(3)]
    assert set(world.step()) == {0, 1, 2}
    assert world.manager.num_free_blocks == 0
    sequences_kept = [n for n in range(3) if n != victim]
    # Two need a block each and one gives one back: the youngest of the others gives way as well.
    computed = world.step()
    assert sequences[victim].num_preemptions == 1
    assert victim not in computed
    step = world.steps[-1]
    assert [s.sequence_id for s in step.preempted] == [victim, sequences_kept[1]]
    assert computed == {sequences_kept[0]: 1}
    assert len(step.input_ids) == 1
    assert list(step.buffers.seq_lens[:2]) == [5, 0]
    world.run()
    assert [s.output_token_ids for s in sequences] == [worlds.solo(tokens(10 * n, 10 * n + 3), 4) for n in range(3)]


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("cached", [True, False])
def test_b095_prompt_and_outputs_are_computed_again(worlds: Any, after: int, cached: bool) -> None:
    """Preempted after any number of tokens, a request goes on as if nothing had been; nothing is emitted twice."""
    world = worlds.make(8, 4, cached=cached)
    sequence = world.add(1, tokens(1, 5), 9)
    for _ in range(after):
        world.step()
    if after:
        world.scheduler._preempt_worst()
        assert sequence.row == -1
        computed = world.step()
        known = 5 + after  # prompt and outputs; the K/V of all but the last existed
        hits = (known - 1) // 4 * 4 if cached else 0
        assert computed == {1: known - hits}
    world.run()
    assert sequence.output_token_ids == worlds.solo(tokens(1, 5), 9)
    assert world.scheduler.counts.num_queried_tokens == 5, "b020: what came back is no hit of its user"
    assert sequence.num_cached_tokens == 0


def test_b020_a_request_that_comes_back_counts_no_hit(worlds: Any) -> None:
    world = worlds.make(8, 4)
    world.add(1, tokens(1, 9), 4)
    world.step()
    world.scheduler._preempt_worst()
    world.run()
    assert world.scheduler.counts.num_cached_tokens == 0
    assert world.manager.stats.num_hit_tokens == 0
    assert world.manager.stats.num_resumed_tokens == 8


def test_b096_the_budget_counts_computed_tokens(worlds: Any) -> None:
    world = worlds.make(16, 4, max_num_batched_tokens=8)
    world.add(0, tokens(1, 9), 1)
    world.run()
    first = world.add(1, tokens(1, 8) + tokens(50, 53), 3)
    second = world.add(2, tokens(21, 28), 3)
    assert world.step() == {1: 4, 2: 4}
    assert first.num_cached_tokens == 8
    assert world.step() == {1: 1, 2: 4}
    assert (first.num_generated_tokens, second.num_generated_tokens) == (2, 1)
    world.run()


def test_b097_chunks(worlds: Any) -> None:
    """A prompt of 10 in chunks of 4: a token only at the end; blocks are found once they are full and computed."""
    world = worlds.make(8, 4, max_num_batched_tokens=4, max_num_seqs=4)
    sequence = world.add(1, tokens(1, 10), 1)
    seen = []
    while world.scheduler.has_unfinished:
        computed = world.step()[1]
        seen.append((computed, sequence.num_generated_tokens, world.manager.stats.indexed))
    assert seen == [(4, 0, 1), (4, 0, 2), (2, 1, 2)]
    world = worlds.make(8, 4, max_num_batched_tokens=4, max_num_seqs=4)
    sequence = world.add(1, tokens(1, 10), 1)
    world.step()
    world.scheduler.finish(sequence, "abort")
    assert world.manager.match_prefix(tokens(1, 10)) == 4
    assert world.manager.stats.live == 0


def test_b099_two_half_computed_prompts_do_not_wait_for_each_other(worlds: Any) -> None:
    world = worlds.make(4, 4, max_num_batched_tokens=8)
    sequences = [world.add(1, tokens(1, 12), 1), world.add(2, tokens(21, 32), 1)]
    steps = 0
    while world.scheduler.has_unfinished:
        assert world.step(), "no step stands still"
        steps += 1
    assert steps <= 16
    assert [s.num_generated_tokens for s in sequences] == [1, 1]
    assert world.scheduler.counts.num_preemptions == 0


def test_one_step_mixes_prefill_and_decode(worlds: Any) -> None:
    world = worlds.make(32, 4, max_num_batched_tokens=6, max_num_seqs=4)
    world.add(1, tokens(1, 4), 6)
    world.step()
    world.add(2, tokens(11, 20), 2)
    assert world.step() == {1: 1, 2: 5}
    assert world.step() == {1: 1, 2: 5}
    assert world.step() == {1: 1, 2: 1}
    world.run()


def test_priorities_go_first(worlds: Any) -> None:
    world = worlds.make(32, 4, max_num_seqs=1, max_num_batched_tokens=8)
    sequences = [world.add(n, tokens(n + 1, n + 4), 2, priority=p) for n, p in enumerate((1, 5, 0, 5))]
    world.run()
    assert [s.sequence_id for s in world.ended] == [2, 0, 1, 3]
    assert all(s.num_preemptions == 0 for s in sequences)


def test_held_back_says_which_budget(worlds: Any) -> None:
    world = worlds.make(8, 4, max_num_seqs=2, max_num_batched_tokens=4)
    world.add(1, tokens(1, 4), 4)
    world.add(2, tokens(11, 14), 4)
    world.add(3, tokens(21, 24), 4)
    world.step()
    assert world.steps[-1].held_back == "tokens"
    world.step()
    assert world.steps[-1].held_back == "sequences"
    world.run()
    world = worlds.make(5, 4, max_num_seqs=2)
    world.add(1, tokens(1, 12), 4)
    world.add(2, tokens(21, 32), 4)
    world.step()
    assert world.steps[-1].held_back == "blocks"
    world.run()
    assert world.steps[-1].held_back is None


def test_the_watermark_is_kept_while_others_run_and_waived_else(worlds: Any) -> None:
    world = worlds.make(8, 4, watermark_blocks=3)
    world.add(1, tokens(1, 30), 2)
    world.add(2, tokens(41, 43), 2)
    world.step()
    assert [s.sequence_id for s in world.scheduler.running] == [1]
    assert world.steps[-1].held_back == "blocks"
    world.run()
    assert [s.sequence_id for s in world.ended] == [1, 2]


@pytest.mark.parametrize("eviction_policy", KVBlockManager.eviction_policies)
def test_f231_a_refusal_leaves_order_and_counters_alone(worlds: Any, eviction_policy: str) -> None:
    """The first who waits would find 8 tokens, but does not fit beside the watermark of those who run."""
    world = worlds.make(8, 4, watermark_blocks=3, eviction_policy=eviction_policy)
    world.add(1, tokens(1, 8), 1)
    world.add(2, tokens(21, 28), 1)
    world.run()  # leaves two cached prefixes
    world.add(3, tokens(41, 44), 8)
    world.step()
    manager = world.manager
    before = (manager.free_blocks, manager.stats.num_queried_tokens, manager.stats.num_hit_tokens)
    assert len(manager.free_blocks) == 7
    world.add(4, tokens(1, 24), 1)
    admitted, held_back = world.scheduler._admit()
    assert (admitted, held_back) == ([], "blocks")
    assert (manager.free_blocks, manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == before
    world.run()
    assert [s.sequence_id for s in world.ended] == [1, 2, 3, 4]


def test_stop_tokens_end_a_sequence(worlds: Any) -> None:
    world = worlds.make(8, 4)
    solo = worlds.solo(tokens(1, 4), 6)
    stopping = world.add(1, tokens(1, 4), 6, stop_token_ids=frozenset({solo[2], 10_000}))
    going_on = world.add(2, tokens(1, 4), 6)
    world.run()
    assert stopping.output_token_ids == solo[: solo.index(solo[2]) + 1]
    assert (stopping.finish_reason, stopping.stop_token_id) == ("stop", solo[2])
    assert (going_on.output_token_ids, going_on.finish_reason, going_on.stop_token_id) == (solo, "length", None)


def test_a_row_in_error_ends_alone(worlds: Any) -> None:
    world = worlds.make(8, 4)
    sequences = [world.add(n, tokens(n + 1, n + 4), 3) for n in range(3)]
    due = world.scheduler.commit(world.scheduler.schedule())
    taken, ended = world.scheduler.take(due, np.array([5, -1, 6]), np.array([True, False, True]))
    assert taken == sequences
    assert ended == [sequences[1]]
    assert [s.output_token_ids for s in sequences] == [[5], [], [6]]
    assert sequences[1].finish_reason == "error"
    world.run()


def test_b124_abort_in_every_state(worlds: Any) -> None:
    world = worlds.make(8, 4, max_num_batched_tokens=4, max_num_seqs=4)
    queued, half, decoding, preempted = (world.sequence(n, tokens(10 * n, 10 * n + 5), 4) for n in range(4))
    world.scheduler.finish(queued, "abort")  # never added
    for sequence in (decoding, preempted):
        world.scheduler.add(sequence)
    for _ in range(4):
        world.step()
    world.scheduler._preempt_worst()
    world.scheduler.finish(preempted, "abort")
    world.scheduler.finish(preempted, "length")
    assert preempted.finish_reason == "abort", "the first end counts"
    world.scheduler.finish(decoding, "abort")
    world.scheduler.add(half)
    world.step()
    assert world.scheduler.num_computed_tokens(half) == 4
    world.scheduler.finish(half, "abort")
    waiting = world.add(9, tokens(1, 4), 1)
    world.scheduler.finish(waiting, "abort")
    assert not world.scheduler.has_unfinished
    assert world.scheduler.schedule() is None
    assert world.manager.stats.live == 0
    world.add(10, tokens(1, 4), 1)
    world.run()


def test_forks_share_the_prompt_and_copy_its_tail(worlds: Any) -> None:
    world = worlds.make(16, 4)
    forks = [world.sequence(n, tokens(1, 6), 4) for n in (2, 3)]
    parent = world.add(1, tokens(1, 6), 4, pending=forks)
    world.choose = lambda ids: len(ids)  # any token
    world.step()
    assert [s.sequence_id for s in world.scheduler.running] == [1, 2, 3]
    assert world.manager.stats.live == 2, "three sequences, one prompt"
    assert [s.num_generated_tokens for s in (parent, *forks)] == [1, 1, 1]
    world.step()
    assert world.manager.stats.live == 4, "the full block is shared, each has a tail of its own"
    assert world.manager.stats.num_copies == 2
    world.run()
    assert [s.num_generated_tokens for s in (parent, *forks)] == [4, 4, 4]


def test_forks_wait_for_enough_rows(worlds: Any) -> None:
    world = worlds.make(16, 4, max_num_seqs=3)
    world.add(9, tokens(1, 4), 3)
    parent = world.add(1, tokens(1, 6), 4, pending=[world.sequence(n, tokens(1, 6), 4) for n in (2, 3)])
    world.step()
    assert world.steps[-1].held_back == "sequences"
    with pytest.raises(ArgumentError, match="at most 3 sequences of one prompt"):
        world.add(4, tokens(1, 6), 4, pending=[world.sequence(n, tokens(1, 6), 4) for n in (5, 6, 7)])
    world.run()
    assert parent.finish_reason == "length"
    assert len(world.ended) == 4


def test_an_aborted_parent_takes_its_forks_to_be_with_it(worlds: Any) -> None:
    world = worlds.make(16, 4, max_num_batched_tokens=4, max_num_seqs=4)
    forks = [world.sequence(n, tokens(1, 6), 4) for n in (2, 3)]
    parent = world.add(1, tokens(1, 6), 4, pending=forks)
    world.step()
    world.scheduler.finish(parent, "abort")
    assert [f.finish_reason for f in forks] == ["abort", "abort"]
    world.add(5, tokens(1, 6), 1, pending=[world.sequence(n, tokens(1, 6), 1) for n in (6, 7, 8)])
    world.run()


def test_a_stall_is_an_error_with_its_reason(worlds: Any) -> None:
    world = worlds.make(4, 4)
    held = [world.manager.allocate_block() for _ in range(3)]
    sequence = world.add(1, tokens(1, 8), 2)
    for _ in range(2):
        with pytest.raises(StateError) as caught:
            world.scheduler.schedule()
        assert str(caught.value) == (
            "nothing can run: sequence 1 needs 2 blocks, 1 free of 4, and no running request will give any back "
            "(3 are held outside of the scheduler); free them or set `num_blocks` to at least 5"
        )
    for block in held:
        world.manager.free_block(block)
    world.run()
    assert sequence.finish_reason == "length"


def test_a_stall_of_the_last_one_running(worlds: Any) -> None:
    world = worlds.make(4, 4)
    sequence = world.add(1, tokens(1, 4), 6)
    world.step()
    held = [world.manager.allocate_block() for _ in range(3)]
    with pytest.raises(StateError, match="nothing can run: sequence 1 needs 2 blocks, 1 free of 4"):
        world.scheduler.schedule()
    assert world.scheduler.num_waiting == 1
    for block in held:
        world.manager.free_block(block)
    world.run()
    assert sequence.output_token_ids == worlds.solo(tokens(1, 4), 6)


@pytest.mark.parametrize("when", ["scheduled", "committed"])
def test_a_failed_step_is_begun_again(worlds: Any, when: str) -> None:
    world = worlds.make(16, 4, max_num_batched_tokens=8)
    prompts = [tokens(1, 6), tokens(21, 27), tokens(31, 33)]
    forks = [world.sequence(9, tokens(1, 6), 5)]
    sequences = [world.add(0, prompts[0], 5, pending=forks), *(world.add(n, prompts[n], 5) for n in (1, 2))]
    for failing in range(4):
        planned = world.scheduler.schedule()
        if when == "committed":
            world.manager.take_copies()
            world.scheduler.commit(planned)
        world.scheduler.restart_all()
        assert world.manager.stats.live == 0
        assert world.manager.check_invariants() == []
        assert world.scheduler.num_waiting + sum(len(s.pending) for s in sequences) == 4
        for _ in range(failing):
            world.step()
    world.run()
    assert [s.output_token_ids for s in (*sequences, *forks)] == [
        worlds.solo(prompt, 5) for prompt in (*prompts, prompts[0])
    ]


def test_b017_two_equal_prompts_in_one_step_end_on_the_same_blocks(worlds: Any) -> None:
    world = worlds.make(16, 4)
    world.add(1, tokens(1, 9), 3)
    world.add(2, tokens(1, 9), 3)
    world.step()
    first, second = (world.manager.sequences[n].block_table for n in (1, 2))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    world.run()


def test_a_prompt_finds_what_another_computed(worlds: Any) -> None:
    world = worlds.make(16, 4)
    world.add(1, tokens(1, 12), 1)
    world.run()
    for salt, cached in ((None, 8), ("other", 0)):
        sequence = world.add(2, tokens(1, 12), 1, salt=salt)
        world.run()
        assert sequence.num_cached_tokens == cached
    assert (world.scheduler.counts.num_queried_tokens, world.scheduler.counts.num_cached_tokens) == (36, 8)


def test_an_error_of_the_allocator_changes_nothing(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds.make(8, 4)
    sequences = [world.add(n, tokens(10 * n, 10 * n + 3), 6) for n in range(2)]

    class Failing:
        def __init__(self, batch: Any) -> None:
            self.remove = batch.remove

        def step(self, *_args: Any) -> None:
            raise OutOfBlocksError(1, 0, 0, 8, 0)

    world.step()
    monkeypatch.setattr(world.scheduler, "batch", Failing(world.scheduler.batch))
    with pytest.raises(StateError):
        world.scheduler.schedule()
    assert world.manager.stats.live == 0
    monkeypatch.undo()
    world.run()
    assert [s.output_token_ids for s in sequences] == [worlds.solo(tokens(10 * n, 10 * n + 3), 6) for n in range(2)]


def test_settings_that_can_not_work(worlds: Any) -> None:
    with pytest.raises(ConfigError, match="`max_num_batched_tokens` is 3; it must be at least `max_num_seqs` 4"):
        worlds.make(8, 4, max_num_seqs=4, max_num_batched_tokens=3)
    with pytest.raises(ArgumentError, match="at least one prompt token and one to generate, got 0 and 1"):
        worlds.make(8, 4).add(1, [], 1)


def test_b105_rolling_back_drafts(worlds: Any) -> None:
    """10 tokens, 4 drafts appended, some accepted: blocks, lengths and the next slot."""
    for accepted, num_blocks in ((1, 3), (0, 3), (4, 4)):
        manager = worlds.make(8, 4, cached=False).manager
        manager.create_sequence(1)
        manager.append_tokens(1, 10)
        manager.append_tokens(1, 4)
        assert (len(manager.sequences[1].block_table), manager.num_free_blocks) == (4, 4)
        manager.truncate_sequence(1, 10 + accepted)
        state = manager.sequences[1]
        assert (state.sequence_length, len(state.block_table)) == (10 + accepted, num_blocks)
        assert manager.num_free_blocks == 8 - num_blocks
        slot = manager.append_token(1)
        position = 10 + accepted
        assert slot == manager.sequences[1].block_table[position // 4] * 4 + position % 4


def test_b105_drafts_change_no_token(worlds: Any) -> None:
    """200 rounds of drafts of which any number is right: what is kept is what one by one would have given."""
    rng = np.random.default_rng(5)
    manager = worlds.make(300, 4).manager
    known = tokens(1, 5)
    manager.admit(1, known, out=np.zeros(5, dtype=np.int64))
    manager.commit(1, 5)
    known.append(worlds.next_token(known))
    for _ in range(200):
        num_drafts, num_right = int(rng.integers(0, 5)), int(rng.integers(0, 5))
        drafts = [*known]
        for place in range(num_drafts):
            token = worlds.next_token(drafts)
            drafts.append(token if place < num_right else token + 1)
        start = len(known) - 1  # the last known token is not computed yet
        manager.append_tokens(1, drafts[start:])
        accepted = min(num_right, num_drafts)
        manager.truncate_sequence(1, start + 1 + accepted)
        manager.commit(1, start + 1 + accepted)
        known = drafts[: len(known) + accepted]
        known.append(worlds.next_token(known))
        assert manager.sequences[1].sequence_length == len(known) - 1
        if len(known) > 1000:
            break
    assert known[5:] == worlds.solo(tokens(1, 5), len(known) - 5)
    manager.release_sequence(1)
    assert manager.stats.live == 0
    assert manager.check_invariants() == []
