"""What is scheduled: one sequence of tokens that grows, and the queue of those that wait.

    add ──► waiting ──admit──► running ──last token, stop, abort, error──► finished
               ▲                  │
               └────preempt───────┘      its blocks are given back; prompt and generated tokens are computed again

Its two counters are never mixed. *Computed* tokens have their keys and values in the cache: the scheduler knows how
many. *Known* tokens are prompt and generated ones, `token_ids`; a running sequence has at least one that is known and
not computed. More than one: it is in its prefill (the prompt, or all of it again after a preemption). Exactly one: the
next step decodes.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum
from itertools import count


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one prompt.

    Attributes:
        sequence_id: its name in the block manager, not taken by another.
        token_ids: known tokens, the prompt first; the scheduler appends what is generated.
        max_tokens: most tokens to generate.
        stop_token_ids: tokens that end it; the one that does is its last.
        priority: lower ones first; among equals who came first.
        salt: keeps its cached prefix apart from those of others; None is a value too.
        finds_prefix: whether it takes what the cache holds of its tokens; False: it computes all of them. Others find
            what it computes either way.
        pending: sequences of the same prompt that begin as forks of this one when its prompt is computed.
        parent: whose fork it is to be; None once it is, and for all others.
        num_prompt_tokens: P, of `token_ids`.
        arrival: rank among equals; set when it is added.
        row: its row in the batch; −1 while it does not run.
        num_cached_tokens: prompt tokens found in the cache when it first ran; None before.
        num_found_tokens: tokens found in the cache when it last began to run, after a preemption for example.
        num_preemptions: how often its blocks were taken away.
        finish_reason: "length", "stop", "abort" or "error"; None before the end.
        error: why, where that is "error".
        stop_token_id: the stop token that ended it, if one did.
    """

    sequence_id: int
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: str | None = None
    finds_prefix: bool = True
    pending: list["Sequence"] = field(default_factory=list)
    parent: "Sequence | None" = field(default=None, init=False)
    num_prompt_tokens: int = field(init=False)
    status: Status = field(default=Status.WAITING, init=False)
    arrival: int = field(default=-1, init=False)
    row: int = field(default=-1, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)
    num_found_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    stop_token_id: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.adopt(self.pending)

    def adopt(self, forks: list["Sequence"]) -> None:
        """Make sequences of the same prompt the forks of this one that are to be. Before it is added."""
        self.pending = forks
        for fork in forks:
            fork.parent = self

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the smaller one."""
        return self.priority, self.arrival

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens; a copy."""
        return self.token_ids[self.num_prompt_tokens :]


class WaitingQueue:
    """Sequences by rank. Push and pop O(log n); one that is finished meanwhile leaves when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._pushes = count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """Add one whose status is WAITING."""
        heapq.heappush(self._heap, (*sequence.rank, next(self._pushes), sequence))
        self._num_waiting += 1

    def first(self) -> Sequence:
        """The one whose turn it is; there must be one."""
        while self._heap[0][-1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Sequence:
        """Take the first one out."""
        sequence = self.first()
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return sequence

    def forget(self) -> None:
        """Say that one of those that wait has been marked FINISHED."""
        self._num_waiting -= 1
