"""`AdmissionGate`: whether a sequence can ever fit, whether it may come in now, and what is said when nobody can.

It owns no rows and runs nothing; the scheduler asks, and does.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvpager.errors import ArgumentError, SequenceTooLongError, StateError
from kvpager.kinds import is_text, is_whole
from kvpager.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from kvpager.manager import KVBlockManager


class AdmissionGate:
    """The door to one pool.

    Args:
        manager: the pool.
        max_blocks: most blocks of a row.
        max_num_seqs: most rows.
    """

    def __init__(self, manager: "KVBlockManager", max_blocks: int, max_num_seqs: int) -> None:
        self._manager = manager
        self._max_blocks = max_blocks
        self._max_num_seqs = max_num_seqs
        self._no_slots = np.zeros(0, dtype=np.int64)
        self._refused: tuple[Sequence, int, int] | None = None  # what was asked in vain need not be asked again

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-num_tokens // self._manager.block_size)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what can never run.

        Raises:
            SequenceTooLongError: it can never fit, however long one waits.
            ArgumentError: no token in it, none to generate, more forks than rows, or a rank or salt of another kind.
        """
        P, new = sequence.num_prompt_tokens, sequence.max_tokens
        if not is_whole(sequence.priority):  # a rank that can't be compared would wedge the queue
            raise ArgumentError("priority", "a whole number", repr(sequence.priority))
        if sequence.salt is not None and not is_text(sequence.salt):
            raise ArgumentError("cache_salt", "None or a text without lone surrogates", repr(sequence.salt))
        if P < 1 or new < 1:
            raise ArgumentError("sequence", "at least one prompt token and one to generate", f"{P} and {new}")
        if 1 + len(sequence.pending) > self._max_num_seqs:
            wanted = f"at most {self._max_num_seqs} sequences of one prompt, as `max_num_seqs` says"
            raise ArgumentError("sequence", wanted, 1 + len(sequence.pending))
        needed = self.blocks_for(P + new - 1)  # the last token takes no slot
        room = min(self._manager.num_blocks, self._max_blocks)
        if needed > room:
            size = self._manager.block_size
            raise SequenceTooLongError(
                f"{P} prompt tokens and {new} new ones need {needed} blocks of {size} tokens, {room} is the most; set "
                f"`num_blocks` to at least {needed}, or lower `max_tokens` by {P + new - 1 - room * size}"
            )

    def enter(self, sequence: Sequence, kept_back: int) -> int | None:
        """Make the sequence in the pool, with the prefix that is found, if its whole prompt fits. O(its tokens).

        Args:
            sequence: one that waits.
            kept_back: blocks that have to be left free.

        Returns:
            Tokens found; None if it does not fit: then nothing has changed.
        """
        manager, resumed = self._manager, sequence.num_cached_tokens is not None
        asked = (sequence, manager.num_free_blocks - kept_back, manager.stats.indexed)
        if asked == self._refused:
            return None
        token_ids = sequence.token_ids
        if not sequence.finds_prefix:  # of one token nothing can be found; `batch.step` tells the others
            kept_back += self.blocks_for(len(token_ids)) - 1
            token_ids = token_ids[:1]
        prompt = (sequence.sequence_id, token_ids)
        if not manager.can_admit(*prompt, reserve_blocks=kept_back, salt=sequence.salt, resumed=resumed):
            self._refused = asked
            return None
        admission = manager.admit(
            *prompt,
            num_new_tokens=0,  # `batch.step` takes the slots, chunk by chunk
            salt=sequence.salt,
            resumed=resumed,
            out=self._no_slots,
        )
        return admission.num_computed_tokens

    def stalled(self, sequence: Sequence) -> StateError:
        """Nobody runs, and the first who waits does not fit."""
        manager, stats = self._manager, self._manager.stats
        needed, total = self.blocks_for(len(sequence.token_ids)), stats.num_blocks
        return StateError(
            f"nothing can run: sequence {sequence.sequence_id} needs {needed} blocks, {manager.num_free_blocks} "
            f"free of {total}, and no running request will give any back ({stats.live} are held outside of the "
            f"scheduler); free them or set `num_blocks` to at least {needed + total - manager.num_free_blocks}"
        )
