"""Faults known from other projects, by id (tests/cases.md): the prefix index, and rollback over what it knows."""

import random

import pytest

from kvpager.errors import ArgumentError, OutOfBlocksError


def T(first, last):  # noqa: N802 - the notation of the cases
    return list(range(first, last + 1))


def compute(manager, sequence_id, tokens, **options):
    """Admit, compute and commit; the cached tokens."""
    cached = manager.admit(sequence_id, tokens, **options, out=memoryview(bytearray(8 * len(tokens))).cast("q"))
    manager.commit(sequence_id, len(tokens))
    return cached.num_computed_tokens


def run(manager, sequence_id, tokens, **options):
    """The same, and free."""
    cached = compute(manager, sequence_id, tokens, **options)
    manager.release_sequence(sequence_id)
    return cached


def append(manager, sequence_id, tokens):
    for token in tokens:
        manager.append_token(sequence_id, token)


def table(manager, sequence_id):
    return manager.sequences[sequence_id].block_table


@pytest.mark.parametrize("num_requests", [24])
def test_b003_three_gauges_that_sum_to_the_pool(make_caching, observe, num_requests):
    manager = make_caching(64, 4)
    for k in range(1, num_requests + 1):
        compute(manager, k, [1000 * k + i for i in range(8)])
        append(manager, k, [7])
        manager.release_sequence(k)
        stats = observe(manager)["stats"]
        assert (stats["live"], stats["cached"]) == (0, min(2 * k, 64))
        assert stats["live"] + stats["cached"] + stats["free"] == 64
        assert stats["num_hit_tokens"] == 0
    for k in range(num_requests + 1, 41):  # past the size of the pool
        run(manager, k, [1000 * k + i for i in range(8)])
    assert observe(manager)["stats"]["cached"] == 64


def test_b009_old_key_dies_with_old_content(make_caching, observe):
    manager = make_caching(2, 4)
    run(manager, 1, T(1, 8))
    run(manager, 2, T(11, 18))
    assert manager.match_prefix(T(1, 9)) == 0
    assert manager.match_prefix(T(11, 19)) == 8
    assert observe(manager)["stats"]["indexed"] == 2


def test_b010_live_partial_block_is_never_a_hit(make_caching, observe):
    manager = make_caching(1, 4)
    run(manager, 1, T(1, 4))
    manager.admit(2, [9])
    assert manager.match_prefix(T(1, 5)) == 0
    before = observe(manager)
    with pytest.raises(OutOfBlocksError):
        manager.admit(3, T(1, 4))
    assert observe(manager) == before
    assert manager.ref_count(table(manager, 2)[0]) == 1


def test_b011_hit_length_table(make_caching):
    manager = make_caching(8, 4)
    run(manager, 1, T(1, 12))
    assert [manager.match_prefix(T(1, n)) for n in range(13)] == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8]
    assert run(manager, 2, T(1, 8)) == 4
    assert manager.match_prefix(T(1, 13)) == 12


def test_b012_replay_starts_where_the_hit_ends(make_caching):
    """The engine's half is the ids; the manager's is where the first computed token and the next one go."""
    manager = make_caching(8, 4)
    for cached in (0, 4, 4):
        admission = manager.admit(1, T(1, 8))
        assert admission.num_computed_tokens == cached
        assert len(admission.slots) == 8 - cached
        manager.commit(1, 8)
        assert manager.sequence_length(1) == 8
        slot = manager.append_token(1, 50)
        assert slot == table(manager, 1)[2] * 4
        manager.release_sequence(1)


@pytest.mark.parametrize("shared", [False, True])
def test_b013_truncate_then_overwrite_inside_an_indexed_block(make_caching, observe, shared):
    manager = make_caching(8, 4)
    compute(manager, 1, [10, 10, 10])
    append(manager, 1, [28])
    manager.commit(1, 4)
    if shared:
        manager.fork_sequence(1, 2)
    before = table(manager, 1)
    manager.truncate_sequence(1, 3)
    append(manager, 1, [11])
    copies = manager.take_copies()
    manager.commit(1, 4)
    assert (copies != []) is shared
    if shared:  # the old row 3 still is the one of 28
        assert manager.match_prefix([10, 10, 10, 28, 13]) == 4
        assert copies == [(before[0], table(manager, 1)[0])]
    else:  # written in place, so the old name is gone
        assert manager.match_prefix([10, 10, 10, 28, 13]) == 0
        assert table(manager, 1) == before
    assert manager.match_prefix([10, 10, 10, 11, 13]) == 4
    observe(manager)


NAMESPACES = [
    {},
    {"salt": "x"},
    {"adapter": "x"},
    {"salt": ""},
    {"adapter": ""},
    {"salt": "", "adapter": ""},
    {"salt": "x", "adapter": "x"},
    {"adapter": "y"},
    {"salt": "ab", "adapter": "c"},
    {"salt": "a", "adapter": "bc"},
]


@pytest.mark.parametrize("written", NAMESPACES, ids=str)
def test_b014_extra_keys_are_tagged(make_caching, written):
    manager = make_caching(8, 4)
    run(manager, 1, T(1, 8), **written)
    for asked in NAMESPACES:
        assert manager.match_prefix(T(1, 9), **asked) == (8 if asked == written else 0)


def test_b015_placeholder_spans_carry_the_item(make_caching):
    tokens = [1, 2, 3, 4, 9, 9, 9, 9, 5]
    manager = make_caching(8, 4)
    run(manager, 1, tokens, items=[(4, 8, "X")])
    assert manager.match_prefix(tokens, items=[(4, 8, "Y")]) == 4
    assert manager.match_prefix(tokens, items=[(4, 8, "X")]) == 8
    assert manager.match_prefix(tokens) == 4
    manager = make_caching(8, 4)
    run(manager, 1, tokens, items=[(2, 6, "X")])
    assert manager.match_prefix(tokens, items=[(2, 6, "Y")]) == 0
    assert manager.match_prefix(tokens, items=[(2, 6, "X")]) == 8
    assert manager.match_prefix(tokens, items=[(3, 6, "X")]) == 0
    assert manager.match_prefix(tokens) == 0


def test_b015_one_item_is_not_two(make_caching):
    """The same key over the same placeholders: once begun anew at a block boundary, once going on."""
    manager = make_caching(8, 4)
    run(manager, 1, [9] * 9, items=[(2, 8, "X")])
    assert manager.match_prefix([9] * 9, items=[(2, 4, "X"), (4, 8, "X")]) == 0
    assert manager.match_prefix([9] * 9, items=[(2, 8, "X")]) == 8


def test_b015_what_follows_a_cut_item_is_not_the_item(make_caching):
    manager = make_caching(8, 4)
    compute(manager, 1, [9] * 8, items=[(2, 8, "X")])
    manager.truncate_sequence(1, 6)
    append(manager, 1, [9, 9])
    manager.take_copies()
    manager.commit(1, 8)
    manager.release_sequence(1)
    assert manager.match_prefix([9] * 9, items=[(2, 8, "X")]) == 4  # the block after was overwritten, not copied
    assert manager.match_prefix([9] * 9) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (T(1, 4), T(11, 14)),
        ([1, 23, 0, 0], [12, 3, 0, 0]),
        ([256, 0, 0, 0], [0, 1, 0, 0]),
        ([65537, 0, 0, 0], [1, 0, 0, 0]),
        ([2**31 - 1] * 4, [0] * 4),
        ([0] * 4, [0, 0, 0, 1]),
    ],
    ids=str,
)
def test_b016_different_blocks_have_different_keys(make_caching, first, second):
    manager = make_caching(4, 4)
    run(manager, 1, first)
    assert manager.match_prefix([*second, 5]) == 0
    assert manager.match_prefix([*first, 5]) == 4


def test_b016_the_same_block_at_another_depth_is_another_block(make_caching):
    manager = make_caching(4, 4)
    run(manager, 1, [0] * 8)
    assert manager.match_prefix([0] * 9) == 8
    assert manager.match_prefix([0] * 13) == 8
    assert manager.match_prefix([1, *[0] * 8]) == 0


def test_b016_ids_that_do_not_fit_are_refused(make_caching, observe):
    manager = make_caching(4, 4)
    before = observe(manager)
    for wrong in (-1, 2**31, 2**64):
        with pytest.raises(ArgumentError, match="token_ids"):
            manager.admit(1, [wrong])
    assert observe(manager) == before


def test_b017_same_step_duplicates_end_on_the_same_blocks(make_caching, observe):
    manager = make_caching(4, 4)
    manager.admit(1, T(1, 8))
    manager.admit(2, T(1, 8))
    assert set(table(manager, 1)).isdisjoint(table(manager, 2))
    manager.commit_batch([1, 2], [8, 8])
    assert table(manager, 1) == table(manager, 2)
    assert [manager.ref_count(block) for block in table(manager, 2)] == [2, 2]
    kept = table(manager, 2)
    manager.release_sequence(1)
    assert table(manager, 2) == kept
    assert [manager.ref_count(block) for block in kept] == [1, 1]
    assert manager.match_prefix(T(1, 9)) == 8
    manager.release_sequence(2)
    assert manager.num_free_blocks == 4
    assert manager.match_prefix(T(1, 9)) == 8
    for taken, hit in enumerate([8, 8, 4, 0]):
        manager.create_sequence(10 + taken)
        manager.append_token(10 + taken)
        assert manager.match_prefix(T(1, 9)) == hit
        observe(manager)


def test_b018_hit_blocks_leave_the_budget(make_caching, observe):
    manager = make_caching(4, 4)
    run(manager, 1, T(1, 8))
    manager.admit(2, T(31, 38))
    assert manager.num_free_blocks == 2
    prompt = T(1, 8) + T(21, 28)
    before = observe(manager)
    assert manager.can_admit(3, prompt) is False
    with pytest.raises(OutOfBlocksError) as caught:
        manager.admit(3, prompt)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (2, 0, 4)
    assert observe(manager) == before
    assert manager.match_prefix(T(1, 9)) == 8


def test_b019_caching_off_means_no_index(make_caching, observe):
    manager = make_caching(4, 4, enable_prefix_caching=False)
    for _ in range(20):
        assert run(manager, 1, T(1, 8)) == 0
        assert observe(manager)["stats"]["indexed"] == 0
    assert manager.num_free_blocks == 4
    assert manager.match_prefix(T(1, 9)) == 0
    assert manager.stats.num_queried_tokens == 0


def test_b020_resume_is_no_hit(make_caching):
    manager = make_caching(8, 4)
    compute(manager, 1, T(1, 5))
    append(manager, 1, [6, 7, 8])
    manager.commit(1, 7)
    manager.release_sequence(1)  # preempted
    assert compute(manager, 1, T(1, 8), resumed=True) == 4
    stats = manager.stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens, stats.num_resumed_tokens) == (5, 0, 4)
    manager.release_sequence(1)
    assert compute(manager, 2, T(1, 6)) == 4
    stats = manager.stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens, stats.num_resumed_tokens) == (11, 4, 4)


def test_b030_rejected_tokens_are_never_registered(make_caching, observe):
    manager = make_caching(8, 4)
    compute(manager, 1, T(1, 6))
    manager.append_tokens(1, [81, 82])
    assert manager.match_prefix([*T(1, 6), 81, 82, 9]) == 4  # between draft and verdict
    manager.truncate_sequence(1, 6)
    append(manager, 1, [7, 8])
    manager.commit(1, 8)
    assert manager.match_prefix([*T(1, 6), 81, 82, 9]) == 4
    assert manager.match_prefix(T(1, 9)) == 8
    observe(manager)


def test_b034_truncate_into_a_cached_block(make_caching, observe):
    """In place, for nobody else holds it and nothing continues it: its old name is gone."""
    manager = make_caching(8, 4)
    compute(manager, 1, T(1, 8))
    before = table(manager, 1)
    manager.truncate_sequence(1, 6)
    assert manager.match_prefix(T(1, 9)) == 8
    append(manager, 1, [99, 98])
    assert manager.take_copies() == []
    assert manager.match_prefix(T(1, 9)) == 4
    manager.commit(1, 8)
    assert manager.match_prefix([*T(1, 6), 99, 98, 0]) == 8
    assert manager.match_prefix(T(1, 9)) == 4
    assert (manager.sequence_length(1), table(manager, 1)) == (8, before)
    observe(manager)


@pytest.mark.parametrize("other", ["holder", "pin", "continuation"])
def test_b034_truncate_into_a_cached_block_that_others_need(make_caching, observe, other):
    """Copied, for another sequence or a pin holds it or a longer prefix goes through it: both names are found."""
    manager = make_caching(8, 4)
    if other == "continuation":
        run(manager, 2, T(1, 12))
    compute(manager, 1, T(1, 8))
    if other == "holder":
        manager.fork_sequence(1, 2)
    if other == "pin":
        manager.pin_prefix(T(1, 8))
    before = table(manager, 1)
    manager.truncate_sequence(1, 6)
    append(manager, 1, [99, 98])
    assert manager.take_copies() == [(before[1], table(manager, 1)[1])]
    manager.commit(1, 8)
    assert manager.match_prefix([*T(1, 6), 99, 98, 0]) == 8
    assert manager.match_prefix(T(1, 9)) == 8
    assert manager.match_prefix(T(1, 13)) == (12 if other == "continuation" else 8)
    observe(manager)


def test_b034_written_again_as_it_was_ends_on_the_old_block(make_caching, observe):
    manager = make_caching(8, 4)
    compute(manager, 1, T(1, 8))
    manager.fork_sequence(1, 2)
    before = table(manager, 1)
    manager.truncate_sequence(1, 6)
    append(manager, 1, [7, 8])
    assert table(manager, 1) != before
    manager.take_copies()
    manager.commit(1, 8)
    assert table(manager, 1) == before
    assert manager.stats.live == 2
    observe(manager)


def test_b097_chunks_are_found_up_to_what_is_committed(make_caching):
    manager = make_caching(8, 4)
    assert len(manager.admit(1, T(1, 10), num_new_tokens=4).slots) == 4
    found = []
    for chunk in (4, 2, 0):
        manager.commit(1, manager.sequence_length(1))
        found.append(manager.stats.indexed)
        if chunk == 4:
            assert manager.match_prefix(T(1, 10)) == 4
        manager.append_tokens(1, chunk)  # the ids are known from the prompt
    assert found == [1, 2, 2]


@pytest.mark.parametrize(("accepted", "length", "num_blocks"), [(0, 10, 3), (1, 11, 3), (4, 14, 4)])
def test_b105_rollback_arithmetic(make_caching, accepted, length, num_blocks):
    manager = make_caching(8, 4)
    compute(manager, 1, T(1, 10))
    assert len(table(manager, 1)) == 3
    manager.append_tokens(1, T(11, 14))
    assert (len(table(manager, 1)), manager.num_free_blocks) == (4, 4)
    manager.truncate_sequence(1, 10 + accepted)
    manager.commit(1, 10 + accepted)
    assert (len(table(manager, 1)), manager.num_free_blocks) == (num_blocks, 8 - num_blocks)
    assert manager.sequence_length(1) == length
    slot = manager.append_token(1, 99)
    assert slot == table(manager, 1)[length // 4] * 4 + length % 4


def test_b105_200_rounds_of_drafts(make_caching, observe):
    rng = random.Random(105)
    manager = make_caching(120, 4)
    manager.admit(1, T(1, 10))
    manager.commit(1, 10)
    length = 10
    for _ in range(200):
        if length > 400:
            manager.truncate_sequence(1, 10)
            length = 10
        slots = manager.append_tokens(1, [rng.randrange(50) for _ in range(4)])
        assert slots == manager.slots(1, length, length + 4)
        manager.take_copies()
        length += rng.randrange(5)
        manager.truncate_sequence(1, length)
        manager.commit(1, length)
        assert len(table(manager, 1)) == -(-length // 4)
    manager.release_sequence(1)
    assert observe(manager)["stats"]["live"] == 0
