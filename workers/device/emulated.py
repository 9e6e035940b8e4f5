"""A device that computes nothing and takes the time that a profile says.

Streams stamp completions as soon as their dependencies are known, which is mostly at ``flush``; only what the host awaits becomes a
timer. Closures are executed in the order of their start stamps as far as these are known, so tags and identity results are
where they should be; what happens when is told by ``executing``. Copies contend for the fleet's ports.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from afore.workers.device.base import Kernels, Work
from afore.workers.device.emulated_kernels import CountedKernels, EmulatedKernels
from afore.workers.device.events import DeviceEvent, Failure
from afore.workers.device.meetings import Meeting
from afore.workers.device.ports import EmulatedFleet, Turn
from afore.workers.device.profile import CostProfile
from afore.workers.device.streams import CollectingStream, CopyBatch, Run, Wait


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
        self.failure = None
        self._waiters = None
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


class _Coming:
    """Tells a meeting when a stream has come to it."""

    __slots__ = ("_event", "_meeting")

    def __init__(self, event: EmulatedEvent, meeting: Meeting) -> None:
        self._event = event
        self._meeting = meeting

    def unblock(self) -> None:
        self._meeting.come(self._event.completed_ns)


_Item = Run | CopyBatch | Wait[EmulatedEvent] | EmulatedEvent


class EmulatedStream(CollectingStream[EmulatedEvent]):
    """One of the two streams of an ``EmulatedDevice``."""

    def __init__(self, device: EmulatedDevice, name: str) -> None:
        super().__init__(device, name)
        self._device = device
        self._fleet = device.fleet
        self._random = random.Random(f"{device.fleet.seed}/{device.name}/{name}")
        self._items: deque[tuple[int, _Item]] = deque()
        """(when it was flushed, item)."""
        self._tail_ns = 0
        """When all that was performed so far is finished."""
        self._occupied = False
        """The next item waits for its turn, for a stamp or for ports; or the stream is just looking at it."""
        self._failure: Failure | None = None
        self._inline = device.counted and not self._fleet.jitter.compute_us
        """Closures that leave no trace need no order among devices: they run when they are stamped."""

    def flush(self) -> None:
        now_ns = self._fleet.clock.now_ns()
        self._items.extend((now_ns, item) for item in self._collected)
        self._collected.clear()
        self._schedule()
        self._fleet.drain()

    def meet(self, meeting: Meeting) -> None:
        """What is enqueued from now on starts once the streams of all parties have come to the meeting."""
        here, begun = self.record(), self._new_event()
        here.blocks(_Coming(here, meeting))

        def begin(stamp_ns: int) -> None:
            begun.stamp(stamp_ns, None)
            self._fleet.drain()

        meeting.on_begin(begin)
        self.wait(begun)

    def _new_event(self) -> EmulatedEvent:
        return EmulatedEvent(self._device, self._name)

    # Performing, driven by the fleet

    def unblock(self) -> None:
        """The stamp that the stream waited for is known."""
        self._occupied = False
        self._schedule()

    def step(self) -> None:
        """See ``Runnable.step``."""
        self._occupied = False
        if self._device.closed:
            return
        issued_ns, item = self._items.popleft()
        start_ns = max(self._tail_ns, issued_ns)
        if self._failure is None:
            if isinstance(item, Run):
                duration_ns = self._device.profile.work_ns(item.work) + self._delay_ns(self._fleet.jitter.compute_us)
                self._tail_ns = self._execute(item.work, item.do, start_ns, start_ns + duration_ns)
            else:
                assert isinstance(item, CopyBatch)
                if item.jobs:
                    self._occupied = True
                    copy = item
                    self._fleet.claim(self._turn(start_ns, item.work), lambda stamp_ns: self._copy(copy, stamp_ns))
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
        items = self._items
        while items:
            issued_ns, item = items[0]
            start_ns = issued_ns if issued_ns > self._tail_ns else self._tail_ns
            if isinstance(item, EmulatedEvent):
                items.popleft()
                self._tail_ns = start_ns
                item.stamp(start_ns, self._failure)
            elif isinstance(item, Wait):
                stamp_ns = item.event.stamp_ns
                if stamp_ns is None:
                    item.event.blocks(self)
                    return
                items.popleft()
                self._tail_ns = max(start_ns, stamp_ns)
                if self._failure is None:
                    self._failure = item.event.failure
            elif self._inline and isinstance(item, Run) and self._failure is None:
                items.popleft()
                duration_ns = self._device.profile.work_ns(item.work)
                self._tail_ns = self._execute(item.work, item.do, start_ns, start_ns + duration_ns)
            else:
                self._fleet.ready(self._turn(start_ns, item.work), self)
                return
        self._occupied = False

    def _turn(self, stamp_ns: int, work: Work) -> Turn:
        word = work.target.word() if work.target is not None else -1
        return Turn(stamp_ns, word, self._device.rank, self._device.name, self._name)

    def _execute(self, work: Work, do: Callable[[], None], start_ns: int, end_ns: int) -> int:
        if self._failure is not None:
            return end_ns
        self._device.begin(work, start_ns, end_ns)
        try:
            do()
        except Exception as error:
            self._failure = Failure(self._device.name, work, error)
        return self._device.end()

    def _delay_ns(self, most_us: float) -> int:
        return round(self._random.random() * most_us * 1e3) if most_us > 0 else 0


class EmulatedDevice:
    """One worker's device in ``fleet``. ``rank`` names its ports; ``name`` is unique in the fleet, by default ``ffn-{rank}``."""

    def __init__(
        self,
        fleet: EmulatedFleet,
        rank: int,
        profile: CostProfile,
        *,
        name: str | None = None,
        counted: bool = False,
        own_collectives: bool = False,
    ) -> None:
        """``counted``: its kernels compute nothing, not even which pairs are whose (``CountedKernels``).
        ``own_collectives``: gathering and reducing have streams beside the model stream, and do not slow it down.
        """
        self._name = f"ffn-{rank}" if name is None else name
        fleet.join(self._name)
        self.fleet = fleet
        self.rank = rank
        self.profile = profile
        self.awaited: dict[EmulatedEvent, None] = {}
        """Events that the host awaits, oldest first."""
        self.counted = counted
        """Whether its closures only count."""
        self._closed_ns: int | None = None
        self._working_on: Work | None = None
        self._start_ns = 0
        self._end_ns = 0
        self._model = EmulatedStream(self, "model")
        self._migration = EmulatedStream(self, "migration")
        self._collective = (self._model, self._model)
        if own_collectives:
            self._collective = (EmulatedStream(self, "gather"), EmulatedStream(self, "reduce"))
        self._kernels: Kernels = CountedKernels(self) if counted else EmulatedKernels(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def model_stream(self) -> EmulatedStream:
        return self._model

    @property
    def migration_stream(self) -> EmulatedStream:
        return self._migration

    @property
    def collective_streams(self) -> tuple[EmulatedStream, EmulatedStream]:
        """See ``OwnCollectives``: the model stream twice, unless the device was made with its own."""
        return self._collective

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed_ns is not None

    def now_ns(self) -> int:
        """The fleet's time, which stands still for a device that is closed."""
        return self.fleet.clock.now_ns() if self._closed_ns is None else self._closed_ns

    def close(self) -> None:
        """What was not finished by now never is. Idempotent."""
        if self.closed:
            return
        self._closed_ns = self.fleet.clock.now_ns()
        self.fleet.leave(self._name)
        for event in tuple(self.awaited):
            event.release_if_over()

    # What runs just now: for closures, kernels and tagged stores

    def executing(self) -> tuple[int, int]:
        """(start, end) of the work whose closure runs just now, in nanoseconds."""
        assert self._working_on is not None, "executing is for closures that the device runs"
        return self._start_ns, self._end_ns

    @property
    def working_on(self) -> Work:
        """The work whose closure runs just now."""
        assert self._working_on is not None, "working_on is for closures that the device runs"
        return self._working_on

    def charge_us(self, cost_us: float) -> None:
        """The work that runs just now takes so much longer."""
        self._end_ns += round(cost_us * 1e3)

    def begin(self, work: Work, start_ns: int, end_ns: int) -> None:
        """Called by a stream before a closure."""
        assert self._working_on is None, "closures of one device run one at a time"
        self._working_on, self._start_ns, self._end_ns = work, start_ns, end_ns

    def end(self) -> int:
        """Called by a stream after a closure; returns the end stamp, with what was charged."""
        self._working_on = None
        return self._end_ns
