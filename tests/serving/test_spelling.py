"""Text that grows token by token, up to a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afore.serving.spelling import Spelling, StopFinder

letters = st.text("ab", max_size=12)


def character_by_character(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The definition: the first moment at which a stop string is complete; the longest of those that are."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.lists(letters, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple))
def test_pieces_come_to_what_the_whole_text_comes_to(pieces: list[str], stops: tuple[str, ...]) -> None:
    finder = StopFinder(stops)
    whole, expected_stop = character_by_character("".join(pieces), stops)
    given_out, stopped = "", False
    for piece in pieces:
        text, stopped = finder.push(piece)
        given_out += text
        assert whole.startswith(given_out), "nothing of a stop string is ever given out"
        if stopped:
            break
    if not stopped:
        given_out += finder.flush()
    assert (given_out, stopped) == (whole, expected_stop)


@given(st.lists(letters, max_size=8), st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stop: str) -> None:
    finder = StopFinder((stop,))
    given_out = so_far = ""
    for piece in pieces:
        text, stopped = finder.push(piece)
        if stopped:
            return
        given_out, so_far = given_out + text, so_far + piece
        assert stop.startswith(so_far[len(given_out) :])


class Plain:
    """Spells token n as n letters, and holds one back to the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + "x" * token_id
        self._held = text[-1:]
        return text[:-1]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def test_the_last_token_gives_out_what_was_held_back() -> None:
    spelling = Spelling(Plain(), ("xxxxxy",))
    assert spelling.push(3, last=False) == ("", False)
    assert spelling.push(2, last=True) == ("xxxxx", False)
    assert Spelling(Plain()).push(2, last=True) == ("xx", False)


def test_a_stop_string_in_the_last_flush_counts() -> None:
    assert Spelling(Plain(), ("xxx",)).push(3, last=True) == ("", True)
