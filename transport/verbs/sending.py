"""The accounts of a send queue: requests under way, staged bytes, and which requests ask for a completion.

Requests complete in their order, so only some are *signaled* (they give a completion, with the number of the request): each
frees all before it. Nobody waits behind an unsignaled tail: ``needs_flush`` says when a signaled empty request has to follow.
Pure: no verbs, no memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RESERVE = 4
"""Requests beyond ``depth`` that only flushes and announcements may use."""


@dataclass(slots=True)
class Mark:
    """A signaled request that has not completed."""

    number: int
    staged: int
    """Staging position that its completion frees up to."""
    held: list[object]
    """What must live until then: memory of its own, or who waits."""


class SendQueue:
    """Counters of one queue pair's requests. Numbers start at 1 and only grow."""

    __slots__ = (
        "_depth",
        "_free_at",
        "_head",
        "_held",
        "_marks",
        "_signaled",
        "_size",
        "_tail_staged",
        "done",
        "posted",
    )

    def __init__(self, depth: int, staging_bytes: int) -> None:
        self._depth = depth
        self._size = staging_bytes
        self.posted = 0
        """Number of the newest request."""
        self.done = 0
        """Number of the newest request that is known to have completed."""
        self._signaled = 0
        """Number of the newest signaled request."""
        self._head = 0
        self._free_at = 0
        self._tail_staged = 0
        self._marks: deque[Mark] = deque()
        self._held: list[object] = []

    # Room

    def has_room(self, requests: int, nbytes: int) -> bool:
        """Whether ``requests`` more fit, and ``nbytes`` in one piece can be staged for them.

        More than all of staging: only where nothing is under way.
        """
        return self.posted - self.done + requests <= self._depth and (not nbytes or self._fits(nbytes))

    def has_reserve(self) -> bool:
        """Whether a flush or an announcement fits."""
        return self.posted - self.done < self._depth + RESERVE

    def _fits(self, nbytes: int) -> bool:
        if nbytes > self._size:
            return self.posted == self.done
        return self._free_at == self._head or self._place(nbytes) + nbytes - self._free_at <= self._size

    def _place(self, nbytes: int) -> int:
        at = self._head % self._size
        return self._head if at + nbytes <= self._size else self._head + self._size - at

    def stage(self, nbytes: int) -> int:
        """Takes ``nbytes`` of staging, where there is room (``has_room``); returns their offset."""
        if self._free_at == self._head:
            # Nothing is staged: begin at the start again, in memory that caches still have.
            self._free_at = self._head = -(-self._head // self._size) * self._size
        place = self._place(nbytes)
        assert place + nbytes - self._free_at <= self._size, "staging without room"
        self._tail_staged += place + nbytes - self._head
        self._head = place + nbytes
        return place % self._size

    # Requests

    def _is_due(self) -> bool:
        """Whether the next request is signaled by itself: a quarter of the queue or of staging was used since the last one."""
        return (self.posted + 1 - self._signaled) * 4 >= self._depth or self._tail_staged * 4 >= self._size

    def hold(self, thing: object) -> None:
        """``thing`` must live until the next signaled request has completed."""
        self._held.append(thing)

    def post(self, *, signaled: bool) -> bool:
        """Counts one request, whose number ``posted`` is then; returns whether it is signaled, as it is where that is due."""
        due = signaled or self._is_due()
        self.posted += 1
        if due:
            self._signaled = self.posted
            self._marks.append(Mark(self.posted, self._head, self._held))
            self._held = []
            self._tail_staged = 0
        return due

    def needs_flush(self) -> bool:
        """Whether the newest request is unsignaled: nothing would tell of its completion."""
        return self.posted > max(self._signaled, self.done)

    def completed(self, number: int) -> list[object]:
        """Signaled request ``number`` has completed, and all before it; returns what was held for it."""
        mark = self._marks.popleft()
        assert mark.number == number, f"request {number} completed before {mark.number}"
        self.done = number
        self._free_at = max(self._free_at, mark.staged)
        return mark.held

    def abandon(self) -> list[object]:
        """The queue pair is gone: nothing completes any more; returns everything that was held."""
        held = [thing for mark in self._marks for thing in mark.held] + self._held
        self._marks.clear()
        self._held = []
        self.done = self.posted
        return held
