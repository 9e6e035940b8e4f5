"""A role's side of membership: join the hub, open epochs, find peers' regions, exchange messages.

``RoleContext`` is all of the world that a role touches.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import TypeVar

from afore.core import control
from afore.core.clock import Clock, deadline
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, PeerLost, RegionRevoked, TransportError, WireError
from afore.core.messages import from_wire, to_wire
from afore.core.topology import member_name
from afore.core.trace import Span, Tracer
from afore.transport.api import Channel, Fabric, Lane, Link, Region, RegionKey
from afore.transport.nodes import Nodes

HUB = "hub"
SPAN_BATCH_US = 50_000.0
"""How often watched spans are sent."""
SPAN_BATCH = 4096
"""Most spans of one message: a tracer that was not watched for long has more than a message may hold."""
M = TypeVar("M")
Note = Callable[..., None]
"""Writes (kind, fields …) into the recording of the wire, in the order in which the role does things."""


def no_note(kind: str, *fields: object) -> None:
    """The wire is not recorded."""


class Stopped(AforeError):
    """The hub ended the cluster: the role's main coroutine returns."""


def _labelled(label: str, key: RegionKey) -> control.LabelledKey:
    return control.LabelledKey(label, key.fabric, key.address, key.region, key.nbytes, key.token)


def _key(labelled: control.LabelledKey) -> RegionKey:
    return RegionKey(labelled.fabric, labelled.address, labelled.region, labelled.nbytes, labelled.token)


@dataclass(slots=True)
class Directory:
    """Who is in this epoch, where they are, and the regions they registered for it."""

    epoch: int
    endpoints: Mapping[tuple[str, int], str]
    keys: Mapping[tuple[str, int], Mapping[str, RegionKey]]
    fabric: Fabric
    connect_timeout_us: float
    links: list[Link] = field(default_factory=list)

    def key(self, role: str, rank: int, label: str) -> RegionKey:
        """The key of a member's region. Raises ``RegionRevoked`` when the epoch has none of that label, ``PeerLost``."""
        try:
            return self.fabric.resolve(self.keys[role, rank][label])
        except KeyError:
            name = member_name(role, rank)
            raise RegionRevoked(name, f"no region {label!r} in epoch {self.epoch}") from None

    @property
    def nodes(self) -> Nodes:
        """Which members share memory."""
        return Nodes(self.fabric, self.endpoints)

    async def connect(self, role: str, rank: int, lane: Lane) -> Link:
        """A new link to a member; closed with the epoch."""
        link = await self.fabric.connect(self.endpoints[role, rank], lane, timeout_us=self.connect_timeout_us)
        self.links.append(link)
        return link

    async def close(self) -> None:
        """Closes the epoch's links."""
        while self.links:
            await self.links.pop().close()


class HubSession:
    """The control channel of one role to the hub."""

    def __init__(self, channel: Channel, role: str, welcome: control.Welcome) -> None:
        self._channel = channel
        self.role = role
        self.rank = welcome.rank
        self.config = welcome.config
        self.watch = control.Watch(plans=False, spans=False)
        """What clients watch now: the scheduler sends plans, ``forward_spans`` sends spans."""
        self.watch_changed = asyncio.Event()
        self._timeout_us = welcome.config.times.control_s * 1e6
        self._join_timeout_us = welcome.config.times.join_s * 1e6

    @classmethod
    async def join(cls, fabric: Fabric, hub_address: str, role: str, rank: int, *, timeout_us: float) -> HubSession:
        """Joins the cluster. Raises ``ConfigError`` when the hub refuses, ``PeerLost`` or ``DeadlineExceeded``."""
        async with deadline(timeout_us, peer=HUB, operation=f"joining as {role}"):
            channel = await fabric.dial(hub_address, timeout_us=timeout_us)
            join = control.Join(role=role, rank=rank, pid=os.getpid(), endpoint=fabric.address)
            await channel.send(to_wire(join), timeout_us=timeout_us)
            answer = from_wire(await channel.receive(timeout_us=timeout_us))
        if isinstance(answer, control.Refused):
            await channel.close()
            raise ConfigError("role", answer.problem, answer.remedy)
        if not isinstance(answer, control.Welcome):
            await channel.close()
            raise WireError(HUB, f"sent {type(answer).__name__} instead of a welcome")
        return cls(channel, role, answer)

    @property
    def name(self) -> str:
        """``ffn-2``."""
        return member_name(self.role, self.rank)

    async def send(self, message: control.Message) -> None:
        """Raises ``PeerLost`` when the hub is gone, ``DeadlineExceeded``."""
        await self._channel.send(to_wire(message), timeout_us=self._timeout_us)

    async def receive(self) -> control.Message:
        """The next message, however long it takes (the hub's end ends the wait). Raises ``Stopped``, ``PeerLost``."""
        while True:
            message = from_wire(await self._channel.receive(timeout_us=None), peer=HUB)
            if isinstance(message, control.Stop):
                raise Stopped(message.reason)
            if not isinstance(message, control.Watch):
                return message
            self.watch = message
            self.watch_changed.set()

    async def stop_follows(self, *, timeout_us: float) -> bool:
        """Whether the hub ends the cluster within ``timeout_us``: asked by a role that has lost a peer.

        In an orderly end roles hear of it one after another, and whose peer was faster sees it gone first. To be called once nobody
        else receives; what comes before the end is dropped.
        """
        try:
            async with asyncio.timeout(timeout_us * 1e-6):
                while True:
                    await self.receive()
        except Stopped:
            return True
        except (TimeoutError, TransportError):
            return False

    async def forward_spans(self, tracer: Tracer, clock: Clock) -> None:
        """Sends the tracer's spans to the hub while somebody watches; runs beside the role until cancelled.

        A listener that the tracer has already goes on listening.
        """
        batch: list[str] = []
        own = tracer.listener

        def keep(process: str, spans: list[Span]) -> None:
            if own is not None:
                own(process, spans)
            batch.extend(
                json.dumps(
                    {
                        "kind": span.kind,
                        "name": span.name,
                        "target": None if span.target is None else astuple(span.target),
                        "start_ns": span.start_ns,
                        "end_ns": span.end_ns,
                        "args": span.args,
                    }
                )
                for span in spans
            )

        while True:
            await self.watch_changed.wait()
            self.watch_changed.clear()
            tracer.listener = keep if self.watch.spans else own
            while self.watch.spans:
                await clock.sleep_us(SPAN_BATCH_US)
                # Also what a writer of the file has flushed meanwhile, which may be during a send.
                while tracer.flush(SPAN_BATCH) or batch:
                    sent, batch[:] = tuple(batch), []
                    await self.send(control.SpansSeen(self.name, sent))

    async def open_epoch(
        self, fabric: Fabric, register: Callable[[int, tuple[control.Member, ...]], Mapping[str, Region]]
    ) -> Directory:
        """Waits for the next epoch, registers this role's regions through ``register``, returns everybody's.

        The caller connects its links next, then calls ``linked``.
        """
        opened = await self._expect(control.OpenEpoch)
        regions = register(opened.epoch, opened.members)
        keys = tuple(_labelled(label, region.key) for label, region in regions.items())
        await self.send(control.Regions(opened.epoch, keys))
        directory = await self._expect(control.DirectoryMessage)
        return Directory(
            epoch=opened.epoch,
            endpoints={(m.role, m.rank): m.endpoint for m in opened.members},
            keys={(m.role, m.rank): {k.label: _key(k) for k in m.keys} for m in directory.members},
            fabric=fabric,
            connect_timeout_us=self._timeout_us,
        )

    async def linked(self, epoch: int) -> None:
        """Says that this role's links stand; returns when everybody's do."""
        await self.send(control.Linked(epoch))
        await self._expect(control.Serve)

    async def close(self) -> None:
        await self._channel.close()

    async def _expect(self, kind: type[M]) -> M:
        async with deadline(
            self._join_timeout_us,
            peer=HUB,
            operation=f"{self.name} waiting for {kind.__name__}",
            hint="another role did not come up; see its log",
        ):
            message = await self.receive()
        if not isinstance(message, kind):
            raise WireError(HUB, f"sent {type(message).__name__} where {kind.__name__} was due")
        return message


@dataclass(slots=True, kw_only=True)
class RoleContext:
    """The world of one role: it touches nothing else."""

    role: str
    rank: int
    config: RunConfig
    clock: Clock
    fabric: Fabric
    hub: HubSession
    tracer: Tracer
    note: Note = no_note

    @property
    def name(self) -> str:
        """``attention-0``."""
        return member_name(self.role, self.rank)


__all__ = ["Directory", "HubSession", "Note", "PeerLost", "RoleContext", "Stopped", "no_note"]
