"""`EngineStats`: the engine at one moment, in blocks and in tokens."""

from dataclasses import asdict, dataclass

from kvpager.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Blocks: ``live + evictable + fenced + free == total``; pinned ones are live.

    Attributes:
        num_running, num_waiting: sequences.
        num_blocks: N.
        live_blocks: held by sequences or pins.
        pinned_blocks: of these, held on purpose.
        evictable_blocks: hold a cached prefix that nobody uses now; an allocation may take them.
        fenced_blocks: held by nobody, but work in flight may touch them.
        free_blocks: the rest.
        block_usage: live blocks of all, 0 … 1.
        num_tokens: token positions that live blocks hold, each once.
        token_usage: these of all positions of the pool, 0 … 1. A pool can be 67 % taken and 37 % full.
        num_steps: steps run.
        num_prefill_tokens, num_decode_tokens: computed in chunks, or one by one.
        num_generated_tokens: sampled.
        num_queried_tokens, num_cached_tokens: prompt tokens looked for in the cache, and found.
        num_preemptions: sequences whose blocks were taken.
        num_finished: requests that have ended, aborted ones and those in error included.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    live_blocks: int
    pinned_blocks: int
    evictable_blocks: int
    fenced_blocks: int
    free_blocks: int
    block_usage: float
    num_tokens: int
    token_usage: float
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_generated_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_finished: int


def take_stats(scheduler: Scheduler, num_generated_tokens: int, num_finished: int) -> EngineStats:
    """The figures of now. O(table entries) for the tokens held; nothing of it is on a step's way."""
    manager = scheduler.manager
    pool = manager.stats
    positions = pool.num_blocks * manager.block_size
    num_tokens = pool.live * manager.block_size - manager.internal_fragmentation_tokens()
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_blocks=pool.num_blocks,
        live_blocks=pool.live,
        pinned_blocks=pool.pinned,
        evictable_blocks=pool.cached,
        fenced_blocks=pool.fenced,
        free_blocks=pool.free,
        block_usage=pool.live / pool.num_blocks,
        num_tokens=num_tokens,
        token_usage=num_tokens / positions,
        num_generated_tokens=num_generated_tokens,
        num_finished=num_finished,
        **asdict(scheduler.counts),
    )
