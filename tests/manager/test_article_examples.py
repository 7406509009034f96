"""The worked examples by which paged key/value caches are usually explained, with their numbers."""

import pytest


def test_token_6_of_table_5_2_9_1_lies_in_slot_10(make, arrange):
    manager = make(10, 4)
    arrange(manager, [5, 2, 9, 1])
    manager.create_sequence(0)
    manager.append_tokens(0, 14)
    assert manager.sequences[0].block_table == (5, 2, 9, 1)
    assert manager.locate(0, 6) == (2, 2)
    assert manager.slots(0, 6, 7) == [10]


def test_a_block_is_taken_only_when_the_length_crosses_a_boundary(make, arrange):
    manager = make(10, 4)
    arrange(manager, [5, 2, 9])
    manager.create_sequence(0)
    taken = []
    for _ in range(9):
        free_before = manager.num_free_blocks
        manager.append_token(0)
        taken.append(free_before - manager.num_free_blocks)
    assert taken == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_length_8_over_5_2_takes_block_9_and_writes_slot_36(make, arrange):
    manager = make(10, 4)
    arrange(manager, [5, 2, 9])
    manager.create_sequence(0)
    manager.append_tokens(0, 8)
    assert manager.sequences[0].block_table == (5, 2)
    assert manager.append_token(0) == 36
    assert manager.sequences[0].block_table == (5, 2, 9)


def test_length_10_wastes_2_positions(make):
    manager = make(10, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, 10)
    assert manager.internal_fragmentation_tokens(0) == 2
    assert manager.internal_fragmentation_tokens() == 2


@pytest.mark.parametrize(
    ("position", "block", "offset"), [(0, 37, 0), (15, 37, 15), (16, 102, 0), (20, 102, 4), (40, 58, 8)]
)
def test_blocks_of_16_tokens_over_37_102_58(make, arrange, position, block, offset):
    manager = make(128, 16)
    arrange(manager, [37, 102, 58])
    manager.create_sequence(0)
    manager.append_tokens(0, 41)
    assert manager.sequences[0].block_table == (37, 102, 58)
    assert manager.locate(0, position) == (block, offset)
    assert manager.slots(0, position, position + 1) == [block * 16 + offset]


def test_token_5_of_table_7_2_9_lies_in_block_2_at_offset_1(make, arrange):
    manager = make(10, 4)
    arrange(manager, [7, 2, 9])
    manager.create_sequence(0)
    manager.append_tokens(0, 10)
    assert manager.locate(0, 5) == (2, 1)


def test_batch_of_lengths_10_6_15(make, arrange):
    manager = make(10, 4)
    arrange(manager, [7, 2, 9, 4, 1, 8, 5, 3, 6])
    for sequence_id, length in enumerate([10, 6, 15]):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
    ids = [0, 1, 2]
    assert manager.get_block_table_tensor(ids).tolist() == [[7, 2, 9, -1], [4, 1, -1, -1], [8, 5, 3, 6]]
    assert manager.get_block_table_tensor(ids, 5)[:, 4].tolist() == [-1, -1, -1]
    assert manager.get_seq_lens_tensor(ids).tolist() == [10, 6, 15]
    assert manager.internal_fragmentation_tokens() == 2 + 2 + 1
    assert manager.slot_mapping_for_append(ids).tolist() == [9 * 4 + 2, 1 * 4 + 2, 6 * 4 + 3]
    assert manager.get_seq_lens_tensor(ids).tolist() == [11, 7, 16]


def test_cached_tokens_after_prefill_and_two_decodes_are_p_p1_p2(make):
    prompt_length = 6
    manager = make(10, 4)
    manager.create_sequence(0)
    cached = []
    for new_tokens in (prompt_length, 1, 1):
        manager.append_tokens(0, new_tokens)
        manager.commit(0, manager.sequence_length(0))
        cached.append(manager.sequence_length(0))
    assert cached == [prompt_length, prompt_length + 1, prompt_length + 2]


def test_a4_b3_c4_d2_then_e5_after_b_left(make):
    """16 positions: 6 are free for the 5 of E, but in two pieces, so that contiguous memory could not take it."""
    manager = make(16, 1)
    for sequence_id, length in enumerate([4, 3, 4, 2]):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
    manager.release_sequence(1)
    manager.create_sequence(4)
    assert manager.append_tokens(4, 5) == [4, 5, 6, 13, 14]
