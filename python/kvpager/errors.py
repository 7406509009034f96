"""Every error kvpager raises on purpose.

A leaf module: imported by all, imports nothing. The Rust binding raises these same classes, so each message is
worded once, here. The values behind a message are attributes too. All operations are all-or-nothing: the state after
an error equals the state before it.
"""


class KVPagerError(Exception):
    """Base class of all kvpager errors."""


class ConfigError(KVPagerError, ValueError):
    """A pool, model or engine was configured with values that can't work together."""


class ArgumentError(KVPagerError, ValueError):
    """A call got a bad argument: names it, what was wanted and what came.

    Attributes:
        argument: name of the parameter.
        wanted: what would have been accepted, in words.
        got: what came, in words.
    """

    def __init__(self, argument: str, wanted: str, got: object) -> None:
        self.argument = argument
        self.wanted = wanted
        self.got = str(got)
        super().__init__(f"`{argument}`: wanted {wanted}, got {self.got}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.argument, self.wanted, self.got)


class OutOfBlocksError(KVPagerError):
    """The pool can't hand out the blocks that a call needs. Nothing was taken.

    Attributes:
        needed: blocks the whole call would take, the watermark included.
        free: blocks that could be handed out when it was made.
        fenced: blocks that no sequence holds but that work in flight may still touch.
        total: blocks in the pool.
        row: index of the first row of a batched call that lacks a block; None for a call on one sequence.
        watermark: of `needed`, the blocks that an admission has to leave free; 0 in every other call.
    """

    def __init__(
        self, needed: int, free: int, fenced: int, total: int, row: int | None = None, watermark: int = 0
    ) -> None:
        self.needed = needed
        self.free = free
        self.fenced = fenced
        self.total = total
        self.row = row
        self.watermark = watermark
        kept_back = f" ({watermark} of them the watermark)" if watermark else ""
        held_back = f" ({fenced} fenced)" if fenced else ""
        where = "" if row is None else f"; row {row} is the first that lacks one"
        super().__init__(f"need {needed} blocks{kept_back}, {free} free of {total}{held_back}{where}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.needed, self.free, self.fenced, self.total, self.row, self.watermark)


class _SequenceError(KVPagerError):
    """Shared shape of the errors that are about one sequence id."""

    _wording = "{}"

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        super().__init__(self._wording.format(sequence_id))

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return self._wording.format(self.sequence_id)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.sequence_id,)


class UnknownSequenceError(_SequenceError, KeyError):
    """The sequence id names no sequence: never created, or released.

    Attributes:
        sequence_id: the id that was looked for.
    """

    _wording = "no sequence with id {}"


class DuplicateSequenceError(_SequenceError, ValueError):
    """The sequence id is taken already.

    Attributes:
        sequence_id: the id that exists.
    """

    _wording = "sequence {} exists already"


class SequenceTooLongError(KVPagerError, ValueError):
    """A sequence can never fit: it needs more than the pool or the model has, however long one waits."""


class StateError(KVPagerError):
    """The call is well-formed but not allowed in the present state."""


class SlotError(KVPagerError, IndexError):
    """A slot, a block id or a token position lies outside of what exists."""
