"""`DecodeBatch`: random schedules on both implementations, a device table kept by `changed` alone, and snapshots.

After every step the exported set equals what is rebuilt from the manager, and so does a table that only ever saw the
changes. What was exported is compared again after the next step was prepared.
"""

import gc
import random
import threading
from array import array

import numpy as np
import pytest
from driver import answer, is_error, visible

from kvpager.errors import (
    ArgumentError,
    KVPagerError,
    OutOfBlocksError,
    SequenceTooLongError,
    StateError,
    UnknownSequenceError,
)
from kvpager.manager import DecodeBatch, KVBlockManager

BUFFERS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "changed")


def make_buffers(kit, max_rows, max_blocks, max_tokens, max_changes):
    """One set, with other numbers in it."""
    shapes = ((max_rows, max_blocks), max_rows, max_rows + 1, max_tokens, (max_changes, 3))
    dtypes = (np.int32, np.int32, np.int32, np.int64, np.int32)
    return kit.buffers(*(np.full(shape, 77, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))


class Device:
    """A batch, and what somebody sees who looks at its sets and applies its changes."""

    def __init__(self, kit, manager, shape):
        self.manager = manager
        self.sets = [make_buffers(kit, *shape) for _ in range(2)]
        self.batch = kit.batch(manager, *self.sets)
        self.table = np.full(shape[:2], -1, np.int32)
        self.exported = None

    def step(self, counts, token_ids):
        """What the step says and exports, as plain numbers; checked against the manager."""
        self.check_exported()
        step = self.batch.step(counts, token_ids)
        self.check_exported()
        buffers = self.sets[step.buffer_set]
        told = (step.buffer_set, step.num_rows, step.num_tokens, step.num_changes, step.upload_table)
        if step.upload_table:
            self.table[:] = buffers.block_tables
            changes = None
        else:
            changes = buffers.changed[: step.num_changes].tolist()
            assert len({(row, column) for row, column, _ in changes}) == len(changes)
            for row, column, block in changes:
                self.table[row, column] = block
        assert (self.table == buffers.block_tables).all()
        self.check_rebuilt(buffers, step)
        self.exported = buffers, [getattr(buffers, name).copy() for name in BUFFERS], step.num_changes
        return told, changes, [getattr(buffers, name).tolist() for name in BUFFERS[:4]]

    def check_exported(self):
        """What the last step exported is as it was."""
        if self.exported is None:
            return
        buffers, copies, num_changes = self.exported
        for name, copy in zip(BUFFERS, copies, strict=True):
            stop = num_changes if name == "changed" else None
            assert (getattr(buffers, name)[:stop] == copy[:stop]).all(), name

    def check_rebuilt(self, buffers, step):
        """The set equals what the batched calls of the manager export."""
        ids = self.batch.sequence_ids
        max_rows, max_blocks = buffers.block_tables.shape
        rebuilt = np.full((max_rows, max_blocks), -1, np.int32)
        for row, sequence_id in enumerate(ids):
            table = self.manager.block_table(sequence_id)
            rebuilt[row, : len(table)] = table
        lengths = [self.manager.sequence_length(i) for i in ids]
        assert (buffers.block_tables == rebuilt).all()
        assert buffers.seq_lens.tolist() == lengths + [0] * (max_rows - len(ids))
        starts = buffers.query_start_loc.tolist()
        assert starts[step.num_rows :] == [step.num_tokens] * (max_rows + 1 - step.num_rows)
        slots = buffers.slot_mapping.tolist()
        assert slots[step.num_tokens :] == [-1] * (len(slots) - step.num_tokens)
        for row, sequence_id in enumerate(ids):
            count = starts[row + 1] - starts[row]
            wanted = self.manager.slots(sequence_id, lengths[row] - count, lengths[row])
            assert slots[starts[row] : starts[row + 1]] == wanted


def call(device, operation):
    """The answer of one operation on the batch or its manager, or its error."""
    name, *arguments = operation
    if name in ("step", "add", "remove", "batch_commit", "invalidate"):
        target = device.step if name == "step" else getattr(device.batch, name.removeprefix("batch_"))
        try:
            return target(*arguments)
        except KVPagerError as error:
            return type(error), str(error), vars(error)
    return answer(device.manager, operation)


def random_operation(rng, manager, batch):
    """What an engine may do between steps, and steps of all kinds; now and then something wrong."""
    alive = manager.sequence_ids()
    rows = batch.sequence_ids
    size = manager.block_size

    def an_id(ids):
        return rng.choice(ids) if ids and rng.random() < 0.95 else rng.randrange(7)

    new = rng.choice([i for i in range(6) if i not in alive] or [0])
    length = manager.sequence_length
    sequence_id = an_id(alive)
    name = rng.choices(
        ("step", "batch_commit", "commit", "add", "remove", "admit", "fork_sequence", "truncate_sequence",
         "release_sequence", "take_copies", "append_tokens", "retire", "invalidate", "free"),
        (30, 16, 4, 9, 6, 9, 4, 7, 6, 6, 3, 3, 0.7, 4),
    )[0]  # fmt: skip
    if name == "step":
        counts = [rng.choice((0, 1, 1, 1, 2, size + 1)) for _ in rows] if rng.random() < 0.6 else None
        if rng.random() < 0.03:
            counts = [*(counts or []), 1]
        total = sum(counts) if counts is not None else len(rows)
        token_ids = [rng.randrange(2) for _ in range(total)] if rng.random() < 0.5 else None
        return "step", counts, token_ids
    if name == "batch_commit":
        if rng.random() < 0.5:
            return (name,)
        return name, [rng.randint(min(manager.num_computed_tokens(i), length(i)), length(i)) for i in rows]
    if name == "commit":
        return name, sequence_id, length(sequence_id) if sequence_id in alive else 0
    if name in ("add", "remove"):
        return name, an_id([i for i in alive if (i in rows) == (name == "remove")])
    if name == "admit":
        prompt = [0] * rng.randint(1, 3 * size)
        return name, new, prompt, {"num_new_tokens": rng.choice((2, 9))}
    if name == "fork_sequence":
        return name, sequence_id, new
    if name == "truncate_sequence":
        return name, sequence_id, rng.randint(0, length(sequence_id)) if sequence_id in alive else 0
    if name == "append_tokens":
        return name, sequence_id, rng.randint(0, 2)
    if name == "retire":
        return name, 0  # the number is filled in
    if name == "free":  # make room: out of the batch, then away
        idle = [i for i in alive if i not in rows]
        return ("release_sequence", rng.choice(idle)) if idle else ("take_copies",)
    return ("release_sequence", sequence_id) if name == "release_sequence" else (name,)


def random_schedule(seed, kits, num_operations=150):
    """One world, the same operations on the devices of all `kits`; how often what happened."""
    rng = random.Random(seed)
    num_blocks, size = rng.choice(((4, 1), (8, 2), (6, 4), (12, 2), (16, 1)))
    shape = (rng.choice((2, 4)), rng.choice((3, num_blocks)), rng.choice((5, 12)), rng.choice((2, 30)))
    options = {"enable_prefix_caching": rng.random() < 0.8, "fences": rng.random() < 0.3}
    devices = [Device(kit, kit.manager(num_blocks, size, **options), shape) for kit in kits]
    reference = devices[-1]
    operations, met = [], {}
    for _ in range(num_operations):
        operation = random_operation(rng, reference.manager, reference.batch)
        if operation[0] == "retire":
            operations.append(("advance_epoch",))
            closed = [call(device, operations[-1]) for device in devices]
            operation = ("retire", closed[-1])
        operations.append(operation)
        before = visible(reference.manager)
        answers = [call(device, operation) for device in devices]
        seen = [(visible(device.manager), device.batch.sequence_ids) for device in devices]
        failed = is_error(answers[-1])
        met[operation[0], failed] = met.get((operation[0], failed), 0) + 1
        if any(other != answers[-1] for other in answers) or any(other != seen[-1] for other in seen):
            pytest.fail(f"{operation}: {answers}\n{seen}\nseed {seed}, after {operations}", pytrace=False)
        assert seen[-1][0]["audit"] == []
        if failed:
            assert seen[-1][0] == before
    return met


def test_random_schedules(batch_kits):
    """60 schedules of 150 operations: every answer, every exported number and every state is the same."""
    met = {}
    for seed in range(60):
        for key, count in random_schedule(seed, batch_kits).items():
            met[key] = met.get(key, 0) + count
    for name in ("step", "add", "remove", "batch_commit", "truncate_sequence", "fork_sequence", "admit"):
        assert met[name, False] > 100 - 60 * (name == "fork_sequence"), (name, met)
    for name in ("step", "add", "release_sequence"):
        assert met[name, True] > 10, (name, met)


@pytest.fixture
def started(batch_kit):
    """A batch of sequences 1, 2, 3 of lengths 3, 4, 9 over 1, 1 and 3 of 16 blocks of 4, and its first step."""
    manager = batch_kit.manager(16, 4)
    device = Device(batch_kit, manager, (4, 5, 8, 20))
    for sequence_id, length in ((1, 3), (2, 4), (3, 9)):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
        device.batch.add(sequence_id)
    return device


def test_a_first_step_and_a_steady_one(started):
    told, changes, exported = started.step(None, None)
    assert told == (0, 3, 3, 6, False)
    assert changes == [[0, 0, 0], [1, 0, 1], [1, 1, 5], [2, 0, 2], [2, 1, 3], [2, 2, 4]]
    tables, lengths, starts, slots = exported
    assert tables == [[0, -1, -1, -1, -1], [1, 5, -1, -1, -1], [2, 3, 4, -1, -1], [-1] * 5]
    assert (lengths, starts) == ([4, 5, 10, 0], [0, 1, 2, 3, 3])
    assert slots == [3, 20, 17, -1, -1, -1, -1, -1]
    told, changes, exported = started.step([0, 3, 2], None)
    assert (told, changes) == ((1, 3, 5, 0, False), [])
    assert exported[1:] == [[4, 8, 12, 0], [0, 0, 3, 5, 5], [21, 22, 23, 18, 19, -1, -1, -1]]


def test_remove_moves_the_last_row_into_the_hole(started):
    started.step(None, None)
    assert started.batch.remove(1) == (0, 3)
    assert started.batch.sequence_ids == [3, 2]
    told, changes, _ = started.step(None, None)
    assert told[1] == 2
    assert changes == [[0, 0, 2], [0, 1, 3], [0, 2, 4], [2, 0, -1], [2, 1, -1], [2, 2, -1]]
    assert started.batch.remove(2) == (1, None)
    assert started.batch.num_rows == 1


def test_a_row_that_left_and_came_back_is_listed_whole(started):
    started.step(None, None)
    assert started.batch.remove(3) == (2, None)
    assert started.batch.add(3) == 2
    _, changes, _ = started.step([0, 0, 0], None)
    assert changes == [[2, 0, 2], [2, 1, 3], [2, 2, 4]]


def test_what_truncate_cuts_is_listed_as_minus_one(started):
    started.step(None, None)
    started.manager.truncate_sequence(3, 2)
    _, changes, _ = started.step([0, 0, 0], None)
    assert changes == [[2, 1, -1], [2, 2, -1]]


def test_b060_a_row_keeps_nothing_of_the_longer_one_before(started):
    started.step(None, None)
    started.batch.remove(3)
    started.manager.create_sequence(4)
    started.manager.append_token(4)
    assert started.batch.add(4) == 2
    for _ in range(2):  # each of the two sets
        tables = started.step([0, 0, 1], None)[2][0]
        assert tables[2][1:] == [-1] * 4


def test_more_changes_than_there_is_room_say_upload(batch_kit):
    manager = batch_kit.manager(8, 1)
    device = Device(batch_kit, manager, (2, 8, 8, 2))
    manager.create_sequence(1)
    device.batch.add(1)
    assert device.step([3], None)[0] == (0, 1, 3, 3, True)
    assert device.step([2], None)[0] == (1, 1, 2, 2, False)


def test_after_invalidate_everything_is_written(started):
    started.step(None, None)
    started.step(None, None)
    for buffers in started.sets:
        for name in BUFFERS[:4]:
            getattr(buffers, name)[:] = 55
    started.exported = None
    started.batch.invalidate()
    for upload in (True, False):
        told = started.step([0, 0, 0], None)[0]
        assert told[4] is upload


def test_a_refused_step_changes_nothing_and_keeps_the_turn(started, observe):
    started.step(None, None)
    before = observe(started.manager)
    refusals = {
        (1, 1): (ArgumentError, "`counts`: wanted one count for each of 3 rows, got 2 counts"),
        (3, 3, 3): (ArgumentError, "`counts`: wanted at most 8 tokens, the room in `slot_mapping`, got 9 tokens"),
        (0, 0, -1): (ArgumentError, "`counts`: wanted a count in 0..2^63-1, got -1"),
    }
    for counts, (error, text) in refusals.items():
        with pytest.raises(error) as caught:
            started.batch.step(list(counts))
        assert str(caught.value) == text
    started.check_exported()
    assert observe(started.manager) == before
    started.step([0, 8, 0], None)
    started.step([0, 7, 0], None)
    before = observe(started.manager)
    with pytest.raises(SequenceTooLongError) as caught:
        started.batch.step([1, 1, 0])
    text = "sequence 2: 21 tokens need 6 blocks of 4 tokens, `block_tables` has 5 columns"
    assert str(caught.value) == text
    assert observe(started.manager) == before
    assert started.step([0, 0, 0], None)[0][0] == 1


def test_out_of_blocks_names_the_first_row_that_lacks_one(started, observe):
    started.step(None, None)
    while started.manager.num_free_blocks > 1:
        started.manager.allocate_block()
    before = observe(started.manager)
    with pytest.raises(OutOfBlocksError) as caught:
        started.batch.step([1, 1, 3])
    assert (caught.value.needed, caught.value.free, caught.value.row) == (2, 1, 2)
    assert observe(started.manager) == before
    assert started.batch.sequence_ids == [1, 2, 3]


def test_members(started, observe):
    manager, batch = started.manager, started.batch
    manager.create_sequence(9)
    before = observe(manager)
    wrong = [
        (UnknownSequenceError, "no sequence with id 8", lambda: batch.add(8)),
        (UnknownSequenceError, "no sequence with id 8", lambda: batch.remove(8)),
        (ArgumentError, "`sequence_id`: wanted an id in 0..2^63-1, got -1", lambda: batch.add(-1)),
        (StateError, "sequence 2 is row 1 of a batch already", lambda: batch.add(2)),
        (StateError, "sequence 9 is no row of this batch", lambda: batch.remove(9)),
        (StateError, "sequence 2 is row 1 of a batch, remove it first", lambda: manager.release_sequence(2)),
    ]
    for error, text, refused in wrong:
        with pytest.raises(error) as caught:
            refused()
        assert str(caught.value) == text
    assert observe(manager) == before
    assert batch.add(9) == 3
    manager.create_sequence(10)
    with pytest.raises(StateError, match="the batch is full: 4 rows"):
        batch.add(10)


def test_a_batch_that_is_gone_frees_its_rows(started):
    manager = started.manager
    started.batch = started.exported = None
    gc.collect()
    manager.release_sequence(2)
    assert 2 not in manager.sequences


def test_commit_by_row(batch_kit, observe):
    manager = batch_kit.manager(16, 4, enable_prefix_caching=True)
    device = Device(batch_kit, manager, (4, 5, 8, 20))
    for sequence_id in (1, 2):
        manager.admit(sequence_id, [5, 6, 7], out=array("q", [0] * 3))
        device.batch.add(sequence_id)
    device.batch.commit()
    device.step(None, [8, 8])
    before = observe(manager)
    with pytest.raises(ArgumentError) as caught:
        device.batch.commit([4])
    assert str(caught.value) == "`ns`: wanted one length for each of 2 rows, got 1 lengths"
    assert observe(manager) == before
    device.batch.commit([4, 3])
    assert manager.stats.indexed == 1
    device.batch.commit()  # both end on the same block, which the next step shows
    assert manager.block_table(1) == manager.block_table(2)
    _, changes, _ = device.step([0, 0], None)
    assert changes == [[1, 0, manager.block_table(1)[0]]]


def test_b130_step_metadata_is_a_snapshot(started):
    """What step n exported stands while everything happens that may happen before step n + 1 is exported."""
    manager = started.manager
    started.step(None, None)
    for turn in range(10):
        manager.truncate_sequence(2, 3)
        manager.fork_sequence(1, 50)
        manager.append_tokens(1, 1)
        manager.release_sequence(50)
        manager.take_copies()
        started.check_exported()
        started.batch.remove(2)
        started.batch.add(2)
        started.step([0, turn % 2, 2], None)


def test_b130_a_late_reader_sees_what_a_prompt_one_saw(batch_kit):
    """1,000 steps over two sets; step n is read again after step n + 1 was prepared."""
    manager = batch_kit.manager(40, 4, enable_prefix_caching=True)
    device = Device(batch_kit, manager, (4, 10, 12, 40))
    rng = random.Random(130)
    late = None
    for step in range(1000):
        for sequence_id in list(device.batch.sequence_ids):
            if manager.sequence_length(sequence_id) > 30 or rng.random() < 0.02:
                device.batch.remove(sequence_id)
                manager.release_sequence(sequence_id)
        while device.batch.num_rows < 3:
            new = next(i for i in range(4) if i not in manager.sequences)
            manager.admit(new, [0] * rng.randint(1, 12), out=array("q", [0] * 12))
            manager.commit(new, manager.sequence_length(new))
            device.batch.add(new)
        now = device.batch.step([rng.choice((1, 1, 3)) for _ in range(3)])
        if late is not None:
            buffers, seen = late
            assert [getattr(buffers, name).tolist() for name in BUFFERS[:4]] == seen, step
        manager.take_copies()
        device.batch.commit(token_ids=[0] * now.num_tokens)
        buffers = device.sets[now.buffer_set]
        late = buffers, [getattr(buffers, name).tolist() for name in BUFFERS[:4]]
    assert manager.check_invariants() == []
    assert manager.stats.num_hit_tokens > 500


def test_b126_others_work_by_id_while_a_thread_steps(observe):
    """Rust alone, as the reference is for one thread at a time. What a step exported stays consistent in itself."""
    manager = KVBlockManager(200, 4, enable_prefix_caching=True)
    batch = DecodeBatch.with_capacity(manager, 8, 50, max_tokens=16)
    for sequence_id in range(8):
        manager.admit(sequence_id, [0] * 6, out=array("q", [0] * 6))
        manager.commit(sequence_id, 6)
        batch.add(sequence_id)
    failures, finished = [], threading.Event()

    def disturb(thread):
        rng = random.Random(thread)
        try:
            while not finished.is_set():
                sequence_id = rng.randrange(8)
                try:
                    choice = rng.random()
                    if choice < 0.4:
                        manager.truncate_sequence(sequence_id, rng.randint(0, 6))
                    elif choice < 0.6:
                        manager.commit(sequence_id, manager.sequence_length(sequence_id))
                    elif choice < 0.8:
                        manager.fork_sequence(sequence_id, 100 + thread)
                        manager.release_sequence(100 + thread)
                    else:
                        manager.release_sequence(sequence_id)  # refused: it is a row
                except (ArgumentError, StateError):  # it moved on in between
                    manager.take_copies()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=disturb, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            step = batch.step([2] * 8)
            buffers = batch.buffers[step.buffer_set]
            tables, slots = buffers.block_tables.numpy(), buffers.slot_mapping.numpy()
            for row, length in enumerate(buffers.seq_lens.tolist()):
                wanted = [int(tables[row, p // 4]) * 4 + p % 4 for p in (length - 2, length - 1)]
                assert slots[2 * row : 2 * row + 2].tolist() == wanted
            manager.take_copies()
            for sequence_id in range(8):
                if manager.sequence_length(sequence_id) > 90:
                    manager.truncate_sequence(sequence_id, 0)
    finally:
        finished.set()
        for thread in threads:
            thread.join()
    assert failures == []
    observe(manager)


BAD_BUFFERS = {
    "block_tables": [np.zeros(8, np.int32), np.zeros((4, 2), np.int64), np.zeros((2, 8), np.int32).T, [0]],
    "seq_lens": [np.zeros(3, np.int32), np.zeros(4, np.int64), np.zeros(8, np.int32)[::2], bytes(16)],
    "query_start_loc": [np.zeros(4, np.int32), np.zeros((5, 1), np.int32)],
    "slot_mapping": [np.zeros(8, np.int32), np.zeros((8, 1), np.int64)],
    "changed": [np.zeros((20, 2), np.int32), np.zeros(60, np.int32), np.zeros((20, 3), np.int64)],
}


@pytest.mark.parametrize("name", BAD_BUFFERS)
def test_bad_buffers_are_refused_by_name(batch_kit, name):
    manager = batch_kit.manager(8, 4)
    for bad in BAD_BUFFERS[name]:
        sets = [make_buffers(batch_kit, 4, 2, 8, 20) for _ in range(2)]
        values = {field: getattr(sets[0], field) for field in BUFFERS} | {name: bad}
        for first, second in ((batch_kit.buffers(**values), sets[1]), (sets[1], batch_kit.buffers(**values))):
            with pytest.raises(ArgumentError) as caught:
                batch_kit.batch(manager, first, second)
            assert caught.value.argument == name


def test_sets_of_two_shapes_or_of_one_memory_are_refused(batch_kit):
    manager = batch_kit.manager(8, 4)
    first, second = make_buffers(batch_kit, 4, 2, 8, 20), make_buffers(batch_kit, 4, 2, 8, 21)
    with pytest.raises(ArgumentError) as caught:
        batch_kit.batch(manager, first, second)
    assert caught.value.argument == "changed"
    with pytest.raises(ArgumentError) as caught:
        batch_kit.batch(manager, first, first)
    assert caught.value.argument == "second"


def test_with_capacity(batch_kit):
    manager = batch_kit.manager(8, 4)
    batch = batch_kit.batch.with_capacity(manager, 3, 5)
    shape = (batch.max_rows, batch.max_blocks, batch.max_tokens, batch.max_changes)
    assert shape == (3, 5, 3, 8)
    for buffers in batch.buffers:
        assert buffers.block_tables.tolist() == [[-1] * 5] * 3
        assert buffers.seq_lens.tolist() == [0] * 3
        assert buffers.query_start_loc.tolist() == [0] * 4
        assert buffers.slot_mapping.tolist() == [-1] * 3
    manager.create_sequence(1)
    batch.add(1)
    assert batch.step().num_tokens == 1
    assert batch.buffers[0].seq_lens.tolist() == [1, 0, 0]


@pytest.mark.parametrize("size", [-1, 1.5, "2", True, 2**70])
@pytest.mark.parametrize("argument", ["max_rows", "max_blocks", "max_tokens", "max_changes"])
def test_capacity_is_a_size(argument, size):
    pytest.importorskip("torch")
    sizes = {"max_rows": 2, "max_blocks": 2, argument: size}
    with pytest.raises(ArgumentError, match=f"`{argument}`: wanted a size of at least 0, got"):
        DecodeBatch.with_capacity(KVBlockManager(4, 4), **sizes)


def test_what_is_no_set_of_buffers(batch_kit):
    manager = batch_kit.manager(8, 4)
    good = batch_kit.batch.with_capacity(manager, max_rows=1, max_blocks=1).buffers[0]
    for arguments, text in [
        ((manager, None, None), "`first`: wanted a BatchBuffers, with `block_tables`, got NoneType"),
        ((manager, good, 5), "`second`: wanted a BatchBuffers, with `block_tables`, got int"),
        ((None, good, good), "`manager`: wanted a KVBlockManager, got NoneType"),
    ]:
        with pytest.raises(TypeError) as caught:
            batch_kit.batch(*arguments)
        assert str(caught.value) == text
