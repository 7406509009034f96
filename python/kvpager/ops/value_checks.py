"""What the ops accept: the values of integers and of scales.

The reference kernels read them here and raise before anything is written; the native CPU kernels do the same in C++
with the same words, the CUDA kernels skip the offending row and set a device error word.
"""

from torch import Tensor

from kvpager.errors import ArgumentError, SlotError


def check_scale_values(key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    """A scale that stands for a whole cache is a positive number: nothing else can be divided by."""
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and scale.dim() <= 1 and not 0 < float(scale) < float("inf"):
            raise ArgumentError(argument, "a positive number as the one scale", float(scale))


def check_slot_values(slot_mapping: Tensor, num_slots: int) -> None:
    """Every slot is −1 (skip) or lies in the pool. O(T), reads the values."""
    bad = (slot_mapping < -1) | (slot_mapping >= num_slots)
    if bad.any():
        token = int(bad.nonzero()[0])
        got = int(slot_mapping[token])
        raise SlotError(f"`slot_mapping`: wanted -1 or a slot below {num_slots}, got {got} at token {token}")


def check_position_values(positions: Tensor, num_positions: int) -> None:
    """Every position is a row of the table of angles. O(T), reads the values."""
    bad = (positions < 0) | (positions >= num_positions)
    if bad.any():
        token = int(bad.nonzero()[0])
        wanted = f"0 to {num_positions - 1} (rows of `cos_sin`)"
        raise ArgumentError("positions", wanted, f"{int(positions[token])} at token {token}")


def check_sequence_values(
    block_tables: Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_blocks: int,
    block_size: int,
    max_seq_len: int,
    window: int,
) -> None:
    """Lengths fit the tables and the bound, and every table entry that will be read names a block. O(B·M).

    Entries of blocks that lie wholly before the first query's window are not read, so they are not checked either.
    """
    M = block_tables.shape[1]
    longest = min(M * block_size, max_seq_len)
    for row, (length, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        if not 0 <= length <= longest:
            wanted = f"lengths of 0 to {longest} ({M} blocks of {block_size}, `max_seq_len` {max_seq_len})"
            raise ArgumentError("seq_lens", wanted, f"{length} in row {row}")
        if length == 0 or query_len == 0:
            continue
        first = max(0, length - query_len + 1 - window) if window else 0
        columns = slice(first // block_size, -(-length // block_size))
        entries = block_tables[row, columns]
        bad = (entries < 0) | (entries >= num_blocks)
        if bad.any():
            column = int(bad.nonzero()[0])
            where = f"{int(entries[column])} at row {row}, column {column + columns.start}"
            raise SlotError(f"`block_tables`: wanted a block id of 0 to {num_blocks - 1}, got {where}")


def check_query_values(query_start_loc: list[int], seq_lens: list[int], num_tokens: int, max_query_len: int) -> None:
    """`query_start_loc` starts at 0, never falls, stays within the query, and no query is longer than its sequence."""
    if query_start_loc[0] != 0:
        raise ArgumentError("query_start_loc", "0 as first entry", query_start_loc[0])
    for row, length in enumerate(seq_lens):
        query_len = query_start_loc[row + 1] - query_start_loc[row]
        if not 0 <= query_len <= max_query_len:
            wanted = f"steps of 0 to {max_query_len} (`max_query_len`)"
            raise ArgumentError("query_start_loc", wanted, f"{query_len} at row {row}")
        if query_len > length >= 0:  # a negative length is for `check_sequence_values` to refuse
            wanted = "no more query tokens than the sequence is long"
            raise ArgumentError("query_start_loc", wanted, f"{query_len} queries for length {length} at row {row}")
    if query_start_loc[-1] > num_tokens:
        raise ArgumentError(
            "query_start_loc", f"a last entry of at most {num_tokens} (query rows)", query_start_loc[-1]
        )


def check_start_values(seq_start_loc: list[int], seq_lens: list[int], num_rows: int) -> None:
    """Rows of `gather_kv`: they lie one sequence after another and fit into `key`."""
    written = 0
    for row, length in enumerate(seq_lens):
        start, stop = seq_start_loc[row], seq_start_loc[row + 1]
        if start < written or stop < start + length:
            wanted = "rising starts, each at least the sequence's length apart"
            raise ArgumentError("seq_start_loc", wanted, f"{start} to {stop} for length {length} at row {row}")
        written = start + length
    if seq_start_loc[-1] > num_rows:
        raise ArgumentError("seq_start_loc", f"a last entry of at most {num_rows} (rows of `key`)", seq_start_loc[-1])


def check_schedule_values(schedule: list[int], seq_lens: list[int], fixed_split: int) -> None:
    """A schedule: [B, fixed_split, row, position, …], cuts in order from the start of the batch to its end."""
    wanted = "one that make_schedule made for these `seq_lens` and `fixed_split`"
    B = len(seq_lens)
    if len(schedule) < 6 or len(schedule) % 2:
        raise ArgumentError("schedule", wanted, f"{len(schedule)} entries")
    if schedule[0] != B:
        raise ArgumentError("schedule", wanted, f"one for {schedule[0]} sequences")
    if schedule[1] != fixed_split:
        raise ArgumentError("schedule", wanted, f"one for splits of {schedule[1]} tokens")
    cuts = list(zip(schedule[2::2], schedule[3::2], strict=True))
    for i, (row, position) in enumerate(cuts):
        if i in (0, len(cuts) - 1):
            fits = (row, position) == ((0, 0) if i == 0 else (B, 0))
        else:
            fits = (row, position) >= cuts[i - 1] and (
                (row, position) == (B, 0) or (0 <= row < B and 0 <= position <= seq_lens[row])
            )
        if not fits or (fixed_split and position % fixed_split):
            raise ArgumentError("schedule", wanted, f"a cut at row {row}, position {position}")


def check_change_values(changed: list[list[int]], num_rows: int, num_columns: int) -> None:
    """Every entry names a place of the table, or row −1, which is padding. O(C)."""
    for index, (row, column, _) in enumerate(changed):
        if row != -1 and not (0 <= row < num_rows and 0 <= column < num_columns):
            wanted = f"rows below {num_rows} (or -1) and columns below {num_columns}"
            raise ArgumentError("changed", wanted, f"row {row}, column {column} at entry {index}")


def check_swap_values(pairs: list[list[int]], num_sources: int, num_targets: int) -> None:
    """Both blocks of a pair exist, and no destination is named twice. O(P)."""
    targets: set[int] = set()
    for row, (source, target) in enumerate(pairs):
        for kind, block, num_blocks in (("source", source, num_sources), ("destination", target, num_targets)):
            if not 0 <= block < num_blocks:
                raise SlotError(f"`pairs`: wanted {kind} blocks of 0 to {num_blocks - 1}, got {block} at row {row}")
        if target in targets:
            raise ArgumentError("pairs", "destinations named once", f"block {target} at row {row}")
        targets.add(target)


def check_pair_values(pairs: list[list[int]], num_blocks: int) -> None:
    """Block ids exist, and no destination is a source or another pair's destination. O(P)."""
    for row, pair in enumerate(pairs):
        for block in pair:
            if not 0 <= block < num_blocks:
                raise SlotError(f"`pairs`: wanted block ids of 0 to {num_blocks - 1}, got {block} at row {row}")
    sources = {source for source, _ in pairs}
    destinations: set[int] = set()
    for row, (_, destination) in enumerate(pairs):
        if destination in sources or destination in destinations:
            wanted = "destinations that are no source and named once"
            raise ArgumentError("pairs", wanted, f"block {destination} at row {row}")
        destinations.add(destination)
