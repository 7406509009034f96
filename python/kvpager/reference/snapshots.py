"""What a manager tells about itself: frozen values that later calls don't change."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts at one moment. `live + cached + fenced + free == num_blocks`."""

    num_blocks: int
    live: int
    cached: int
    fenced: int
    free: int
    num_sequences: int
    num_copies: int  # ever owed
    peak_live: int
    indexed: int  # named by a node of the index, whatever their state
    pinned: int  # held by at least one pin
    num_hit_tokens: int
    num_queried_tokens: int
    num_resumed_tokens: int  # found by requests that came back: no hits in the eyes of their users
    num_evictions: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block at one moment, for people and plots."""

    block_id: int
    state: str  # live, fenced, cached or free
    ref_count: int
    owners: tuple[int, ...]  # ids of the sequences whose table names it, ascending
    num_pins: int
    is_held: bool  # by a caller who allocated it
    is_indexed: bool
    num_filled: int  # positions that hold a token
    eviction_rank: int | None  # of a cached block: 0 is the next victim


@dataclass(frozen=True, slots=True)
class BatchStep:
    """What a step wrote, and where: into which set (0 or 1), for how many rows and new tokens, and how many changes."""

    buffer_set: int
    num_rows: int
    num_tokens: int
    num_changes: int
    upload_table: bool  # `changed` does not hold them all
