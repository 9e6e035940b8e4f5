"""Credit for notifications, as two pure state machines: what a writer may still send, and when its owner gives credit back.

A notification consumes a posted receive, and a queue pair without receives breaks, so a writer never has more than ``credits``
of them untaken. The owner counts what was taken and says the count once half of the credits are owed, or at once to a writer
that announced that it waits. An announcement stands until a message *answers* it (one that merely crossed it gives credit, no
more), so one receive beyond the credits takes it, and at most ``MESSAGES_IN_FLIGHT`` messages of the owner are under way.
"""

from __future__ import annotations

from afore.core.errors import WireError

ANNOUNCEMENTS_IN_FLIGHT = 1
MESSAGES_IN_FLIGHT = 3
"""Two messages of half the credits each, and one answer."""
_MASK = (1 << 31) - 1


class WriterCredit:
    """The writer's side."""

    __slots__ = ("_announced", "_credits", "_taken", "free")

    def __init__(self, credits: int) -> None:
        self._credits = credits
        self._taken = 0
        self._announced = False
        self.free = credits
        """Notifications that may be sent now."""

    def spend(self) -> None:
        """One notification is sent. Only where ``free`` is not 0."""
        assert self.free, "notification without credit"
        self.free -= 1

    def announce(self) -> bool:
        """The writer waits; true where that has to be said, which is once until the owner answers."""
        if self._announced or self.free:
            return False
        self._announced = True
        return True

    def given(self, immediate: int, peer: str) -> None:
        """The owner's message. Raises ``WireError`` for a count that cannot be."""
        fresh = ((immediate >> 1) - self._taken) & _MASK
        untaken = self._credits - self.free
        if not 0 < fresh <= untaken:
            raise WireError(peer, f"it took {fresh} notifications of {untaken}")
        self._taken += fresh
        self.free += fresh
        if immediate & 1:
            self._announced = False


class OwnerCredit:
    """The owner's side."""

    __slots__ = ("_half", "_said", "_taken", "_waits")

    def __init__(self, credits: int) -> None:
        self._half = (credits + 1) // 2
        self._taken = 0
        self._said = 0
        self._waits = False

    def took(self, count: int) -> bool:
        """``count`` notifications were taken; true where ``say`` is due."""
        self._taken += count
        return self._due()

    def announced(self) -> bool:
        """The writer waits; true where ``say`` is due."""
        self._waits = True
        return self._due()

    def _due(self) -> bool:
        owed = self._taken - self._said
        return owed >= self._half or (self._waits and owed > 0)

    def say(self) -> int:
        """What to send: the count so far, modulo 2^31, and in the lowest bit whether this answers an announcement."""
        answers, self._waits = self._waits, False
        self._said = self._taken
        return (self._taken & _MASK) << 1 | answers
