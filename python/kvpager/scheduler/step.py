"""What a scheduler says about a step, and the totals that it keeps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpager.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from kvpager.manager import BatchBuffers, BatchStep

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step computes.

    Attributes:
        batch_step: what the batch wrote, and into which of its buffer sets.
        buffers: that set: tables, lengths, slots.
        input_ids: [T] int64, the tokens to compute, row after row; the next `take` overwrites it.
        counts: [B] int64, tokens of each row; None: one each.
        max_query_len: the largest of them.
        max_seq_len: the longest row, this step's tokens included.
        admitted, preempted: who came and who went.
        held_back: why the first who waits did not come: "sequences", "tokens" or "blocks"; None if nobody waits.
    """

    batch_step: "BatchStep"
    buffers: "BatchBuffers[Any]"
    input_ids: Integers
    counts: Integers | None
    max_query_len: int
    max_seq_len: int
    admitted: list[Sequence]
    preempted: list[Sequence]
    held_back: str | None


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Whose next token is due.

    Attributes:
        rows: [R] int64, rows of the batch, ascending; None: all.
        token_index: [R] int64, which of the step's T tokens each one's scores come from; None: one each, in order.
        forked: how many sequences began as forks; theirs are the last rows.
    """

    rows: Integers | None
    token_index: Integers | None
    forked: int = 0


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the scheduler was made. Queried and cached: prompts when they first ran, never those that came back.

    Attributes:
        num_steps: steps scheduled.
        num_prefill_tokens: computed in chunks, again after a preemption included.
        num_decode_tokens: computed one by one.
        num_queried_tokens: prompt tokens looked for in the cache.
        num_cached_tokens: of these, found.
        num_preemptions: sequences whose blocks were taken.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
