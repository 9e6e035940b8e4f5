"""Streams and events of emulated devices: what is enqueued gets its stamps as soon as what it depends on has its own.

Mostly that is at ``flush``. Records, waits and meetings take no time and are passed at once; what takes time is given to the
fleet, which performs it in the order of start stamps, unless its closures leave no trace: then it runs where it is stamped.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from afore.workers.device.base import Work
from afore.workers.device.events import DeviceEvent, Failure
from afore.workers.device.meetings import Meeting
from afore.workers.device.ports import Turn
from afore.workers.device.streams import CollectingStream, CopyBatch, Run, Wait

if TYPE_CHECKING:
    from afore.workers.device.emulated import EmulatedDevice


class Blocked(Protocol):
    """Something that needs an event's stamp."""

    def unblock(self) -> None:
        """The stamp is known."""
        ...


class EmulatedEvent(DeviceEvent):
    """A point in a stream, whose time is known before it comes."""

    __slots__ = ("_blocked", "_device", "stamp_ns")

    def __init__(self, device: EmulatedDevice, stream_name: str) -> None:
        # As the base's constructor; there are ten of these for every target of every worker.
        self.owner = self._device = device
        self.stream_name = stream_name
        self.failure = self._waiters = None
        self.stamp_ns: int | None = None
        self._blocked: list[Blocked] | None = None

    @property
    def done(self) -> bool:
        return self.stamp_ns is not None and self.stamp_ns <= self._device.now_ns()

    @property
    def completed_ns(self) -> int:
        assert self.stamp_ns is not None, "completed_ns is known once the event is done"
        return self.stamp_ns

    def stamp(self, stamp_ns: int, failure: Failure | None) -> None:
        """The stream reaches this point at ``stamp_ns``, now or later."""
        self.failure = failure
        self.stamp_ns = stamp_ns
        if self._blocked is not None:
            blocked, self._blocked = self._blocked, None
            for stream in blocked:
                stream.unblock()
        if self._waiters:
            self._device.fleet.call_at(stamp_ns, self.release_if_over)

    def blocks(self, blocked: Blocked) -> None:
        """``blocked`` cannot go on before the stamp is known."""
        if self._blocked is None:
            self._blocked = []
        self._blocked.append(blocked)

    async def wait(self, *, timeout_us: float) -> None:
        """See ``DeviceEvent.wait``; one whose time is known, and soon enough, needs no timer for its deadline."""
        device, stamp_ns = self._device, self.stamp_ns
        if stamp_ns is None or device.closed or not stamp_ns - device.now_ns() < timeout_us * 1e3:
            await super().wait(timeout_us=timeout_us)
            return
        if stamp_ns > device.now_ns():
            future: asyncio.Future[None] = device.fleet.loop.create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(future)
            self._arm()
            try:
                await future
            finally:
                if self._waiters and future in self._waiters:
                    self._waiters.remove(future)
        self._settle()

    def _arm(self) -> None:
        self._device.awaited[self] = None
        if self.stamp_ns is not None:
            self._device.fleet.call_at(self.stamp_ns, self.release_if_over)

    def release_if_over(self) -> None:
        """Wakes those who await it; a timer of a real loop may be early, and is set again."""
        if self.over:
            self._device.awaited.pop(self, None)
            self._release()
        elif self._waiters and self.stamp_ns is not None:
            self._device.fleet.call_at(self.stamp_ns, self.release_if_over)


class _Meet:
    """In a stream: what follows starts when the meeting begins, to which the stream comes here."""

    __slots__ = ("begins_ns", "come", "meeting", "stream")

    def __init__(self, stream: EmulatedStream, meeting: Meeting) -> None:
        self.stream = stream
        self.meeting = meeting
        self.come = False
        """The stream is here."""
        self.begins_ns: int | None = None
        meeting.on_begin(self.begin)

    def begin(self, begins_ns: int) -> None:
        """All have come."""
        self.begins_ns = begins_ns
        self.stream.met(waits=self.come)


class EmulatedStream(CollectingStream[EmulatedEvent]):
    """One of the streams of an ``EmulatedDevice``."""

    def __init__(self, device: EmulatedDevice, name: str) -> None:
        super().__init__(device, name)
        self._device = device
        self._fleet = device.fleet
        self._random = random.Random(f"{device.fleet.seed}/{device.name}/{name}")
        self._left: deque[Any] = deque()
        """What is left to do: the items of each ``flush`` (``Run``, ``CopyBatch``, ``Wait``, ``_Meet``, events) behind its time."""
        self._tail_ns = 0
        """When all that was performed so far is finished, or the last flush was made."""
        self._occupied = False
        """The next item waits for its turn, for a stamp or for ports; or the stream is just looking at it."""
        self._failure: Failure | None = None
        self._inline = device.counted and not self._fleet.jitter.compute_us
        """Closures that leave no trace need no order among devices: they run when they are stamped."""

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent(self._device, self._name)
        self._add(event)
        return event

    def flush(self) -> None:
        self._left.append(self._fleet.clock.now_ns())
        self._left.extend(self._collected)
        self._collected.clear()
        self._schedule()
        self._fleet.drain()

    def meet(self, meeting: Meeting) -> None:
        """What is enqueued from now on starts once the streams of all parties have come to the meeting."""
        self._add(_Meet(self, meeting))

    def _new_event(self) -> EmulatedEvent:
        return EmulatedEvent(self._device, self._name)

    # Performing, driven by the fleet

    def unblock(self) -> None:
        """The stamp that the stream waited for is known."""
        self._occupied = False
        self._schedule()

    def met(self, *, waits: bool) -> None:
        """A meeting that the stream takes part in begins; it ``waits`` for it."""
        if waits:
            self._occupied = False
            self._schedule()
        self._fleet.drain()

    def step(self) -> None:
        """See ``Runnable.step``."""
        self._occupied = False
        if self._device.closed:
            return
        item = self._left.popleft()
        if self._failure is None:
            if isinstance(item, Run):
                duration_ns = self._device.profile.work_ns(item.work) + self._delay_ns(self._fleet.jitter.compute_us)
                self._tail_ns = self._execute(item.work, item.do, self._tail_ns, self._tail_ns + duration_ns)
            else:
                assert isinstance(item, CopyBatch)
                if item.jobs:
                    self._occupied = True
                    copy = item
                    self._fleet.claim(self._turn(self._tail_ns, item.work), lambda stamp_ns: self._copy(copy, stamp_ns))
        self._schedule()

    def _copy(self, item: CopyBatch, stamp_ns: int) -> None:
        if self._device.closed:
            return
        for job in item.jobs:
            duration_ns = self._device.profile.copy_ns(job.nbytes) + self._delay_ns(self._fleet.jitter.copy_us)
            start_ns, end_ns = self._fleet.occupy(job.source, job.destination, stamp_ns, duration_ns)
            self._tail_ns = max(self._tail_ns, self._execute(item.work, job.run, start_ns, end_ns))
        self._occupied = False
        self._schedule()

    def _schedule(self) -> None:
        """Stamps the records and waits that come next, which take no time; what does take time is given to the fleet, in order."""
        if self._occupied or self._device.closed:
            return
        self._occupied = True
        left = self._left
        while left:
            item = left[0]
            # By exact type: a hundred of these are looked at for every target.
            kind = type(item)
            if kind is EmulatedEvent:
                left.popleft()
                if item._blocked is None and item._waiters is None:
                    item.failure, item.stamp_ns = self._failure, self._tail_ns
                else:
                    item.stamp(self._tail_ns, self._failure)
            elif kind is Run and self._inline and self._failure is None:
                left.popleft()
                start_ns = self._tail_ns
                duration_ns = self._device.profile.work_ns(item.work)
                self._tail_ns = self._execute(item.work, item.do, start_ns, start_ns + duration_ns)
            elif kind is Wait:
                stamp_ns = item.event.stamp_ns
                if stamp_ns is None:
                    item.event.blocks(self)
                    return
                left.popleft()
                if stamp_ns > self._tail_ns:
                    self._tail_ns = stamp_ns
                if self._failure is None:
                    self._failure = item.event.failure
            elif kind is int:
                left.popleft()
                if item > self._tail_ns:
                    self._tail_ns = item
            elif kind is _Meet:
                if not item.come:
                    item.meeting.come(self._tail_ns)
                    item.come = True
                if item.begins_ns is None:
                    return
                left.popleft()
                if item.begins_ns > self._tail_ns:
                    self._tail_ns = item.begins_ns
            else:
                self._fleet.ready(self._turn(self._tail_ns, item.work), self)
                return
        self._occupied = False

    def _turn(self, stamp_ns: int, work: Work) -> Turn:
        word = work.target.word() if work.target is not None else -1
        return Turn(stamp_ns, word, self._device.rank, self._device.name, self._name)

    def _execute(self, work: Work, do: Callable[[], None], start_ns: int, end_ns: int) -> int:
        if self._failure is not None:
            return end_ns
        device = self._device
        assert device.current is None, "closures of one device run one at a time"
        device.current, device.start_ns, device.end_ns = work, start_ns, end_ns
        try:
            do()
        except Exception as error:
            self._failure = Failure(device.name, work, error)
        device.current = None
        return device.end_ns if device.ending is None else device.ending(work, start_ns, device.end_ns)

    def _delay_ns(self, most_us: float) -> int:
        return round(self._random.random() * most_us * 1e3) if most_us > 0 else 0
