"""Where coroutines of every fabric wait: for what arrives (``Arrivals``, ``Inbox``) and for room to send (``Turnstile``).

Pure asyncio, no I/O: the same under uvloop and in virtual time. A wake-up that reaches a cancelled waiter is passed on, so nothing
that arrived is lost; a waiter costs one future and one timer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from afore.core.clock import deadline
from afore.core.errors import DeadlineExceeded, RegionRevoked, TransportError
from afore.transport.api import Notification
from afore.transport.idle import Idle

T = TypeVar("T")
Heard = Callable[[list[Notification]], None]
"""Called with notifications, in order. What it raises ends the attending."""
Ending = Callable[[], TransportError]
"""Makes the error that waiters get, anew for each."""


class Creditor(Protocol):
    """The sender of notifications: what is taken from an inbox is given back to it as credit."""

    def give_back(self, count: int) -> None: ...


class Arrivals(Generic[T]):
    """A queue whose readers wait with a deadline. What has arrived can still be read after ``end``, then the error follows."""

    __slots__ = ("_look", "_loop", "_peer", "_waiters", "_what", "ending", "items")

    def __init__(self, peer: str, what: str, *, look: Callable[[], None] | None = None) -> None:
        """``look`` brings in at once what the event loop has not been told of yet."""
        self.items: deque[T] = deque()
        self.ending: Ending | None = None
        self._peer = peer
        self._what = what
        self._look = look
        # Known from the first wait on: asking for the running loop is a system call on Python 3.11.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: deque[asyncio.Future[bool]] = deque()

    def wake(self) -> None:
        """Wakes one reader, if there is something for it. Call once a batch, after appending to ``items``."""
        if self._waiters and (self.items or self.ending is not None):
            self._wake_one()

    def _wake_one(self) -> None:
        waiters = self._waiters
        while waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return

    def end(self, ending: Ending) -> None:
        """Nothing more arrives: readers get ``ending()`` when ``items`` is empty. The first ending stands."""
        if self.ending is None:
            self.ending = ending
            while self._waiters:
                self._wake_one()

    async def ready(self, timeout_us: float | None) -> None:
        """Returns once ``items`` is not empty, without suspending where it is not. Raises the ending or ``DeadlineExceeded``."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        ends_s = None if timeout_us is None else loop.time() + timeout_us * 1e-6
        while not self.items:
            if self.ending is not None:
                raise self.ending()
            waiter: asyncio.Future[bool] = loop.create_future()
            timer = None if ends_s is None else loop.call_at(ends_s, _expire, waiter)
            self._waiters.append(waiter)
            try:
                woken = await waiter
            except asyncio.CancelledError:
                self._forsake(waiter)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            if not woken:
                self._expired(waiter, timeout_us or 0)

    def _expired(self, waiter: asyncio.Future[bool], timeout_us: float) -> None:
        """Raises ``DeadlineExceeded`` unless there is something after all."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        if self._look is not None and not self.items and self.ending is None:
            # After a long pause of this process the timer may run before the descriptors: what is there has come in time.
            self._look()
        if not self.items and self.ending is None:
            raise DeadlineExceeded(self._peer, f"{self._what}: nothing came within {timeout_us / 1e6:g} s")

    def _forsake(self, waiter: asyncio.Future[bool]) -> None:
        """The reader of ``waiter`` was cancelled: a wake-up that had reached it goes to the next."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        else:
            self.wake()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class Inbox(Arrivals[Notification]):
    """Notifications of one region, from their delivery until ``take``; what is taken becomes credit of its sender."""

    __slots__ = ("_attended", "_idle", "_owed", "heard")

    def __init__(
        self, address: str, label: str, *, look: Callable[[], None] | None = None, idle: Idle | None = None
    ) -> None:
        """``idle`` is what a reader does before it sleeps."""
        super().__init__(address, f"notification of region {label!r}", look=look)
        self._idle = idle
        self._owed: list[Creditor] = []
        """The sender of each item."""
        self.heard: Heard | None = None
        """Who hears at once of what comes."""
        self._attended: asyncio.Future[NoReturn] | None = None

    def put(self, notification: Notification, sender: Creditor) -> None:
        """Queues, and wakes a reader; or tells who attends."""
        if self.heard is not None:
            sender.give_back(1)
            self.tell([notification])
            return
        self.items.append(notification)
        self._owed.append(sender)
        if self._waiters:
            self._wake_one()

    async def attend(self, heard: Heard) -> NoReturn:
        """Calls ``heard`` with what is queued, then with all at the moment it comes. Raises the ending, and what it raises."""
        assert self.heard is None, "one reader attends an inbox"
        if self.items:
            heard(self._settle())
        if self.ending is not None:
            raise self.ending()
        self.heard = heard
        self._attended = asyncio.get_running_loop().create_future()
        try:
            await self._attended
        finally:
            self.heard = self._attended = None
        raise AssertionError("attending ends by an error alone")

    def tell(self, notifications: list[Notification]) -> None:
        """Tells who attends (there is one); what it raises ends the attending."""
        try:
            self.heard(notifications)  # type: ignore[misc]  # not None, as the caller has seen
        except Exception as error:
            # The one who rang is not to blame: the reader ends.
            assert self._attended is not None
            self.heard = _deaf
            if not self._attended.done():
                self._attended.set_exception(error)

    def end(self, ending: Ending) -> None:
        """See ``Arrivals.end``; who attends gets the ending too."""
        super().end(ending)
        if self._attended is not None and not self._attended.done():
            self.heard = _deaf
            self._attended.set_exception(ending())

    async def take(self, timeout_us: float | None) -> list[Notification]:
        """Everything that is queued, at least one. Raises ``DeadlineExceeded`` or the ending."""
        if not self.items:
            if self._idle is not None:
                timeout_us = await self._idle.linger(self._has_come, timeout_us)
            await self.ready(timeout_us)
        return self._settle()

    def _has_come(self) -> bool:
        return bool(self.items) or self.ending is not None

    def revoke(self, region: str, owner: str, reason: str) -> None:
        """Ends the inbox at once: what is queued is dropped and its credit given back."""
        self._settle()
        self.end(lambda: RegionRevoked(owner, f"region {region!r} {reason}", "register a new one and send its key"))

    def _settle(self) -> list[Notification]:
        taken = list(self.items)
        self.items.clear()
        owed, self._owed = self._owed, []
        if len(owed) == 1:
            owed[0].give_back(1)
        else:
            for sender, count in Counter(owed).items():
                sender.give_back(count)
        return taken


def _deaf(notifications: list[Notification]) -> None:
    """The reader has ended."""


class NotifiedRegion(Protocol):
    """What ``attend`` needs of a region."""

    async def notified(self, *, timeout_us: float | None) -> list[Notification]: ...


async def attend(region: NotifiedRegion, heard: Heard) -> NoReturn:
    """Calls ``heard`` with all notifications of a region, in order, as soon as the fabric has them. Raises as ``notified`` does.

    ``heard`` must not await, so that a fabric can call it where a notification lands and need not wake a task for each.
    """
    direct = getattr(region, "attend", None)
    if direct is not None:
        await direct(heard)
    while True:
        heard(await region.notified(timeout_us=None))


class _Place:
    """One sender's place in line; ``future`` is what it sleeps on, if it does."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] | None = None


class Turnstile:
    """Senders in the order in which they came, each passing once there is room for it."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: list[_Place] = []  # a deque weighs ten times as much, and most links never have one in it
        """Who waits."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self.line)

    def __bool__(self) -> bool:
        """Whether somebody waits; then a new sender has to line up too, or it would overtake."""
        return bool(self.line)

    def poke(self) -> None:
        """There may be room, or an error to raise: lets the head of the line look again."""
        if self.line:
            future = self.line[0].future
            if future is not None and not future.done():
                future.set_result(None)

    async def enter(self, has_room: Callable[[], bool], timeout_us: float, *, peer: str, what: str, hint: str) -> None:
        """Returns when this sender is first in line and ``has_room()``; it must use the room before it suspends again.

        Raises what ``has_room`` raises, and ``DeadlineExceeded``; either way the next in line goes on.
        """
        place = _Place()
        self.line.append(place)
        try:
            async with deadline(timeout_us, peer=peer, operation=what, hint=hint):
                # Nobody asks has_room before its turn: on some fabrics asking announces "I wait, wake me".
                while self.line[0] is not place or not has_room():
                    place.future = asyncio.get_running_loop().create_future()
                    await place.future
        finally:
            self.line.remove(place)
            self.poke()
