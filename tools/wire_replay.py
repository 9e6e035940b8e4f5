"""Plays back to a fresh scheduler what its peers sent it, in virtual time: announcements, demand vectors, feedback.

What is played: every message that the hub sent to it, in order and at its time, never before the role has answered as it had
when it was recorded; every one-sided write into its regions, at the time at which its writer made it. What is not: what others
changed in its memory without a write (cursors and verdicts of FFN workers that map the ring); stand-ins read every entry at once
and accept it. So a run with refusals, or one that waited for a slow reader, is not repeated; nor is one on several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afore.core import control
from afore.core.clock import LoopClock, deadline
from afore.core.errors import AforeError, ConfigError, TransportError
from afore.core.messages import from_wire, to_wire
from afore.core.plan import Verdict
from afore.core.topology import FFN, SCHEDULER, member_name
from afore.core.trace import Tracer
from afore.scheduler import role as scheduler_role
from afore.scheduler.role import SchedulerWorld
from afore.testing import run_virtual
from afore.transport.api import Channel, Lane, Link, RegionKey
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.recording import RecordingFabric
from afore.transport.ring import RingReader
from afore.transport.ring_layout import read_header
from afore.transport.routed_names import is_routed
from afore.transport.session import HubSession, RoleContext
from afore.transport.wire_file import SUFFIX, WireFile

MEMBER = member_name(SCHEDULER, 0)
HUB_ADDRESS = "hub"
SETTLE_US = 2e6
"""Virtual time after the last event in which plans may still come."""
STEP_US = 60e6


@dataclass(slots=True)
class Recorded:
    """What the files of a run say about its scheduler."""

    address: str
    messages: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    """(t_ns, "in" or "out", message) of its channel to the hub, in order."""
    writes: list[tuple[int, str, int, str, int, bytes, int | None]] = field(default_factory=list)
    """(t_ns, writer, lane, label, offset, data, notify) into its regions, by time."""
    entries: dict[int, bytes] = field(default_factory=dict)
    """By sequence."""
    problems: list[str] = field(default_factory=list)


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
        """Whether every recorded plan came out, byte for byte."""
        return self.identical == self.recorded


def read_directory(directory: Path) -> Recorded:
    """Gathers what went to the scheduler. Raises ``ConfigError`` where its own file is missing or cannot be used."""
    paths = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    by_member = {file.member: file for file in map(WireFile, paths)}
    if MEMBER not in by_member:
        names = ", ".join(by_member) or "none"
        raise ConfigError(
            str(directory), f"has no recording of {MEMBER} (of: {names})", "record with --record-wire DIR"
        )
    own = by_member[MEMBER]
    found = Recorded(own.address)
    labels: dict[tuple[str, int], str] = {}
    for kind, t_ns, *rest in own.records():
        if kind == "region":
            label, keys = rest
            labels.update({(address, region): label for _, address, region, _, _ in keys})
        elif kind == "message":
            way, _, _, message = rest
            found.messages.append((t_ns, way, message))
        elif kind == "entry":
            found.entries[rest[0]] = rest[1]
        elif kind == "end" and rest[1]:
            found.problems.append(f"{own.path.name}: {rest[1]} records were dropped")
    for file in by_member.values():
        for kind, t_ns, *rest in file.records():
            if kind == "write":
                _, lane, address, region, offset, data, _, notify = rest
                label = labels.get((address, region))
                if label is not None and data is not None:
                    found.writes.append((t_ns, file.member, lane, label, offset, data, notify))
        if file.torn:
            found.problems.append(f"{file.path.name}: ends within a record; what its role wrote last is missing")
    found.writes.sort(key=lambda write: write[0])
    if is_routed(own.address):
        raise ConfigError(str(directory), "was recorded on several nodes", "replay takes a cluster of one node")
    return found


def replay(recorded: Recorded, world: SchedulerWorld, output: Path, *, latency_us: float = 0.0) -> Replayed:
    """Runs a fresh scheduler on it in virtual time, recorded into ``output`` in turn.

    ``latency_us``: how long after they were made writes arrive. Raises ``ConfigError`` for a recording without a whole start,
    ``AforeError`` for what ends the role.
    """

    async def main() -> None:
        await _Replay(recorded, world, output, latency_us).run()

    run_virtual(main)
    again = WireFile(output / f"{MEMBER}{SUFFIX}")
    entries = {record[2]: record[3] for record in again.records() if record[0] == "entry"}
    different = [sequence for sequence, raw in sorted(recorded.entries.items()) if entries.get(sequence) != raw]
    return Replayed(
        recorded=len(recorded.entries),
        replayed=len(entries),
        identical=len(recorded.entries) - len(different),
        first_difference=different[0] if different else None,
        messages=len(recorded.messages),
        writes=len(recorded.writes),
        entries=entries,
        problems=recorded.problems,
    )


class _Replay:
    """One replay: the hub and the FFN workers as stand-ins, the scheduler itself."""

    def __init__(self, recorded: Recorded, world: SchedulerWorld, output: Path, latency_us: float) -> None:
        self._recorded = recorded
        self._world = world
        self._latency_ns = int(latency_us * 1e3)
        self._clock = LoopClock(asyncio.get_running_loop())
        self._network = LoopbackNetwork(self._clock)
        self._fabric = RecordingFabric(
            LoopbackFabric(self._network, recorded.address), str(output), MEMBER, self._clock
        )
        self._hub = LoopbackFabric(self._network, "the hub of a replay")
        self._peers: dict[tuple[str, int], LoopbackFabric] = {}
        self._said: list[control.Message] = []
        self._heard = asyncio.Condition()
        self._own: dict[str, RegionKey] = {}
        self._epoch = 0
        self._readers: list[asyncio.Task[None]] = []
        self._links: dict[tuple[str, int], Link] = {}

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
        try:
            await scheduler_role.serve(
                RoleContext(
                    role=SCHEDULER,
                    rank=0,
                    config=session.config,
                    clock=self._clock,
                    fabric=self._fabric,
                    hub=session,
                    tracer=Tracer(MEMBER, self._clock, None),
                ),
                self._world,
            )
        finally:
            await session.close()

    # The hub

    async def _play(self, channel: Channel) -> None:
        listening = asyncio.create_task(self._listen(channel), name="what the role says")
        said_before = 0
        start_ns = self._clock.now_ns()
        base_ns: int | None = None
        try:
            for event in self._events():
                if event[0] == "out":
                    said_before += 1
                    continue
                if base_ns is not None:
                    due_ns = start_ns + event[1] - base_ns
                    await self._clock.sleep_us(max(0, due_ns - self._clock.now_ns()) / 1e3)
                if event[0] == "write":
                    await self._write(*event[2])
                    continue
                message = from_wire(event[2])
                if base_ns is None:
                    await self._until_said(said_before)
                    message = self._rewritten(message)
                if isinstance(message, control.Stop):
                    break
                await channel.send(to_wire(message), timeout_us=STEP_US)
                if isinstance(message, control.Serve):
                    base_ns, start_ns = event[1], self._clock.now_ns()
            if base_ns is None:
                raise ConfigError("recording", "it ends before the cluster served", "record a run that does")
            await self._clock.sleep_us(SETTLE_US)
            with contextlib.suppress(TransportError):
                await channel.send(to_wire(control.Stop("the replay is over")), timeout_us=STEP_US)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    def _events(self) -> Iterator[tuple[str, int, Any]]:
        """Messages in their order; writes between them by time, once the cluster serves."""
        late_ns = self._latency_ns
        writes = iter([("write", write[0] + late_ns, write[1:]) for write in self._recorded.writes])
        write = next(writes, None)
        serving = False
        for t_ns, way, message in self._recorded.messages:
            while serving and write is not None and write[1] <= t_ns:
                yield write
                write = next(writes, None)
            yield way, t_ns, message
            serving = serving or (way == "in" and message.get("@") == "Serve")
            if way == "in" and message.get("@") == "Stop":
                return
        while write is not None:
            yield write
            write = next(writes, None)

    async def _listen(self, channel: Channel) -> None:
        with contextlib.suppress(TransportError):
            while True:
                message = from_wire(await channel.receive(timeout_us=None))
                if isinstance(message, control.Regions):
                    self._own = {
                        key.label: RegionKey(key.fabric, key.address, key.region, key.nbytes, key.token)
                        for key in message.keys
                    }
                async with self._heard:
                    self._said.append(message)
                    self._heard.notify_all()

    async def _until_said(self, count: int) -> None:
        async with deadline(STEP_US, peer=MEMBER, operation=f"saying {count} messages as it had"), self._heard:
            await self._heard.wait_for(lambda: len(self._said) >= count)

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

    async def _write(self, writer: str, lane: int, label: str, offset: int, data: bytes, notify: int | None) -> None:
        role, _, rank = writer.rpartition("-")
        fabric = self._peers.get((role, int(rank) if rank.isdecimal() else -1))
        if fabric is None:
            raise ConfigError("recording", f"{writer} wrote, and is no member of the epoch", "record a whole run")
        link = self._links.get((writer, lane))
        if link is None:
            link = self._links[writer, lane] = await fabric.connect(
                self._recorded.address, Lane(lane), timeout_us=STEP_US
            )
        await link.write(self._own[label], offset, data, notify=notify, timeout_us=STEP_US)


def _labelled(label: str, key: RegionKey) -> control.LabelledKey:
    return control.LabelledKey(label, key.fabric, key.address, key.region, key.nbytes, key.token)


__all__ = ["AforeError", "Recorded", "Replayed", "read_directory", "replay"]
