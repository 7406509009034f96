"""Faults known from other projects, by id (tests/cases.md): eviction; and what pins, policies and fences promise."""

from array import array

import pytest

from kvpager._core import KVBlockManager
from kvpager.errors import ArgumentError, OutOfBlocksError, SequenceTooLongError, StateError


def T(first, last):  # noqa: N802 - the notation of the cases
    return list(range(first, last + 1))


def run(manager, sequence_id, tokens, *, free=True, **options):
    """Admit, compute, commit, free; the cached tokens."""
    cached = manager.admit(sequence_id, tokens, **options, out=array("q", [0] * len(tokens))).num_computed_tokens
    manager.commit(sequence_id, len(tokens))
    if free:
        manager.release_sequence(sequence_id)
    return cached


def take(manager, sequence_id, n=1):
    """A sequence of `n` blocks that never are indexed."""
    manager.create_sequence(sequence_id)
    manager.append_tokens(sequence_id, n * manager.block_size)


@pytest.mark.parametrize("eviction_policy", KVBlockManager.eviction_policies)
def test_b039_tail_goes_first(make_caching, eviction_policy):
    for _ in range(100):
        manager = make_caching(3, 4, eviction_policy=eviction_policy)
        run(manager, 1, T(1, 12))
        for sequence_id, hit in ((91, 8), (92, 4), (93, 0)):
            manager.admit(sequence_id, [sequence_id], out=array("q", [0]))
            assert manager.match_prefix(T(1, 13)) == hit


def test_b040_every_matched_block_is_kept(make_caching, observe):
    manager = make_caching(3, 4)
    run(manager, 1, T(1, 8))
    assert manager.admit(2, T(1, 9)).num_computed_tokens == 8
    before = observe(manager)
    with pytest.raises(OutOfBlocksError):
        manager.admit(3, [77])
    assert observe(manager) == before
    manager.release_sequence(2)
    manager.admit(3, [77])
    assert manager.match_prefix(T(1, 9)) == 8
    assert manager.stats.num_evictions == 0


def test_b040_blocks_matched_in_a_call_are_no_victims_of_it(make_caching, observe):
    """The oldest cached blocks are those of the prompt itself; it takes the younger ones."""
    manager = make_caching(4, 4)
    run(manager, 1, T(1, 8))
    run(manager, 2, T(21, 28))
    assert manager.admit(3, T(1, 16)).num_computed_tokens == 8
    assert manager.match_prefix(T(21, 29)) == 0
    observe(manager)


def test_b041_touch_order(make_caching):
    manager = make_caching(3, 4)
    run(manager, 1, T(1, 4))
    run(manager, 2, T(11, 14))
    assert manager.admit(3, T(1, 5)).num_computed_tokens == 4
    manager.release_sequence(3)
    take(manager, 8)
    take(manager, 9)
    assert manager.match_prefix(T(1, 5)) == 4
    assert manager.match_prefix(T(11, 15)) == 0


def test_b044_evict_exactly_k(make_caching, observe):
    manager = make_caching(8, 4)
    for k in range(8):
        run(manager, k, [k] * 4)
    survivors = 8
    for k, evicted in ((1, 1), (2, 2), (0, 0), (100, 5)):
        before = manager.stats.num_evictions
        for _ in range(k):
            if manager.num_free_blocks:
                manager.allocate_block()
        assert manager.stats.num_evictions - before == evicted
        survivors -= evicted
        assert [manager.match_prefix([i] * 5) for i in range(8)] == [0] * (8 - survivors) + [4] * survivors
        observe(manager)


def test_free_blocks_are_used_before_cached_ones(make_caching):
    manager = make_caching(4, 4)
    run(manager, 1, T(1, 10))  # two indexed blocks, one that is free again
    assert manager.block_states() == ["cached", "cached", "free", "free"]
    assert manager.free_blocks == [2, 3, 1, 0]
    assert [manager.allocate_block() for _ in range(4)] == [2, 3, 1, 0]
    assert manager.stats.num_evictions == 2


def test_a_scan_does_not_sweep_what_was_hit(make_caching):
    """Segmented LRU keeps the prefix that was found again; plain LRU loses it to prompts that never come back."""
    kept = {}
    for policy in ("lru", "slru"):
        manager = make_caching(6, 4, eviction_policy=policy)
        run(manager, 1, T(1, 8))
        assert run(manager, 2, T(1, 9)) == 8
        for k in range(20):
            run(manager, 3, [100 + k] * 8)
        kept[policy] = manager.match_prefix(T(1, 9))
    assert kept == {"lru": 0, "slru": 8}


def test_protected_blocks_overflow_in_the_order_of_age(make_caching):
    manager = make_caching(6, 1, eviction_policy="slru")  # protects four
    run(manager, 1, T(1, 6))
    assert run(manager, 2, T(1, 6)) == 5  # the sixth token is computed again and found at commit
    ranks = [manager.block_info(block).eviction_rank for block in range(6)]
    assert ranks == [5, 4, 3, 2, 1, 0]
    assert [manager.allocate_block() for _ in range(6)] == [5, 4, 3, 2, 1, 0]


def test_a_demoted_block_has_to_earn_its_protection_again(make_caching):
    manager = make_caching(7, 1, eviction_policy="slru")  # protects four
    run(manager, 1, [1, 2])
    run(manager, 1, [11, 12, 13])
    for prompt in ([1, 2, 7], [11, 12, 13, 7]):
        manager.admit(1, prompt)
        manager.release_sequence(1)
    # Five hit blocks: the oldest, that of token 2, is on probation again.
    assert manager.free_blocks[2:] == [1, 0, 4, 3, 2]
    manager.admit(2, [11, 12, 13, 7], resumed=True)  # out of the way
    manager.unpin(manager.pin_prefix([1, 2]))
    run(manager, 3, [50])
    assert manager.free_blocks == [1, 6, 0]


def test_s3fifo_keeps_what_was_hit_and_what_came_back(make_caching):
    """Main holds what was hit; the ghost lets in a prompt that comes back soon after it was given up."""
    manager = make_caching(10, 1, eviction_policy="s3fifo")
    run(manager, 1, [1, 2])
    assert run(manager, 2, [1, 2, 3]) == 2
    for k in range(20):
        run(manager, 3, [100 + k])
    assert manager.match_prefix([1, 2, 3]) == 2
    run(manager, 5, [50])
    num_later = 0
    while manager.match_prefix([50, 0]):
        run(manager, 6, [200 + num_later])
        num_later += 1
    assert num_later == 8  # all that the hit blocks leave
    run(manager, 7, [50])
    for k in range(20):
        run(manager, 8, [300 + k])
    assert manager.match_prefix([50, 0]) == 1
    manager.reset_prefix_cache()  # the ghost forgets, too
    for token in (60, *range(400, 411), 60, *range(500, 511)):
        if token == 400:
            manager.reset_prefix_cache()
        run(manager, 9, [token])
    assert manager.match_prefix([60, 0]) == 0


def test_s3fifo_gives_up_what_was_not_hit_and_then_what_was_hit_least(make_caching):
    manager = make_caching(10, 1, eviction_policy="s3fifo")
    for token, num_hits in ((1, 3), (2, 1), (3, 2), (4, 0)):
        run(manager, 1, [token])
        for _ in range(num_hits):
            run(manager, 1, [token, 9])
    # Tokens 1 to 4 lie in the blocks 0, 2, 4 and 6, and the 9 behind each of the first three in the next block.
    assert manager.free_blocks == [7, 8, 9, 1, 3, 5, 6, 2, 4, 0]
    assert [manager.allocate_block() for _ in range(10)] == [7, 8, 9, 1, 3, 5, 6, 2, 4, 0]


def test_resumed_requests_earn_no_protection(make_caching):
    manager = make_caching(6, 4, eviction_policy="slru")
    run(manager, 1, T(1, 8))
    assert run(manager, 2, T(1, 9), resumed=True) == 8
    for k in range(20):
        run(manager, 3, [100 + k] * 8)
    assert manager.match_prefix(T(1, 9)) == 0


def test_what_an_append_evicts_does_not_change_what_the_batch_copies(make_caching, observe):
    """A tail that the index continues when the call begins is copied, also if the call itself evicts what follows."""
    manager = make_caching(4, 2)
    run(manager, 1, T(1, 5))
    assert manager.admit(2, [1, 2, 9]).num_computed_tokens == 2
    manager.commit(2, 3)
    manager.truncate_sequence(2, 1)  # its tail is block 0, which block 1 continues
    manager.create_sequence(3)
    assert manager.free_blocks == [2, 3, 1]
    before = observe(manager)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.slot_mapping_for_append([3, 2], [6, 1])
    assert (caught.value.needed, caught.value.free, caught.value.row) == (4, 3, 1)
    assert observe(manager) == before
    assert manager.slot_mapping_for_append([3, 2], [4, 1]).tolist() == [4, 5, 6, 7, 3]
    assert manager.take_copies() == [(0, 1)]
    assert manager.match_prefix(T(1, 5)) == 2
    observe(manager)


# Pins


def test_pinned_blocks_are_live_and_no_victims(make_caching, observe):
    manager = make_caching(4, 4)
    run(manager, 1, T(1, 8))
    pin = manager.pin_prefix(T(1, 8))
    assert (manager.stats.live, manager.stats.pinned, manager.stats.cached) == (2, 2, 0)
    take(manager, 5, 2)
    with pytest.raises(OutOfBlocksError):
        manager.allocate_block()
    info = manager.block_info(0)
    assert (info.state, info.ref_count, info.owners, info.num_pins, info.num_filled) == ("live", 1, (), 1, 4)
    observe(manager)
    manager.unpin(pin)
    assert manager.match_prefix(T(1, 9)) == 8
    with pytest.raises(ArgumentError, match="pin"):
        manager.unpin(pin)
    assert manager.allocate_block() == 1  # the tail first
    assert manager.match_prefix(T(1, 9)) == 4
    observe(manager)


def test_the_quota_counts_each_pinned_block_once(make_caching, observe):
    manager = make_caching(8, 4, max_pinned_blocks=2)
    run(manager, 1, T(1, 12))
    pins = [manager.pin_prefix(T(1, 8)), manager.pin_prefix(T(1, 8)), manager.pin_prefix(T(1, 4))]
    assert len(set(pins)) == 3
    before = observe(manager)
    with pytest.raises(StateError) as caught:
        manager.pin_prefix(T(1, 12))
    assert str(caught.value) == "pinning 1 more blocks exceeds `max_pinned_blocks`: 2 of 2 are pinned"
    assert observe(manager) == before
    for pin in pins:
        manager.unpin(pin)
    assert manager.stats.pinned == 0
    assert manager.pin_prefix(T(1, 8)) not in pins


def test_a_pin_of_nothing_and_a_block_of_a_pin(make_caching, observe):
    manager = make_caching(4, 4)
    pin = manager.pin_prefix(T(1, 8))
    assert manager.stats.pinned == 0
    manager.unpin(pin)
    run(manager, 1, T(1, 4))
    manager.pin_prefix(T(1, 4))
    with pytest.raises(StateError, match="block 0 is not held by a caller"):
        manager.free_block(0)
    observe(manager)


# Admission


def test_the_watermark_is_kept_while_something_lives_and_waived_while_nothing_does(make_caching, observe):
    manager = make_caching(4, 4, watermark_blocks=2)
    manager.admit(1, T(1, 8))
    before = observe(manager)
    assert manager.can_admit(2, [5]) is False
    with pytest.raises(OutOfBlocksError) as caught:
        manager.admit(2, [5])
    assert str(caught.value) == "need 3 blocks (2 of them the watermark), 2 free of 4"
    assert (caught.value.needed, caught.value.watermark, caught.value.free) == (3, 2, 2)
    assert observe(manager) == before
    manager.append_tokens(1, 8)  # a running sequence may grow into it
    manager.release_sequence(1)
    assert manager.can_admit(2, T(1, 16)) is True
    manager.admit(2, T(1, 16))


def test_f231_a_refused_reserve_changes_nothing(make_caching, observe):
    """A prompt that would find 8 tokens and takes one of four blocks; the caller wants more to be left."""
    manager = make_caching(8, 4, eviction_policy="slru")
    run(manager, 1, T(1, 8))
    run(manager, 2, T(21, 28))
    take(manager, 3, 1)
    before = observe(manager)
    assert manager.can_admit(4, T(1, 9), reserve_blocks=5) is False
    with pytest.raises(OutOfBlocksError) as caught:
        manager.admit(4, T(1, 9), reserve_blocks=5)
    assert str(caught.value) == "need 6 blocks (5 of them the watermark), 5 free of 8"
    assert observe(manager) == before
    with pytest.raises(ArgumentError, match="reserve_blocks"):
        manager.admit(4, T(1, 9), reserve_blocks=-1)
    assert observe(manager) == before
    assert manager.can_admit(4, T(1, 9), reserve_blocks=4) is True
    assert manager.admit(4, T(1, 9), reserve_blocks=4).num_computed_tokens == 8
    assert manager.num_free_blocks == 4


@pytest.mark.parametrize(("watermark", "reserve", "is_live", "kept"), [
    (2, None, True, 2), (2, 1, True, 2), (2, 3, True, 3), (2, None, False, 0), (2, 0, False, 0), (2, 1, False, 1),
])  # fmt: skip
def test_f231_the_larger_of_reserve_and_watermark_is_kept_back(make_caching, watermark, reserve, is_live, kept):
    """The watermark is waived while nothing is live; a reserve is not, for the caller knows who will take it."""
    manager = make_caching(8, 4, watermark_blocks=watermark)
    if is_live:
        manager.allocate_block()
    room = manager.num_free_blocks - kept
    fits, does_not = [0] * (4 * room), [0] * (4 * room + 1)
    assert manager.can_admit(1, fits, reserve_blocks=reserve) is True
    if kept:
        assert manager.can_admit(1, does_not, reserve_blocks=reserve) is False
    manager.admit(1, fits, reserve_blocks=reserve)
    assert manager.num_free_blocks == kept


def test_a_prompt_that_can_never_fit_is_refused_at_once(make_caching, observe):
    manager = make_caching(4, 4, max_sequence_length=14)
    before = observe(manager)
    for call in (manager.admit, manager.can_admit):
        with pytest.raises(SequenceTooLongError) as caught:
            call(1, T(1, 17))
        assert str(caught.value) == "17 tokens, `max_sequence_length` is 14"
    assert observe(manager) == before
    manager.admit(1, T(1, 14))
    with pytest.raises(SequenceTooLongError) as caught:
        manager.append_token(1)
    assert str(caught.value) == "sequence 1: 15 tokens, `max_sequence_length` is 14"
    with pytest.raises(SequenceTooLongError) as caught:
        make_caching(4, 4).can_admit(1, T(1, 17), num_new_tokens=1)
    assert str(caught.value) == "17 tokens need 5 blocks of 4 tokens, the pool has 4"


def test_chunked_admission_reserves_only_the_chunk(make_caching):
    manager = make_caching(4, 4)
    out = array("q", [-7] * 20)
    admission = manager.admit(1, T(1, 16), num_new_tokens=5, out=out)
    assert admission.slots is out
    assert out.tolist() == [0, 1, 2, 3, 4] + [-7] * 15
    assert manager.sequence_length(1) == 5
    assert manager.append_tokens(1, 3) == [5, 6, 7]
    with pytest.raises(ArgumentError, match="9, the prompt's id at position 8 of sequence 1"):
        manager.append_token(1, 10)
    assert manager.append_tokens(1, T(9, 16)) == T(8, 15)
    manager.commit(1, 16)
    assert manager.stats.indexed == 4


# Fences


def test_a_fenced_block_is_handed_out_after_its_epoch_is_retired(make_caching, observe):
    manager = make_caching(2, 4, fences=True)
    take(manager, 1, 2)
    manager.release_sequence(1)
    assert manager.block_states() == ["fenced", "fenced"]
    before = observe(manager)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.allocate_block()
    assert str(caught.value) == "need 1 blocks, 0 free of 2 (2 fenced)"
    with pytest.raises(ArgumentError, match="none is closed yet"):
        manager.retire(0)
    assert observe(manager) == before
    assert manager.advance_epoch() == 0
    assert manager.block_states() == ["fenced", "fenced"]
    manager.retire(0)
    assert manager.free_blocks == [0, 1]
    manager.retire(0)
    with pytest.raises(ArgumentError, match="a closed epoch, 0 to 0"):
        manager.retire(1)


def test_a_fenced_block_keeps_its_node_and_a_hit_revives_it(make_caching, observe):
    manager = make_caching(3, 4, fences=True)
    run(manager, 1, T(1, 8))
    assert manager.block_states() == ["fenced", "fenced", "free"]
    assert manager.admit(2, T(1, 9)).num_computed_tokens == 8
    assert manager.block_states() == ["live", "live", "live"]
    manager.release_sequence(2)
    manager.retire(manager.advance_epoch())
    assert manager.block_states() == ["cached", "cached", "free"]
    assert manager.free_blocks == [2, 1, 0]
    observe(manager)


def test_the_source_of_a_taken_copy_waits_for_its_epoch(make_caching, observe):
    manager = make_caching(6, 4, fences=True)
    run(manager, 1, T(1, 12))
    manager.retire(manager.advance_epoch())
    run(manager, 1, T(1, 9), free=False)
    manager.truncate_sequence(1, 6)  # into a block that the index continues
    manager.append_token(1, 99)
    (source, destination) = manager.take_copies()[0]
    assert manager.block_info(source).state == "fenced"
    manager.advance_epoch()
    manager.release_sequence(1)
    assert manager.block_info(destination).state == "fenced"
    manager.retire(1)
    assert (manager.block_info(source).state, manager.block_info(destination).state) == ("cached", "fenced")
    manager.retire(manager.advance_epoch())
    assert manager.block_info(destination).state == "free"
    observe(manager)


def test_without_fences_epochs_are_only_numbers(make_caching):
    manager = make_caching(2, 4)
    assert [manager.advance_epoch() for _ in range(3)] == [0, 1, 2]
    take(manager, 1, 2)
    manager.release_sequence(1)
    assert manager.stats.fenced == 0
    manager.retire(2)


# Reset


def test_reset_forgets_everything_for_good(make_caching, observe):
    manager = make_caching(8, 4)
    run(manager, 1, T(1, 8))
    run(manager, 2, T(1, 6), free=False)
    pin = manager.pin_prefix(T(1, 8))
    manager.reset_prefix_cache()
    assert manager.match_prefix(T(1, 9)) == 0
    assert (manager.stats.indexed, manager.stats.cached) == (0, 0)
    manager.append_tokens(2, [7, 8])  # goes on, but what it holds was computed before the reset
    manager.fork_sequence(2, 3, 4)
    manager.commit(2, 8)
    assert manager.match_prefix(T(1, 9)) == 0
    manager.unpin(pin)
    manager.truncate_sequence(2, 0)
    manager.append_tokens(2, T(1, 8))  # begins anew
    manager.commit(2, 8)
    assert manager.match_prefix(T(1, 9)) == 8
    observe(manager)


# Commit


def test_what_is_not_committed_is_neither_found_nor_forked(make_caching, observe):
    manager = make_caching(8, 4)
    manager.admit(1, T(1, 8))
    assert manager.match_prefix(T(1, 9)) == 0
    manager.commit(1, 6)
    assert manager.match_prefix(T(1, 9)) == 4
    before = observe(manager)
    for num_tokens in (None, 8, 6, 5):
        with pytest.raises(StateError) as caught:
            manager.fork_sequence(1, 2, num_tokens)
        assert str(caught.value) == "sequence 1 can't be forked here: block 1 holds tokens that are not committed"
    assert observe(manager) == before
    manager.fork_sequence(1, 2, 4)
    manager.commit(1, 8)
    manager.fork_sequence(1, 3)


def test_a_commit_over_a_copy_that_is_owed_is_refused_after_a_rollback_too(make_caching, observe):
    """What is appended after the rollback waits for the copy as well, though it lies before the first such token."""
    manager = make_caching(8, 8)
    run(manager, 1, T(1, 6), free=False)
    manager.fork_sequence(1, 2)
    manager.append_token(2, 7)  # owes the copy
    manager.truncate_sequence(2, 5)
    manager.append_tokens(2, [96, 97])
    before = observe(manager)
    with pytest.raises(StateError):
        manager.commit(2, 6)
    assert observe(manager) == before
    manager.commit(2, 5)
    assert manager.take_copies() == [(0, 1)]
    manager.commit(2, 7)


def test_a_fork_goes_on_in_the_index(make_caching, observe):
    manager = make_caching(8, 2)
    run(manager, 1, T(1, 5), free=False, salt="a")
    manager.fork_sequence(1, 2)
    manager.append_tokens(2, [6, 7])
    manager.take_copies()
    manager.commit(2, 7)
    assert manager.match_prefix(T(1, 9), salt="a") == 6
    manager.fork_sequence(2, 3, 2)
    manager.append_tokens(3, [3, 4])
    manager.commit(3, 4)  # ends on the block that is there
    assert manager.block_table(3) == manager.block_table(1)[:2]
    observe(manager)


def test_a_commit_over_a_copy_that_is_owed_is_refused(make_caching, observe):
    manager = make_caching(8, 4)
    run(manager, 1, T(1, 6), free=False)
    manager.fork_sequence(1, 2)
    manager.append_tokens(2, [7, 8])
    before = observe(manager)
    with pytest.raises(StateError) as caught:
        manager.commit(2, 8)
    wait = "block 2 still waits for its copy of block 1 (run `take_copies` first)"
    assert str(caught.value) == f"sequence 2 can't be committed to 8 tokens: {wait}"
    assert observe(manager) == before
    manager.commit(2, 6)
    manager.take_copies()
    manager.commit(2, 8)
    observe(manager)


def test_ids_may_come_with_the_commit(make_caching, observe):
    manager = make_caching(8, 4)
    manager.admit(1, T(1, 3))
    manager.append_tokens(1, 4)
    before = observe(manager)
    with pytest.raises(ArgumentError) as caught:
        manager.commit(1, 7, [4, 5])
    assert str(caught.value) == "`token_ids`: wanted 4 ids, one for each position not known yet, got 2 ids"
    assert observe(manager) == before
    manager.commit(1, 5, [4, 5])
    manager.append_token(1, 8)  # a gap before it
    manager.commit(1, 8, [6, 7])
    assert manager.match_prefix(T(1, 9)) == 8


def test_a_block_with_an_unknown_id_is_never_indexed_and_nor_is_what_follows(make_caching, observe):
    manager = make_caching(8, 2)
    manager.admit(1, T(1, 2))
    manager.append_token(1)
    manager.append_tokens(1, T(4, 6))
    manager.commit(1, 6)
    manager.commit(1, 6, [3])
    assert manager.stats.indexed == 1
    manager.truncate_sequence(1, 2)
    manager.append_tokens(1, T(3, 6))
    manager.commit(1, 6)
    assert manager.match_prefix(T(1, 7)) == 6
    observe(manager)
