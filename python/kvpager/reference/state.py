"""What a manager knows: its configuration, its pool, its sequences. The calls are in the files that build on this."""

from dataclasses import dataclass, field

from kvpager.errors import ConfigError, DuplicateSequenceError, SequenceTooLongError, UnknownSequenceError
from kvpager.reference.arguments import ID, MAX_INT64, read_flag, read_int, read_natural
from kvpager.reference.eviction import make_policy
from kvpager.reference.index import ROOT, Item, Namespace, Node, PrefixIndex, clip_items
from kvpager.reference.pool import BlockPool

MAX_BLOCKS = 2**31 - 1  # block ids are int32 in the tables that kernels read


@dataclass(slots=True)
class Sequence:
    """One sequence. `table` has one entry for every started block, so always ceil(length / block_size) of them."""

    length: int = 0  # tokens that own a slot
    computed: int = 0  # tokens whose keys and values are written; only kept when there is an index
    table: list[int] = field(default_factory=list)

    # What the index needs to name the blocks.
    namespace: Namespace = ROOT
    items: tuple[Item, ...] = ()
    token_ids: list[int | None] = field(default_factory=list)  # by position; a prompt's may reach past the length
    num_indexed: int = 0  # blocks at the start of the table that are nodes, each one the child of the one before
    stale: bool = False  # was there when the index was reset: nothing of it may be found again
    owed_from: int = 0  # first position appended since the copy into one of its blocks came to be owed, if one is

    def known_id(self, position: int) -> int | None:
        """The id of the token at `position`, if it was ever told."""
        return self.token_ids[position] if position < len(self.token_ids) else None

    def learn_id(self, position: int, token_id: int) -> None:
        """Note the id of the token at `position`."""
        self.token_ids += [None] * (position + 1 - len(self.token_ids))
        self.token_ids[position] = token_id

    def forget_from(self, length: int, block_size: int) -> None:
        """Keep what is known about the first `length` tokens."""
        self.length = length
        self.computed = min(self.computed, length)
        del self.token_ids[length:]
        self.items = clip_items(self.items, length)
        self.num_indexed = min(self.num_indexed, length // block_size)
        self.owed_from = min(self.owed_from, length)
        self.stale = self.stale and length > 0


class ManagerState:
    """Configuration, pool, index, sequences, holds; and the few questions that every call asks."""

    def __init__(
        self,
        num_physical_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        watermark_blocks: int | None = None,
        fences: bool = False,
        eviction_policy: str | None = None,
        hash_seed: int | None = None,
        max_pinned_blocks: int | None = None,
        max_sequence_length: int | None = None,
    ) -> None:
        """Create a pool of N = `num_physical_blocks` free blocks of S = `block_size` token positions each."""
        _check_shape(num_physical_blocks, block_size)
        _check_range("watermark_blocks", watermark_blocks, 0, num_physical_blocks)
        policy = make_policy(eviction_policy, num_physical_blocks)
        _check_range("hash_seed", hash_seed, 0, 2**64 - 1, "2^64-1")  # for the Rust version; here nothing is hashed
        _check_range("max_pinned_blocks", max_pinned_blocks, 0, num_physical_blocks)
        _check_range("max_sequence_length", max_sequence_length, 1, MAX_INT64, "2^63-1")
        self.num_blocks = num_physical_blocks
        self.block_size = block_size
        self._caching = read_flag("enable_prefix_caching", enable_prefix_caching)
        self._watermark = watermark_blocks or 0
        self._max_length = max_sequence_length
        self._max_pinned = num_physical_blocks if max_pinned_blocks is None else max_pinned_blocks
        self._index = PrefixIndex()
        self._pool = BlockPool(num_physical_blocks, self._index, policy, fences=read_flag("fences", fences))
        self._sequences: dict[int, Sequence] = {}
        self._held_by_caller: set[int] = set()
        self._pins: dict[int, list[int]] = {}  # pin id -> the blocks of a prefix
        self._next_pin = 0
        self._batch_rows: dict[int, int] = {}  # of sequences in a `DecodeBatch`: their row
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_resumed_tokens = 0

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)  # rounded up

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self._sequences:
            raise DuplicateSequenceError(sequence_id)

    def _find(self, sequence_id: int) -> Sequence:
        sequence = self._sequences.get(read_natural("sequence_id", sequence_id, ID))
        if sequence is None:
            raise UnknownSequenceError(sequence_id)
        return sequence

    def _check_max_length(self, length: int, whose: str = "") -> None:
        if self._max_length is not None and length > self._max_length:
            raise SequenceTooLongError(f"{whose}{length} tokens, `max_sequence_length` is {self._max_length}")

    def _computed(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are written. Without an index they count as written when appended."""
        return sequence.computed if self._caching else sequence.length

    def _chain_end(self, sequence: Sequence) -> Namespace | Node:
        """The node that the sequence's next indexed block will be a child of."""
        if sequence.num_indexed == 0:
            return sequence.namespace
        return self._index.node_of(sequence.table[sequence.num_indexed - 1])


def _check_shape(num_physical_blocks: int, block_size: int) -> None:
    for argument, value in (("num_physical_blocks", num_physical_blocks), ("block_size", block_size)):
        if not 0 <= read_int(argument, value) <= MAX_INT64:
            raise ConfigError(f"`{argument}`: wanted 1 to 2^63-1, got {value}")
    if not 1 <= num_physical_blocks <= MAX_BLOCKS:
        raise ConfigError(f"`num_physical_blocks`: wanted 1 to {MAX_BLOCKS} blocks, got {num_physical_blocks}")
    if block_size < 1:
        raise ConfigError(f"`block_size`: wanted at least 1 token, got {block_size}")
    if num_physical_blocks * block_size > MAX_INT64:
        shape = f"{num_physical_blocks} blocks of {block_size} tokens"
        raise ConfigError(f"{shape}: the slots don't fit a 64-bit integer")


def _check_range(argument: str, value: int | None, low: int, high: int, high_in_words: str = "") -> None:
    if value is not None and not low <= read_int(argument, value) <= high:
        raise ConfigError(f"`{argument}`: wanted {low} to {high_in_words or high}, got {value}")
