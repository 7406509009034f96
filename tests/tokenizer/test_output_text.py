"""Stop strings: nothing of one is given out before it is decided, nothing else is lost, however the text was cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.tokenizer import OutputText, StopFinder


def stream(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What is given out for each piece, then at the end; and the stop string that was found."""
    finder = StopFinder(stops, include=include)
    shown = [finder.push(piece) for piece in pieces]
    return [*shown, finder.finish()], finder.found


@pytest.mark.parametrize(
    ("pieces", "include", "shown", "found"),
    [
        (["DEF", "G", "HI", "J"], False, ["", "", "", "", ""], "DEFGHIJ"),
        (["DEF", "G", "X"], False, ["", "", "DEFGX", ""], None),
        (["DEF", "G"], False, ["", "", "DEFG"], None),
        (["abDE", "F", "GHIJK"], False, ["ab", "", "", ""], "DEFGHIJ"),
        (["abDE", "F", "GHIJK"], True, ["ab", "", "DEFGHIJ", ""], "DEFGHIJ"),
        (["DDDE", "x"], False, ["DD", "DEx", ""], None),
    ],
)
def test_b117_a_stop_string_over_several_pieces(
    pieces: list[str], include: bool, shown: list[str], found: str | None
) -> None:
    assert stream(["DEFGHIJ"], pieces, include=include) == (shown, found)


def test_the_stop_string_that_ends_first_decides() -> None:
    assert stream(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")
    assert stream(["abc", "bc"], ["abcd"]) == (["", ""], "abc")  # both end there: the longer


def test_after_a_stop_nothing_comes() -> None:
    assert stream(["."], ["one.two", "three"]) == (["one", "", ""], ".")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_b117_the_text_does_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for include in (False, True):
        shown, found = stream(stops, pieces, include=include)
        whole, found_at_once = stream(stops, [text], include=include)
        assert ("".join(shown), found) == ("".join(whole), found_at_once)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        end = min(ends, default=len(text))
        kept = text[:end] if include or found is None else text[: end - len(found)]
        assert "".join(shown) == kept


TOKENS = [b"Hel", b"lo \xe4", b"\xb8\x96", b" wor", b"ld", b" end"]


def run(*, stops: tuple[str, ...] = (), min_tokens: int = 0, include: bool = False) -> tuple[list[str], str | None]:
    text = OutputText(lambda token: TOKENS[token], stops, min_tokens=min_tokens, include_stop=include)
    shown = []
    for token in range(len(TOKENS)):
        shown.append(text.push(token))
        if text.stop_reason:
            break
    return [*shown, text.finish()], text.stop_reason


def test_bytes_and_stop_strings_together() -> None:
    assert run() == (["Hel", "lo ", "世", " wor", "ld", " end", ""], None)
    assert run(stops=("世 w",)) == (["Hel", "lo ", "", "", ""], "世 w")
    assert run(stops=("world!",)) == (["Hel", "lo ", "世", " ", "", "world end", ""], None)
    assert run(stops=("end", "orl"), include=True) == (["Hel", "lo ", "世", " w", "orl", ""], "orl")


def test_text_of_the_first_tokens_is_not_searched() -> None:
    assert run(stops=("lo", "ld"), min_tokens=2) == (["He", "llo ", "世", " wor", "", ""], "ld")
    assert run(stops=("lo",)) == (["He", "l", ""], "lo")


def test_a_cut_character_is_flushed_once() -> None:
    text = OutputText(lambda _token: b"\xe4\xb8", ("\ufffd!",))
    assert text.push(0) == ""
    assert text.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "min_tokens", "expected"),
    [
        (("lo 世",), 2, (["Hel", "", "", "", ""], "lo 世")),  # begins in the second token, ends above the floor
        (("lo", "lo 世"), 2, (["Hel", "", "", "", ""], "lo 世")),  # the shorter one ends below it
        (("l", "lo 世!"), 2, (["He", "l", "lo 世 wor", "", ""], "l")),  # one that ends in held text below doesn't count
        (("Hello",), 2, (["", "Hello ", "世", " wor", "ld", " end", ""], None)),  # all of it below
    ],
)
def test_f229_a_stop_string_may_begin_below_the_floor(stops: tuple[str, ...], min_tokens: int, expected: Any) -> None:
    shown, found = run(stops=stops, min_tokens=min_tokens)
    assert "".join(shown) == "".join(expected[0])
    assert found == expected[1]
