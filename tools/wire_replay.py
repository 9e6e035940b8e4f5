"""Plays back to a fresh scheduler what its peers sent it, in virtual time: announcements, demand vectors, feedback.

Everything comes in the order in which the recorded scheduler took it, which is more than the order in which it was sent: what a
plan costs is learned from the feedback that was heard before it, and how much that was is chance. So each feedback record is
written where the recording says ``heard``, a target's vectors where it says ``asked`` (``predicted``), a message where it was
received.

What is not played: what others changed in its memory without a write (cursors and verdicts of FFN workers that map the ring);
stand-ins read every entry at once and accept it. So a run with refusals, or one that waited for a slow reader, is not repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core import control
from afore.core.clock import LoopClock, deadline
from afore.core.errors import ConfigError, TransportError
from afore.core.messages import from_wire, to_wire
from afore.core.plan import Verdict
from afore.core.topology import FFN, SCHEDULER
from afore.core.trace import Tracer
from afore.scheduler import role as scheduler_role
from afore.scheduler.role import SchedulerWorld
from afore.testing import run_virtual
from afore.tools.wire_recorded import MEMBER, Recorded, Write
from afore.transport.api import Channel, Lane, Link, RegionKey
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.recording import RecordingFabric
from afore.transport.ring import RingReader
from afore.transport.ring_layout import read_header
from afore.transport.session import HubSession, RoleContext
from afore.transport.wire_file import SUFFIX, WireFile

HUB_ADDRESS = "hub"
SETTLE_US = 2e6
"""Virtual time after the last event in which plans may still come."""
STEP_US = 60e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How the plans of the replay compare with the recorded ones."""

    recorded: int
    replayed: int
    identical: int
    first_difference: int | None
    """The first sequence whose entry differs or is missing."""
    messages: int
    writes: int
    entries: Mapping[int, bytes]
    problems: list[str]

    @property
    def same(self) -> bool:
        """Whether every recorded plan came out, byte for byte, none besides, and the recording lacks nothing."""
        return self.identical == self.recorded == self.replayed > 0 and not self.problems


def replay(recorded: Recorded, world: SchedulerWorld, output: Path, *, policy: str | None = None) -> Replayed:
    """Runs a fresh scheduler on it in virtual time, recorded into ``output`` in turn; ``recorded`` is used up.

    ``policy``: another one than the recorded. Raises ``ConfigError`` for a recording without a whole start, ``AforeError`` for what
    ends the role.
    """

    async def main() -> None:
        await _Replay(recorded, world, output, policy).run()

    run_virtual(main)
    again = WireFile(output / f"{MEMBER}{SUFFIX}")
    entries = {record[2]: record[3] for record in again.records() if record[0] == "entry"}
    different = [sequence for sequence, raw in sorted(recorded.entries.items()) if entries.get(sequence) != raw]
    return Replayed(
        recorded=len(recorded.entries),
        replayed=len(entries),
        identical=len(recorded.entries) - len(different),
        first_difference=different[0] if different else None,
        messages=recorded.messages,
        writes=recorded.writes,
        entries=entries,
        problems=recorded.problems,
    )


class _Replay:
    """One replay: the hub and the FFN workers as stand-ins, the scheduler itself."""

    def __init__(self, recorded: Recorded, world: SchedulerWorld, output: Path, policy: str | None) -> None:
        self._recorded = recorded
        self._policy = policy
        self._world = world
        self._clock = LoopClock(asyncio.get_running_loop())
        self._network = LoopbackNetwork(self._clock)
        self._fabric = RecordingFabric(
            LoopbackFabric(self._network, recorded.address), str(output), MEMBER, self._clock
        )
        self._hub = LoopbackFabric(self._network, "the hub of a replay")
        self._peers: dict[tuple[str, int], LoopbackFabric] = {}
        self._said: list[control.Message] = []
        self._spoke = asyncio.Condition()
        self._own: dict[str, RegionKey] = {}
        self._epoch = 0
        self._readers: list[asyncio.Task[None]] = []
        self._links: dict[tuple[str, int], Link] = {}
        self._heard_N: list[int] = []
        """Feedback records of each worker that have been written."""

    async def run(self) -> None:
        over = asyncio.get_running_loop().create_future()

        async def handle(channel: Channel) -> None:
            try:
                await self._play(channel)
            except Exception as error:
                if not over.done():
                    over.set_exception(error)
            else:
                if not over.done():
                    over.set_result(None)

        await self._hub.listen(HUB_ADDRESS, handle)
        role = asyncio.create_task(self._serve(), name=MEMBER)
        try:
            await asyncio.wait({role, over}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
            await role
        finally:
            for task in (role, *self._readers):
                task.cancel()
            await asyncio.gather(role, *self._readers, return_exceptions=True)
            await self._fabric.close()
            for fabric in (self._hub, *self._peers.values()):
                await fabric.close()
            if not over.done():
                over.cancel()

    async def _serve(self) -> None:
        session = await HubSession.join(self._fabric, HUB_ADDRESS, SCHEDULER, 0, timeout_us=STEP_US)
        # What the run recorded of its plans must not be overwritten.
        config = dataclasses.replace(session.config, record=None, policy=self._policy or session.config.policy)
        try:
            await scheduler_role.serve(
                RoleContext(
                    role=SCHEDULER,
                    rank=0,
                    config=config,
                    clock=self._clock,
                    fabric=self._fabric,
                    hub=session,
                    tracer=Tracer(MEMBER, self._clock, None),
                    note=self._fabric.log.add,
                ),
                self._world,
            )
        finally:
            await session.close()

    # The hub

    async def _play(self, channel: Channel) -> None:
        listening = asyncio.create_task(self._listen(channel), name="what the role says")
        try:
            events = iter(self._recorded.did)
            served_ns = await self._join(channel, events)
            start_ns = self._clock.now_ns()
            for kind, t_ns, what in events:
                # At its time; and once all has come to rest that the event before it set off.
                await self._clock.sleep_us(max(1_000, start_ns + t_ns - served_ns - self._clock.now_ns()) / 1e3)
                while self._recorded.others and self._recorded.others[0].t_ns <= t_ns:
                    await self._write(self._recorded.others.popleft())
                if kind == "asked":
                    for write in self._recorded.demand(what, t_ns):
                        await self._write(write)
                elif kind == "predicted":
                    for write in self._recorded.predicted(what, t_ns):
                        await self._write(write)
                elif kind == "heard":
                    await self._tell(what)
                elif kind == "in":
                    message = from_wire(what)
                    if isinstance(message, control.Stop):
                        break
                    await channel.send(to_wire(message), timeout_us=STEP_US)
            await self._clock.sleep_us(SETTLE_US)
            with contextlib.suppress(TransportError):
                await channel.send(to_wire(control.Stop("the replay is over")), timeout_us=STEP_US)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _join(self, channel: Channel, events: Iterator[tuple[str, int, Any]]) -> int:
        """Every message up to the one that the cluster serves, each when the role has said what it had said before; its time."""
        said_before = 0
        for kind, t_ns, what in events:
            if kind == "out":
                said_before += 1
            elif kind == "in":
                await self._until_said(said_before)
                message = self._rewritten(from_wire(what))
                await channel.send(to_wire(message), timeout_us=STEP_US)
                if isinstance(message, control.Serve):
                    return t_ns
        raise ConfigError("recording", "it ends before the cluster served", "record a run that does")

    async def _tell(self, heard_N: list[int]) -> None:
        """Writes the feedback that was heard: by worker, then in order, as the scheduler takes it."""
        self._heard_N += [0] * (len(heard_N) - len(self._heard_N))
        for worker, heard in enumerate(heard_N):
            for number in range(self._heard_N[worker] + 1, heard + 1):
                # One that is not there was overwritten or never landed: the scheduler counted it as lost.
                if (write := self._recorded.feedback[worker].get(number)) is not None:
                    await self._write(write)
            self._heard_N[worker] = heard

    async def _listen(self, channel: Channel) -> None:
        with contextlib.suppress(TransportError):
            while True:
                message = from_wire(await channel.receive(timeout_us=None))
                if isinstance(message, control.Regions):
                    self._own = {
                        key.label: RegionKey(key.fabric, key.address, key.region, key.nbytes, key.token)
                        for key in message.keys
                    }
                async with self._spoke:
                    self._said.append(message)
                    self._spoke.notify_all()

    async def _until_said(self, count: int) -> None:
        async with deadline(STEP_US, peer=MEMBER, operation=f"saying {count} messages as it had"), self._spoke:
            await self._spoke.wait_for(lambda: len(self._said) >= count)

    def _rewritten(self, message: control.Message) -> control.Message:
        """The directory with the regions of this replay: keys of a run are those of its memory."""
        if isinstance(message, control.OpenEpoch):
            self._epoch = message.epoch
            for member in message.members:
                if (member.role, member.rank) != (SCHEDULER, 0):
                    self._peers[member.role, member.rank] = LoopbackFabric(self._network, member.endpoint)
        if not isinstance(message, control.DirectoryMessage):
            return message
        members = []
        for one in message.members:
            if (one.role, one.rank) == (SCHEDULER, 0):
                keys = tuple(_labelled(label, key) for label, key in self._own.items())
            else:
                keys = tuple(self._stand_in(one, key) for key in one.keys)
            members.append(dataclasses.replace(one, keys=keys))
        return dataclasses.replace(message, members=tuple(members))

    def _stand_in(self, member: control.MemberKeys, key: control.LabelledKey) -> control.LabelledKey:
        """A region of a peer; of those that a scheduler writes to, the bells, somebody reads."""
        fabric = self._peers[member.role, member.rank]
        # Nobody looks into the others: a page stands for stores and caches.
        region = fabric.register(min(key.nbytes, 4096), label=key.label)
        if member.role == FFN and key.label == "bells":
            self._readers.append(asyncio.create_task(self._read(member.rank, fabric, region.notified)))
        return _labelled(key.label, region.key)

    # FFN workers

    async def _read(self, rank: int, fabric: LoopbackFabric, notified: Callable[..., Any]) -> None:
        """Reads each entry as it is announced, accepts it, moves on."""
        reader: RingReader | None = None
        with contextlib.suppress(TransportError):
            while True:
                await notified(timeout_us=None)
                if reader is None:
                    memory = fabric.map(self._own["ring"], writable=True).buffer
                    reader = RingReader(memory, read_header(memory).layout, rank, self._epoch)
                while reader.peek() is not None:
                    reader.store_verdict(reader.sequence, Verdict.ACCEPTED)
                    reader.advance(self._clock.now_ns())

    async def _write(self, write: Write) -> None:
        role, _, rank = write.writer.rpartition("-")
        fabric = self._peers.get((role, int(rank) if rank.isdecimal() else -1))
        if fabric is None:
            raise ConfigError("recording", f"{write.writer} wrote, and is no member of the epoch", "record a whole run")
        link = self._links.get((write.writer, write.lane))
        if link is None:
            link = await fabric.connect(self._recorded.address, Lane(write.lane), timeout_us=STEP_US)
            self._links[write.writer, write.lane] = link
        await link.write(self._own[write.label], write.offset, write.data, notify=write.notify, timeout_us=STEP_US)


def _labelled(label: str, key: RegionKey) -> control.LabelledKey:
    return control.LabelledKey(label, key.fabric, key.address, key.region, key.nbytes, key.token)
