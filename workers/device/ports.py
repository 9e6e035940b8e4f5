"""The fleet of emulated devices: one order over all their work, and the ports that copies contend for.

A worker has one source port and one destination port; a copy occupies the source port of its primary's owner and the destination
port of its receiver for its whole duration. Claims are granted by (stamp, target, worker), whichever coroutine ran first. A claim
of instant t is therefore decided at t + 1 ns, when no claim of that instant can come any more; its stamps still begin at t.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from afore.core.clock import Clock
from afore.core.virtual_loop import VirtualLoop
from afore.workers.device.meetings import Meetings


class Runnable(Protocol):
    """A stream, as the fleet sees it."""

    def step(self) -> None:
        """Performs the stream's next item, whose start stamp has been given to the fleet."""
        ...


class Turn(NamedTuple):
    """Where something stands in the fleet's order; no two are equal, so nothing depends on hashes or addresses."""

    stamp_ns: int
    target_word: int
    """-1 for work without a target."""
    rank: int
    device: str
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random delays on top of the profile, uniform from 0: what stress tests shake with."""

    compute_us: float = 0.0
    """Most that a piece of work takes longer."""
    copy_us: float = 0.0
    """Most that a copy takes longer."""


class EmulatedFleet:
    """What the emulated devices of one world share.

    ``clock`` and ``loop`` are those of the world, a virtual-time loop as a rule. ``seed`` and ``jitter`` delay every device's
    work by its own random numbers, which depend on the seed and the device's name alone.
    """

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, *, seed: int = 0, jitter: Jitter | None = None
    ) -> None:
        self.clock = clock
        self.loop = loop
        self.seed = seed
        self.jitter = jitter if jitter is not None else Jitter()
        self.meetings = Meetings()
        """Where the streams of several workers meet for a collective."""
        self._names: set[str] = set()
        self._ready: list[tuple[Turn, Runnable]] = []
        self._claims: list[tuple[Turn, Callable[[int], None]]] = []
        self._deciding_ns: set[int] = set()
        """Instants for which a timer is set."""
        self._source_free_ns: defaultdict[int, int] = defaultdict(int)
        self._destination_free_ns: defaultdict[int, int] = defaultdict(int)
        self._draining = False

    def join(self, name: str) -> None:
        """A device enters the fleet. Raises ``ValueError`` when its name is taken: orders and random numbers go by names."""
        if name in self._names:
            raise ValueError(f"the fleet already has a device {name!r}; give each its own name")
        self._names.add(name)

    def leave(self, name: str) -> None:
        """A device is closed; its name may be used again."""
        self._names.discard(name)

    def ready(self, turn: Turn, stream: Runnable) -> None:
        """The stream's next item can be stamped; it is performed in order by ``drain``."""
        heapq.heappush(self._ready, (turn, stream))

    def drain(self) -> None:
        """Performs what is ready, by start stamp, until nothing is."""
        if (
            self._draining or not self._ready
        ):  # draining: called by a closure that enqueues, the loop below goes on with it
            return
        self._draining = True
        try:
            while self._ready:
                heapq.heappop(self._ready)[1].step()
        finally:
            self._draining = False

    def claim(self, turn: Turn, granted: Callable[[int], None]) -> None:
        """``granted(stamp)`` is called in the order of all claims; it then takes ports by ``occupy``."""
        heapq.heappush(self._claims, (turn, granted))
        self._decide_at(turn.stamp_ns + 1)

    def occupy(self, source: int, destination: int, from_ns: int, duration_ns: int) -> tuple[int, int]:
        """Takes both ports of a copy as soon as both are free after ``from_ns``; returns the interval."""
        start_ns = max(from_ns, self._source_free_ns[source], self._destination_free_ns[destination])
        end_ns = start_ns + duration_ns
        self._source_free_ns[source] = self._destination_free_ns[destination] = end_ns
        return start_ns, end_ns

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """A timer of the loop, in the clock's nanoseconds; in virtual time it is exact."""
        if isinstance(self.loop, VirtualLoop):
            self.loop.alarm_ns(when_ns, callback)
        else:
            self.loop.call_later((when_ns - self.clock.now_ns()) / 1e9, callback)

    def _decide_at(self, when_ns: int) -> None:
        if when_ns not in self._deciding_ns:
            self._deciding_ns.add(when_ns)
            self.call_at(when_ns, self._decide)

    def _decide(self) -> None:
        now_ns = self.clock.now_ns()
        self._deciding_ns = {when_ns for when_ns in self._deciding_ns if when_ns > now_ns}
        while self._claims and self._claims[0][0].stamp_ns < now_ns:
            turn, granted = heapq.heappop(self._claims)
            granted(turn.stamp_ns)
            self.drain()
        if self._claims:
            self._decide_at(self._claims[0][0].stamp_ns + 1)
