"""Where the streams of several emulated devices meet: a collective begins once the last of them is there."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Meeting:
    """One collective of ``parties`` streams. Nobody knows when it begins before all have come, or said that they will not."""

    def __init__(self, parties: int, over: Callable[[], None]) -> None:
        self._left = parties
        self._over = over
        self._latest_ns = 0
        self._begin: list[Callable[[int], None]] = []

    def come(self, stamp_ns: int) -> None:
        """A stream is there at ``stamp_ns``."""
        if stamp_ns > self._latest_ns:
            self._latest_ns = stamp_ns
        self.stay_away()

    def stay_away(self) -> None:
        """A stream takes no part: the others need not wait for it."""
        assert self._left > 0, "more streams came than were expected"
        self._left -= 1
        if self._left == 0:
            # Nobody is told twice: a meeting that still knew its parties, which know it, would be left to the garbage collector.
            over, self._over = self._over, _is_over
            begins, self._begin = self._begin, []
            over()
            for begin in begins:
                begin(self._latest_ns)

    def on_begin(self, begin: Callable[[int], None]) -> None:
        """``begin(stamp)`` is called once all have come."""
        self._begin.append(begin)


def _is_over() -> None:
    """It was said already."""


class Meetings:
    """The open meetings of a fleet, by name."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Meeting] = {}

    def at(self, name: Hashable, parties: int) -> Meeting:
        """The meeting of that name; the first who asks opens it."""
        meeting = self._open.get(name)
        if meeting is None:
            meeting = self._open[name] = Meeting(parties, lambda: self._close(name))
        return meeting

    def _close(self, name: Hashable) -> None:
        del self._open[name]
