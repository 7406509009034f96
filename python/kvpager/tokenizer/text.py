"""From tokens to text as they come: characters that are split over tokens, stop strings that are split over pieces.

Nothing is given out that might be taken back: a character waits for its last byte, and text that may turn out to begin
a stop string waits until that is decided. The pieces joined are the whole text, however it was cut into tokens.
"""

import codecs
from collections.abc import Callable, Sequence


class IncrementalDecoder:
    """Turns one sequence's tokens into text as they come."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is still short of bytes."""
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: one U+FFFD for a character that never got its last byte, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopFinder:
    """Holds back text that may begin a stop string, and finds the first one.

    The first is the one that ends first (of several, the longest), so that the outcome does not depend on how the text
    was cut into pieces. O(characters of the piece and the longest stop string · stop strings) per call.

    Args:
        stops: texts of at least one character.
        include: whether the stop string found counts as text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_passed = 0  # characters of `_held` in which no stop string may end
        self.found: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Text that can be given out now. After a stop string was found, there is none.

        Args:
            piece: what comes next.
            may_end: whether a stop string that ends in this piece counts; one that begins in it may count later.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        passed = self._num_passed if may_end else len(text)
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, passed - len(stop) + 1))) >= 0
        ]
        if ends:
            end, minus_length, self.found = min(ends)
            self._held = ""
            return text[:end] if self._include else text[: end + minus_length]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        self._num_passed = max(0, passed - (len(text) - keep))
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class OutputText:
    """The text of one completion, token by token.

    Args:
        token_bytes: the bytes that a token stands for, from `Tokenizer.token_bytes`.
        stops: stop strings.
        include_stop: whether the one found counts as text.
        min_tokens: tokens in whose text none ends; one may begin there.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(token_bytes)
        self._stops = StopFinder(stops, include=include_stop)
        self._unsearched = min_tokens

    def push(self, token_id: int) -> str:
        """The text that this token lets out: empty while it is held back, or after a stop string was found."""
        return self._searched(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back, when the completion ends for another reason: nothing is lost."""
        last = self._searched(self._decoder.finish())
        return last + self._stops.finish()

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found; None while none was."""
        return self._stops.found

    def _searched(self, piece: str) -> str:
        is_below = self._unsearched > 0
        self._unsearched -= is_below
        return self._stops.push(piece, may_end=not is_below)
