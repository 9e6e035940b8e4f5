"""The text of a request as its tokens come, up to its first stop string: pure, one object a request.

A stop string may lie across tokens, so text that may begin one is held back until that is decided: what was given out
never holds any part of a stop string that ended the request. Of several the one that is complete first ends it.
"""

from __future__ import annotations

from typing import Protocol


class Speller(Protocol):
    """Text that grows token by token."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopFinder:
    """Looks for stop strings in text that comes in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops`` are not empty strings."""
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that can be given out, whether a stop string is complete); nothing may be pushed after that."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class Spelling:
    """Tokens in, text out, until a stop string."""

    def __init__(self, speller: Speller, stops: tuple[str, ...] = ()) -> None:
        self._speller = speller
        self._finder = StopFinder(stops) if stops else None

    def push(self, token_id: int, *, last: bool) -> tuple[str, bool]:
        """(what the token adds to the text, whether a stop string ended it). ``last`` gives out all that was held back."""
        piece = self._speller.push(token_id)
        if last:
            piece += self._speller.flush()
        if self._finder is None:
            return piece, False
        text, stopped = self._finder.push(piece)
        if last and not stopped:
            text += self._finder.flush()
        return text, stopped
