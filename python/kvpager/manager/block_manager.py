"""`KVBlockManager`: the Rust allocator with what people look at.

The class is a thin subclass: every call of a step is the Rust method itself, so nothing stands between a caller and it.
What is added here are names, snapshots of sequences and a `repr`; nothing is decided.
"""

from collections.abc import Mapping
from typing import TypeAlias

from kvpager import _core
from kvpager.records import SequenceState, SequenceView

# A medium in a prompt: (start, stop, key). The placeholder tokens at positions start to stop - 1 stand for what `key`
# names, an image for example; a digest of its content makes a good key.
PrefixItem: TypeAlias = tuple[int, int, str]


class KVBlockManager(_core.KVBlockManager):
    """Who owns which block of a paged key/value cache: pool, block tables, copy-on-write, prefix cache.

    Works on integers alone: the keys and values lie in the caller's tensors, at the slots that are handed out here
    (slot = block id * block_size + offset). All calls may be made from any thread; each does all of its work or, when
    it raises, nothing. `kvpager.reference.KVBlockManager` is the same contract in plain Python, made to be read.

    Args:
        num_physical_blocks: N, blocks in the pool, 1 to 2^31 - 1.
        block_size: S, token positions in a block, at least 1; N * S must fit int64.
        enable_prefix_caching: keep an index of full, committed blocks, so that `admit` finds what was computed before.
            Token ids must be told then, at admission, append or commit.
        watermark_blocks: blocks that `admit` leaves free, so that running sequences can grow; waived while no block is
            live.
        fences: what is let go becomes reusable only when its epoch is retired. For work that runs late, as on a GPU.
        eviction_policy: `"lru"`, or `"slru"`, which prompts that never come back don't sweep (Karedla, Love, Wherry
            1994), or `"s3fifo"`, which also counts hits and remembers what it gave up (Yang and others 2023).
        hash_seed: of the hash chain that names blocks, 0 to 2^64 - 1. It changes no answer.
        max_pinned_blocks: blocks that `pin_prefix` may hold in all; None: no limit.
        max_sequence_length: tokens that a sequence may have; None: what the pool holds.

    Raises:
        ConfigError: a value above is out of range.

    Example:
        >>> manager = KVBlockManager(num_physical_blocks=64, block_size=4)
        >>> manager.create_sequence(7)
        >>> manager.append_tokens(7, 6)
        [0, 1, 2, 3, 4, 5]
        >>> manager.sequences[7]
        SequenceState(sequence_id=7, sequence_length=6, block_table=(0, 1))
    """

    __slots__ = ()

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """All sequences by id, ids ascending: a read-only view that gives frozen snapshots.

        Cost: a snapshot O(blocks of the sequence), a walk over ids O(sequences log sequences).
        """
        return SequenceView(self)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"KVBlockManager({stats.num_blocks} blocks of {self.block_size} tokens: {stats.live} live, "
            f"{stats.cached} cached, {stats.fenced} fenced, {stats.free} free; {stats.num_sequences} sequences)"
        )
