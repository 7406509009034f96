"""Continuous batching in one page: first come first served over a paged cache.

Each request is a prompt and a number of new tokens. A step computes some tokens of everyone who runs: one for those who
decode, a chunk of the prompt for those who don't yet. Three budgets decide who runs: rows (`max_num_seqs`), tokens of
a step (`max_num_batched_tokens`) and blocks. `kvpager.scheduler` follows the same rules with priorities, forks and
without a loop over rows; the tests hold its every step against this one.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpager.errors import OutOfBlocksError, SequenceTooLongError, StateError
from kvpager.reference.block_manager import KVBlockManager

_NO_SLOTS = array("q")


@dataclass(eq=False)
class Request:
    """Tokens known so far (prompt, then generated), how many of them are computed, and how many are still to come."""

    number: int  # order of arrival, and name of its sequence
    token_ids: list[int]
    num_left: int
    num_computed: int = 0
    in_prefill: bool = True  # until all tokens known when it was admitted are computed
    num_cached: int | None = None  # found in the cache when it first ran


@dataclass
class Step:
    """What one step did: tokens computed by request number, who was admitted, who was preempted, who ended."""

    num_tokens: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class Scheduler:
    """Requests go in by `add`; `step` is called until nobody is left."""

    def __init__(
        self, manager: KVBlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, watermark_blocks: int = 0
    ) -> None:
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.watermark_blocks = watermark_blocks
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request, unless it could never fit: then waiting would be for ever."""
        total = len(request.token_ids) + request.num_left - 1  # the last token's keys and values are never needed
        if self._blocks(total) > self.manager.num_blocks:
            raise SequenceTooLongError(f"{total} tokens need {self._blocks(total)} blocks of {self.manager.num_blocks}")
        self.waiting.append(request)

    def step(self, next_token: Callable[[Request], int]) -> Step:
        """Admit, take slots (or somebody's blocks), compute, commit, and give those their token who are due."""
        step = Step()
        while self.waiting and self._admit_first(step):
            pass
        while self.running:
            chunks = self._share_out()
            try:
                self._take_slots(chunks)
            except OutOfBlocksError:
                self._preempt_youngest(step)
                continue
            break
        if not self.running:
            if self.waiting:
                raise StateError("nobody can run: the blocks are held by someone else")
            return step
        # Here a model would compute the chunks and write keys and values into the slots.
        for request, num_tokens in chunks.items():
            request.num_computed += num_tokens
            self.manager.commit(request.number, request.num_computed)
            step.num_tokens[request.number] = num_tokens
        due = [r for r in self.running if r.num_computed == len(r.token_ids)]
        for request in sorted(due, key=lambda r: r.number):
            self._give_token(request, next_token(request), step)
        return step

    def _admit_first(self, step: Step) -> bool:
        """Let the first in if there is a row and a token for it, and its whole prompt fits beside what others need."""
        request = self.waiting[0]
        num_wanted = sum(len(r.token_ids) - r.num_computed for r in self.running)
        if len(self.running) == self.max_num_seqs or num_wanted >= self.max_num_batched_tokens:
            return False
        promised = sum(self._blocks_needed(other) for other in self.running)
        if not self.manager.can_admit(request.number, request.token_ids):
            return False
        request.num_computed = self.manager.admit(
            request.number, request.token_ids, num_new_tokens=0, resumed=request.num_cached is not None, out=_NO_SLOTS
        ).num_computed_tokens
        watermark = self.watermark_blocks if self.running else 0
        needed = self._blocks(len(request.token_ids)) - self._blocks(request.num_computed)
        if needed + promised + watermark > self.manager.num_free_blocks:
            self.manager.release_sequence(request.number)
            request.num_computed = 0
            return False
        if request.num_cached is None:
            request.num_cached = request.num_computed
        self.running.append(self.waiting.pop(0))
        step.admitted.append(request.number)
        return True

    def _share_out(self) -> dict[Request, int]:
        """Tokens for everyone: one for those who decode, what is left of the budget for prompts, oldest first."""
        chunks = {r: 1 for r in self.running if not r.in_prefill}
        budget = self.max_num_batched_tokens - len(chunks)
        for request in sorted(self.running, key=lambda r: r.number):
            if request not in chunks:
                chunks[request] = min(budget, len(request.token_ids) - request.num_computed)
                budget -= chunks[request]
        return {request: num_tokens for request, num_tokens in chunks.items() if num_tokens}

    def _take_slots(self, chunks: dict[Request, int]) -> None:
        ids = [token for r, n in chunks.items() for token in r.token_ids[r.num_computed : r.num_computed + n]]
        self.manager.slot_mapping_for_append([r.number for r in chunks], list(chunks.values()), ids)

    def _preempt_youngest(self, step: Step) -> None:
        """Take the blocks of the youngest; it waits again, and will compute all its tokens again."""
        youngest = max(self.running, key=lambda r: r.number)
        self._leave(youngest)
        youngest.num_computed, youngest.in_prefill = 0, True
        self.waiting = sorted([youngest, *self.waiting], key=lambda r: r.number)
        step.preempted.append(youngest.number)

    def _give_token(self, request: Request, token_id: int, step: Step) -> None:
        request.token_ids.append(token_id)
        request.in_prefill = False
        request.num_left -= 1
        if request.num_left == 0:
            self._leave(request)
            step.ended.append(request.number)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.release_sequence(request.number)

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that a running request takes until all the tokens that are known are computed."""
        return self._blocks(len(request.token_ids)) - self._blocks(request.num_computed)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.manager.block_size)
