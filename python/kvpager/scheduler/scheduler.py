"""`Scheduler`: each step's rows, slots and blocks. Integers only: it runs, is tested and simulated without a model.

A step: `schedule` says who computes which tokens and has taken their slots; the caller computes them; `commit` says
that their keys and values are written and who gets a new token; the caller samples; `take` hands the tokens in. If
anything fails in between, `restart_all` puts everyone who runs back into the queue, and nothing is lost but work. Where
admitting or forking one sequence raises, that one alone ends with "error", and `take_failed` tells of it.

The rules:
- Every running sequence that decodes gets its one token in every step. What is left of `max_num_batched_tokens` goes to
  prefills, best rank first, in chunks: so one step mixes both. Rank is (priority, arrival).
- A waiting sequence enters when nobody of better rank waits, a row is free, a token of the budget is left, and its
  whole prompt fits beside the watermark and what those who run take in this step and still need for their prompts. So
  two half computed prompts can't wait for each other's blocks. The watermark is waived while nobody runs.
- If a step finds too few blocks, the running sequence of worst rank gives its own back and waits again with its rank.

What that promises, with one priority (tests/scheduler/test_scheduler_properties.py):
- Progress: the oldest unfinished sequence runs, is never preempted and advances by a token at least in every step. So
  each sequence ends within Σ (prompt + output tokens) steps over those that came up to it, whatever came after.
- Order: nobody is preempted for a younger one, and nobody enters before an older one that waits.
- What can never fit is refused by `add`. If nobody runs and the first who waits does not fit, because the blocks are
  held by someone else, `schedule` raises; it never stands still in silence.

Costs: a steady decode is one call to the allocator and a few array operations, no Python per row, but for appending
each token to its sequence's list. Steps with prefills, arrivals or ends: O(rows + tokens).

Longer than 300 lines because its operations change the same five fields (rows, queue, prefilling, pending, counts), and
each of them must leave all five in agreement.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpager.config import check_step_tokens
from kvpager.errors import OutOfBlocksError, StateError
from kvpager.scheduler.admission import AdmissionGate
from kvpager.scheduler.rows import RowFollower, Rows, StopTable
from kvpager.scheduler.sequence import Sequence, Status, WaitingQueue
from kvpager.scheduler.step import Integers, SampleRows, ScheduledStep, SchedulerCounts

if TYPE_CHECKING:
    from kvpager.manager import BatchStep, DecodeBatch, KVBlockManager


class Scheduler:
    """Decides who runs, over a block manager and a batch that nobody else adds rows to.

    Args:
        manager: the pool; `kvpager.reference.KVBlockManager` will do as well.
        batch: its batch; its capacity bounds the rows, and the tokens of a step.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most tokens of a step; at least `max_num_seqs`, so that everyone who decodes can.
        watermark_blocks: blocks that an admission leaves free while others run.
        followers: told of every row that comes and goes.

    Raises:
        ConfigError: the numbers can't work together.
    """

    def __init__(
        self,
        manager: "KVBlockManager",
        batch: "DecodeBatch[Any]",
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark_blocks: int = 0,
        followers: Iterable[RowFollower] = (),
    ) -> None:
        check_step_tokens(max_num_batched_tokens, max_num_seqs)
        self.manager = manager
        self.batch = batch
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.watermark_blocks = watermark_blocks
        self.counts = SchedulerCounts()
        self._followers = tuple(followers)
        self._gate = AdmissionGate(manager, batch.max_blocks, max_num_seqs)
        self._waiting = WaitingQueue()
        self._rows = Rows.make(max_num_seqs)
        self._prefilling: dict[Sequence, None] = {}
        self._num_pending = 0  # forks to come, each of which needs a row
        self._num_fresh_forks = 0  # since the last step: their tails are shared
        self._num_added = 0
        self._failed: list[Sequence] = []
        self._input_ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._stops = StopTable()

    # Who is here ------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """Those who run, by row; not to be changed."""
        return self._rows.sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, forks to come not counted."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is due."""
        return bool(self._rows.sequences) or len(self._waiting) > 0

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that own a slot; 0 for others."""
        return int(self._rows.length[sequence.row]) if sequence.row >= 0 else 0

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Whether a running sequence has more than its last token to compute, or had when this step began."""
        return sequence in self._prefilling

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse a sequence that can never run, without adding it; errors as of `add`."""
        self._gate.check_fits(sequence)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, and with it those that are to be its forks, into the queue.

        Raises:
            SequenceTooLongError: it can never fit, however long one waits.
            ArgumentError: no token in it, none to generate, more forks than rows, or a rank or salt of another kind.
        """
        self._gate.check_fits(sequence)
        for each in (sequence, *sequence.pending):
            each.arrival = self._num_added
            self._num_added += 1
            self._stops.learn(each.stop_token_ids)
        self._waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence wherever it is, and give its blocks back. Forks to come are ended with it. O(its blocks)."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.parent is not None:
            sequence.parent.pending.remove(sequence)
            self._num_pending -= sequence.parent.status is Status.RUNNING
        elif sequence.arrival >= 0:  # one that was never added waits nowhere
            self._waiting.forget()
        for each in (sequence, *sequence.pending):
            each.status, each.finish_reason, each.parent = Status.FINISHED, reason, None
        sequence.pending = []

    def take_failed(self) -> list[Sequence]:
        """Those that have ended with "error" since the last call as admitting or forking them raised; each once."""
        failed, self._failed = self._failed, []
        return failed

    # A step -----------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, its slots taken; None if there is nothing to do. Copies owed are the caller's to run first.

        Raises:
            StateError: nobody can run, as blocks are held by someone else. Those who wait go on waiting.
        """
        admitted, held_back = self._admit()
        preempted: list[Sequence] = []
        while self._rows.sequences:
            counts, input_ids = self._compose()
            try:
                batch_step = self.batch.step(counts, input_ids)
            except OutOfBlocksError as error:
                preempted.append(self._preempt_worst())
                if not self._rows.sequences:
                    raise self._stalled() from error
                continue
            return self._step_taken(batch_step, counts, input_ids, admitted, preempted, held_back)
        if len(self._waiting):
            raise self._stalled()
        return None

    def commit(self, step: ScheduledStep) -> SampleRows:
        """Say that the step's keys and values are written; begins the forks of prompts that are complete. O(rows)."""
        self.batch.commit()
        if step.counts is None:
            return SampleRows(None, None)
        B = len(self._rows.sequences)
        ends = np.cumsum(step.counts) - 1
        due = np.ones(B, dtype=np.bool_)
        parents = []
        for sequence in list(self._prefilling):
            if self._rows.length[sequence.row] < len(sequence.token_ids):
                due[sequence.row] = False
                continue
            del self._prefilling[sequence]
            if sequence.pending:
                parents.append(sequence)
        rows = np.flatnonzero(due)
        token_index = ends[rows]
        forks = [self._fork(parent) for parent in sorted(parents, key=lambda each: each.rank)]
        if forks:
            rows = np.concatenate((rows, np.arange(B, len(self._rows.sequences))))
            own = [ends[parent.row] for parent, num in forks for _ in range(num)]
            token_index = np.concatenate((token_index, np.array(own, dtype=np.int64)))
        return SampleRows(rows, token_index, len(rows) - int(due.sum()))

    def take(
        self, due: SampleRows, token_ids: Integers, is_ok: NDArray[np.bool_] | None = None
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Hand in the tokens sampled for the rows that were due, and end those for whom it is the last.

        Args:
            due: from `commit`.
            token_ids: token_ids [R] int64.
            is_ok: is_ok [R]; False: no token could be chosen, the sequence ends with "error". None: all are.

        Returns:
            The R sequences, each with its token appended (but for those in error); and those that ended.
        """
        rows = self._rows
        where: slice | Integers = slice(len(rows.sequences)) if due.rows is None else due.rows
        sequences = list(rows.sequences) if due.rows is None else [rows.sequences[row] for row in due.rows.tolist()]
        rows.next_input[where] = token_ids
        rows.left[where] -= 1
        for sequence, token in zip(sequences, token_ids.tolist(), strict=True):
            sequence.token_ids.append(token)
        ends = (rows.left[where] == 0) | self._stops.may_stop(token_ids)
        if is_ok is not None:
            ends |= ~is_ok
        ended: list[Sequence] = []
        if ends.any():
            places = sorted(np.flatnonzero(ends).tolist(), key=lambda place: sequences[place].rank)
            for place in places:  # by rank: which cached block is older must not depend on rows
                ok = is_ok is None or bool(is_ok[place])
                if self._is_last(sequences[place], int(token_ids[place]), ok):
                    ended.append(sequences[place])
        return sequences, ended

    def restart_all(self) -> list[Sequence]:
        """Put everyone who runs back into the queue, with rank and tokens: the step failed. Nothing is kept of it."""
        everyone = list(self._rows.sequences)
        for sequence in everyone:
            self._leave(sequence)
            self._wait(sequence)
        return everyone

    # Coming -----------------------------------------------------------------------------------------------------------

    def _admit(self) -> tuple[list[Sequence], str | None]:
        """Let in who may come, in order; who came, and why the next one did not."""
        admitted: list[Sequence] = []
        if not len(self._waiting):
            return admitted, None
        budget = self.max_num_batched_tokens - (len(self._rows.sequences) - len(self._prefilling))
        budget -= sum(self._uncomputed(sequence) for sequence in self._prefilling)
        while len(self._waiting):
            sequence = self._waiting.first()
            if len(self._rows.sequences) + self._num_pending + 1 + len(sequence.pending) > self.max_num_seqs:
                return admitted, "sequences"
            if budget < 1:
                return admitted, "tokens"
            try:
                if not self._enter(sequence):
                    return admitted, "blocks"
            except Exception as error:  # what is wrong with one of them stops no other
                self._fail(sequence, error)
                continue
            budget -= self._uncomputed(sequence)
            admitted.append(sequence)
        return admitted, None

    def _enter(self, sequence: Sequence) -> bool:
        """Admit a sequence if its whole prompt fits beside the needs of those who run. O(its tokens)."""
        kept_back = self._promised_blocks() + (self.watermark_blocks if self._rows.sequences else 0)
        num_computed = self._gate.enter(sequence, kept_back)
        if num_computed is None:
            return False
        self._add_row(sequence, num_computed)
        self._waiting.pop()
        self._num_pending += len(sequence.pending)
        sequence.num_found_tokens = num_computed
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_computed
            self.counts.num_queried_tokens += sequence.num_prompt_tokens
            self.counts.num_cached_tokens += num_computed
        self._prefilling[sequence] = None
        return True

    def _add_row(self, sequence: Sequence, length: int) -> None:
        """Make a sequence that the pool holds the last row, for all who keep rows; or release it, and raise."""
        told: list[RowFollower] = []
        try:
            self.batch.add(sequence.sequence_id)
            self._rows.append(sequence, length)
            for follower in self._followers:
                follower.add_row(sequence)
                told.append(follower)
        except BaseException:
            for follower in told:
                follower.remove_row(sequence)
            if sequence.row >= 0:
                self.batch.remove(sequence.sequence_id)
                self._rows.remove(sequence)
            self.manager.release_sequence(sequence.sequence_id)
            raise
        sequence.status = Status.RUNNING

    def _fork(self, parent: Sequence) -> tuple[Sequence, int]:
        """Begin the forks of a prompt: they share its blocks, and copy the last one when they write into it."""
        num_forks, forks = 0, parent.pending
        parent.pending = [*forks]
        for fork in forks:
            try:
                self.manager.fork_sequence(parent.sequence_id, fork.sequence_id)
                self._add_row(fork, len(parent.token_ids))
            except Exception as error:
                self._fail(fork, error)
                continue
            parent.pending.remove(fork)
            self._num_pending -= 1
            fork.num_cached_tokens, fork.parent = parent.num_cached_tokens, None
            num_forks += 1
        self._num_fresh_forks += 1 + num_forks
        return parent, num_forks

    def _promised_blocks(self) -> int:
        """Blocks that those who run take in this step, or need to finish their prompts. An upper bound."""
        rows, size = self._rows, self.manager.block_size
        lengths = rows.length[: len(rows.sequences)]
        promised = int(np.count_nonzero(lengths % size == 0)) + min(self._num_fresh_forks, len(lengths))
        for sequence in self._prefilling:
            length = int(rows.length[sequence.row])
            promised += (
                self._gate.blocks_for(len(sequence.token_ids)) - self._gate.blocks_for(length) - (length % size == 0)
            )
        return promised

    # Computing --------------------------------------------------------------------------------------------------------

    def _compose(self) -> tuple[Integers | None, Integers]:
        """Tokens of each row, and the inputs of all, row after row."""
        rows, B = self._rows, len(self._rows.sequences)
        if not self._prefilling:
            return None, rows.next_input[:B]
        counts = rows.share_out(list(self._prefilling), self.max_num_batched_tokens)
        return counts, rows.inputs(counts, self._prefilling, self._input_ids)

    def _step_taken(
        self,
        batch_step: "BatchStep",
        counts: Integers | None,
        input_ids: Integers,
        admitted: list[Sequence],
        preempted: list[Sequence],
        held_back: str | None,
    ) -> ScheduledStep:
        B = len(self._rows.sequences)
        lengths = self._rows.length[:B]
        lengths += 1 if counts is None else counts
        self._num_fresh_forks = 0
        totals, num_decodes = self.counts, B - len(self._prefilling)
        totals.num_steps += 1
        totals.num_decode_tokens += num_decodes
        totals.num_prefill_tokens += len(input_ids) - num_decodes
        if preempted:
            held_back = held_back or "blocks"
            admitted = [sequence for sequence in admitted if sequence.row >= 0]
        return ScheduledStep(
            batch_step,
            self.batch.buffers[batch_step.buffer_set],
            input_ids,
            counts,
            1 if counts is None else int(counts.max()),
            int(lengths.max()),
            admitted,
            preempted,
            held_back,
        )

    # Going ------------------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End one sequence by what was raised on its account; `take_failed` tells of it."""
        logging.getLogger("kvpager").error("sequence %d ends: %s", sequence.sequence_id, error, exc_info=error)
        for each in (sequence, *sequence.pending):
            each.error = str(error) or type(error).__name__
            self._failed.append(each)
        self.finish(sequence, "error")

    def _is_last(self, sequence: Sequence, token_id: int, ok: bool) -> bool:
        """Whether a sequence ends with the token that it just got; if so, it has."""
        if not ok:
            sequence.token_ids.pop()
            self.finish(sequence, "error")
        elif token_id in sequence.stop_token_ids:
            sequence.stop_token_id = token_id
            self.finish(sequence, "stop")
        elif sequence.num_generated_tokens >= sequence.max_tokens:
            self.finish(sequence, "length")
        return sequence.status is Status.FINISHED

    def _preempt_worst(self) -> Sequence:
        victim = max(self._rows.sequences, key=lambda sequence: sequence.rank)
        self._leave(victim)
        victim.num_preemptions += 1
        self.counts.num_preemptions += 1
        self._wait(victim)
        return victim

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch and give its blocks back."""
        for follower in self._followers:
            follower.remove_row(sequence)
        self.batch.remove(sequence.sequence_id)
        self.manager.release_sequence(sequence.sequence_id)
        self._rows.remove(sequence)
        self._prefilling.pop(sequence, None)
        self._num_pending -= len(sequence.pending)

    def _uncomputed(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - int(self._rows.length[sequence.row])

    def _stalled(self) -> StateError:
        return self._gate.stalled(self._waiting.first())
