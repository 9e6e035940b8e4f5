"""How entries leave: once the ring has room; a bell for every worker; and, while somebody traces, what they were made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from afore.core.clock import Clock
from afore.core.config import TimeOptions
from afore.core.demand import DemandVector
from afore.core.errors import PeerLost
from afore.core.plan import PlanEntry
from afore.core.record import record
from afore.core.target import Target
from afore.core.topology import FFN, member_name
from afore.core.trace import Tracer
from afore.scheduler.costs import Costs
from afore.scheduler.publisher import Publisher
from afore.transport.ring import RingWriter
from afore.transport.session import Note, no_note

ROOM_POLL_US = 200.0
"""How often a full ring is looked at again: it is full only when a reader stands still."""

Ring = Callable[[int], Awaitable[None]]
"""Rings every FFN worker's bell for a sequence."""


@record
class PlanTimes:
    """When a target was planned."""

    accepted_ns_A: Sequence[int]
    """When each attention worker's vector was found whole; 0: it has no rows."""
    began_ns: int
    """Feedback was heard, and planning began."""
    published_ns: int
    """The entry was there for every reader."""


class Outlet:
    """The ring's writing side as the service uses it. ``policy`` is a name, for records."""

    def __init__(
        self,
        *,
        clock: Clock,
        tracer: Tracer,
        times: TimeOptions,
        policy: str,
        num_workers: int,
        ring: RingWriter,
        publisher: Publisher,
        ring_bells: Ring,
        note: Note = no_note,
    ) -> None:
        self.clock = clock
        self.tracer = tracer
        self.ring = ring
        self.publisher = publisher
        self.ring_bells = ring_bells
        self._note = note
        self._times = times
        self._policy = policy
        self._num_workers = num_workers

    def note_asked(self, target: Target) -> None:
        """The target's demand is complete and planned on now: a replay hands it over at this point of what happens."""
        self._note("asked", target.word())

    def note_predicted(self, target: Target) -> None:
        """The target's prediction is taken now, likewise."""
        self._note("predicted", target.word())

    async def room(self) -> None:
        """Returns once the ring has room. Raises ``PeerLost`` for a reader that stands still past its lease."""
        while not self.publisher.room():
            lease_ns = self._times.lease_s * 1e9
            for lag in self.ring.lagging(self.clock.now_ns()):
                if lag.lease_age_ns > lease_ns:
                    raise PeerLost(
                        member_name(FFN, lag.rank),
                        f"has not read the plan ring for {lag.lease_age_ns / 1e9:.1f} s with {lag.behind} entries before it",
                        "it owns primaries, so the epoch has ended; see that worker's log",
                    )
            await self.clock.sleep_us(ROOM_POLL_US)

    async def announce(self, entry: PlanEntry) -> None:
        """Rings every worker's bell for a published entry."""
        self.trace_entry(entry)
        await self.ring_bells(entry.sequence)

    def trace_planned(self, entry: PlanEntry, demand_E: DemandVector, costs: Costs | None, times: PlanTimes) -> None:
        """What a plan was made from (with it, ``tools.plan explain`` repeats the plan), and when."""
        if self.tracer.enabled:
            self.tracer.instant(
                "planned",
                times.published_ns,
                entry.target,
                sequence=entry.sequence,
                policy=self._policy,
                workers=self._num_workers,
                demand=demand_E.tolist(),
                costs=None if costs is None else [costs.tile_us, costs.copy_us, costs.window_us],
                accepted_ns=list(times.accepted_ns_A),
                began_ns=times.began_ns,
            )

    def trace_entry(self, entry: PlanEntry) -> None:
        """What was published."""
        if self.tracer.enabled:
            self.tracer.instant(
                "entry",
                self.clock.now_ns(),
                entry.target,
                sequence=entry.sequence,
                kind=entry.kind.name,
                tokens=list(entry.tokens_A),
                demand_crc=entry.demand_crc,
                shares=[(s.expert, s.worker, s.slot, s.count, s.generation) for s in entry.shares],
                copies=[(c.layer, c.expert, c.worker, c.slot) for c in entry.copies],
                start=entry.start.name,
                cancels=entry.cancels,
            )
