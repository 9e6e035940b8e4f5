"""The hub: every role and client holds one channel to it; it keeps the membership and carries the engine's messages.

It lives in the ``door`` process. Each peer has an outbox and a writer of its own, so a peer that reads slowly delays nobody
else; one whose outbox overflows is dropped by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, PeerLost, PeerUnreachable, TransportError, WireError
from afore.core.messages import from_wire, to_wire
from afore.core.topology import member_name
from afore.serving.membership import MemberId, Membership, Send
from afore.transport.api import Channel, Fabric

log = logging.getLogger(__name__)

OUTBOX_MESSAGES = 65_536
"""A peer that has not read this many messages is not reading at all."""


TOKENS_TOGETHER = 4096
"""Tokens that one message carries at most: with their texts, far from the limit of a message."""


class Outbox:
    """Messages to one peer, written in order by one task."""

    def __init__(self, channel: Channel, timeout_us: float) -> None:
        self._channel = channel
        self._timeout_us = timeout_us
        self._queue: deque[control.Message] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self.overflowed = False

    def post(self, message: control.Message) -> None:
        """Queues a message; a full outbox drops the peer."""
        if len(self._queue) >= OUTBOX_MESSAGES:
            self.overflowed = True
            self._queue.clear()
        if not self.overflowed:
            self._queue.append(message)
        self._wake.set()

    def finish(self) -> None:
        """The writer ends once the queue is empty."""
        self._closing = True
        self._wake.set()

    def _next(self) -> control.Message:
        """The oldest message; tokens that wait behind one another go together."""
        queue = self._queue
        message = queue.popleft()
        if not isinstance(message, control.TokenOut) or not message.plain:
            return message
        tokens = [message]
        while queue and len(tokens) < TOKENS_TOGETHER and isinstance(queue[0], control.TokenOut) and queue[0].plain:
            tokens.append(queue.popleft())  # type: ignore[arg-type]  # just looked at
        return message if len(tokens) == 1 else control.TokensOut.of(tokens)

    async def write_all(self) -> None:
        """Writes until ``finish``. Raises ``TransportError`` when the peer is gone or does not read."""
        while True:
            while self._queue:
                message = self._next()
                await self._channel.send(to_wire(message), timeout_us=self._timeout_us)
            if self.overflowed:
                raise TransportError(self._channel.peer, "does not read its messages", "it was dropped; connect again")
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()


class Hub:
    """Accepts roles and clients, runs the membership, routes messages between them and the engine."""

    def __init__(self, fabric: Fabric, config: RunConfig, *, replaceable: bool = False) -> None:
        """``replaceable``: a role that is lost before all have loaded only frees its rank."""
        self._fabric = fabric
        self._config = config
        self.membership = Membership(config.topology, replaceable=replaceable)
        self.on_member: Callable[[str, int, control.Message], None] = _nobody
        """The engine's handler of messages from roles."""
        self.on_client: Callable[[int, control.Message], None] = _nobody
        """The engine's handler of messages from clients."""
        self.on_client_gone: Callable[[int], None] = _nobody
        self.on_lost: Callable[[str, str], None] = _nobody
        """(role-rank, reason): the epoch has ended."""
        self._members: dict[MemberId, Outbox] = {}
        self._clients: dict[int, Outbox] = {}
        self._local: dict[int, Callable[[control.Message], None]] = {}
        self.url = ""
        """Where the door listens for HTTP; empty where it does not."""
        self._watching: dict[int, control.Watch] = {}
        self._tickets: dict[int, tuple[int, int]] = {}
        self._next_client = 0
        self._next_ticket = 0
        self.stopping = asyncio.Event()
        """Set once the cluster is told to end."""
        self._empty = asyncio.Event()
        self._empty.set()

    # Sending

    def to_member(self, role: str, rank: int, message: control.Message) -> None:
        """Posts to a role; a role that is gone is already reported by ``on_lost``."""
        outbox = self._members.get((role, rank))
        if outbox is not None:
            outbox.post(message)

    def to_client(self, client: int, message: control.Message) -> None:
        """Posts to a client; a client that is gone misses nothing it could read."""
        local = self._local.get(client)
        if local is not None:
            if isinstance(message, control.TokensOut):
                for token in message.each():
                    local(token)
            else:
                local(message)
            return
        outbox = self._clients.get(client)
        if outbox is not None:
            outbox.post(message)

    # Clients of this process

    def attach(self, take: Callable[[control.Message], None]) -> int:
        """A client without a channel: ``take`` is called with each message to it. Returns its number, for ``from_local``."""
        client = self._next_client
        self._next_client += 1
        self._local[client] = take
        return client

    def detach(self, client: int) -> None:
        """The client is gone with all of its requests."""
        if self._local.pop(client, None) is not None:
            self.on_client_gone(client)

    def from_local(self, client: int, message: control.Message) -> None:
        """A message of a client of this process; its answers may come before this returns."""
        self._from_client(client, message)

    # Life

    async def run(self, address: str) -> None:
        """Listens at ``address`` until a client or ``stop`` ends the cluster; then sees everybody out."""
        await self._fabric.listen(address, self._serve_channel)
        try:
            await self.stopping.wait()
        finally:
            # Also when the door's process is signalled: nobody else can tell the roles.
            self.stop("the door ended")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.times.shutdown_s):
                    await self._empty.wait()

    def stop(self, reason: str) -> None:
        """Tells every role to end; idempotent."""
        if not self.stopping.is_set():
            self.stopping.set()
            for outbox in self._members.values():
                outbox.post(control.Stop(reason))

    async def _serve_channel(self, channel: Channel) -> None:
        timeout_us = self._config.times.control_s * 1e6
        try:
            join = from_wire(await channel.receive(timeout_us=timeout_us), peer=channel.peer)
            if not isinstance(join, control.Join):
                raise WireError(channel.peer, f"opened with {type(join).__name__} instead of Join")
            outbox = Outbox(channel, timeout_us)
            if join.role == "client":
                await self._serve_client(channel, outbox)
            else:
                await self._serve_member(channel, outbox, join)
        except TransportError as error:
            log.debug("channel of %s ended: %s", channel.peer, error)
        finally:
            await channel.close()

    async def _serve_member(self, channel: Channel, outbox: Outbox, join: control.Join) -> None:
        try:
            rank = self.membership.join(join)
        except ConfigError as error:
            refused = control.Refused(error.problem, error.remedy)
            await channel.send(to_wire(refused), timeout_us=self._config.times.control_s * 1e6)
            return
        member = (join.role, rank)
        self._members[member] = outbox
        self._empty.clear()
        outbox.post(control.Welcome(join.role, rank, self._config))
        self._broadcast_status()
        failure = ""
        try:
            async with _writing(outbox):
                while True:
                    message = from_wire(await channel.receive(timeout_us=None), peer=member_name(*member))
                    if isinstance(message, control.Failure):
                        failure = f"{message.kind}: {message.error}"
                        break
                    self._from_member(member, message)
        except PeerUnreachable:
            failure = f"its machine cannot be reached (pid {join.pid})"
        except PeerLost:
            # How its channel broke is of no use to people: who it was is.
            failure = f"its process ended (pid {join.pid})"
        except TransportError as error:
            failure = error.operation if error.peer == channel.peer else f"{error.peer}: {error.operation}"
        except AforeError as error:
            failure = str(error)
        finally:
            del self._members[member]
            if not self._members:
                self._empty.set()
            if not self.stopping.is_set():
                self._lost(member, failure or "ended")

    def lose(self, role: str, rank: int, reason: str) -> None:
        """A deadline has named a role whose channel still stands: it counts as lost like one whose channel has ended."""
        if not self.stopping.is_set():
            self._lost((role, rank), reason)

    def _lost(self, member: MemberId, reason: str) -> None:
        self.membership.lost(member, reason)
        if self.membership.lost_member:
            self.on_lost(member_name(*member), reason)
        else:
            log.warning("%s left before the cluster served (%s); its rank is free", member_name(*member), reason)
        self._broadcast_status()

    def _from_member(self, member: MemberId, message: control.Message) -> None:
        membership = self.membership
        sends: list[Send] = []
        if isinstance(message, control.Loading):
            membership.loading(member, message)
            self._broadcast_status()
        elif isinstance(message, control.Loaded):
            sends = membership.loaded(member)
        elif isinstance(message, control.Regions):
            sends = membership.registered(member, message)
        elif isinstance(message, control.Linked):
            sends = membership.linked(member, message)
            self._send_all(sends)
            self._broadcast_status()
            return
        elif isinstance(message, control.PlanSeen | control.SpansSeen):
            for client, watch in self._watching.items():
                if watch.plans if isinstance(message, control.PlanSeen) else watch.spans:
                    self.to_client(client, message)
        elif isinstance(message, control.Stats):
            client, ticket = self._tickets.pop(message.ticket, (-1, 0))
            self.to_client(client, control.Stats(ticket, message.payload))
        else:
            self.on_member(*member, message)
        self._send_all(sends)

    def _send_all(self, sends: list[Send]) -> None:
        for send in sends:
            for member in send.members:
                self.to_member(*member, send.message)

    async def _serve_client(self, channel: Channel, outbox: Outbox) -> None:
        client = self._next_client
        self._next_client += 1
        self._clients[client] = outbox
        outbox.post(self.status())
        try:
            async with _writing(outbox):
                while True:
                    message = from_wire(await channel.receive(timeout_us=None), peer=f"client-{client}")
                    self._from_client(client, message)
        finally:
            del self._clients[client]
            if self._watching.pop(client, None) is not None:
                self._tell_watchers()
            self.on_client_gone(client)

    def _from_client(self, client: int, message: control.Message) -> None:
        if isinstance(message, control.Stop):
            self.stop(message.reason)
        elif isinstance(message, control.Watch):
            self._watching[client] = message
            self._tell_watchers()
        elif isinstance(message, control.StatsRequest):
            self._next_ticket += 1
            self._tickets[self._next_ticket] = (client, message.ticket)
            self.to_member("scheduler", 0, control.StatsRequest(self._next_ticket))
        else:
            self.on_client(client, message)

    def _tell_watchers(self) -> None:
        """Roles forward what at least one client watches."""
        watch = control.Watch(
            plans=any(w.plans for w in self._watching.values()), spans=any(w.spans for w in self._watching.values())
        )
        for outbox in self._members.values():
            outbox.post(watch)

    def status(self) -> control.Status:
        """What is up and what is missing."""
        done, total = self.membership.progress()
        return control.Status(
            serving=self.membership.serving,
            missing=self.membership.missing(),
            lost=self.membership.lost_member,
            tensors_loaded=done,
            tensors_total=total,
            url=self.url,
            absent=self.membership.absent(),
        )

    def _broadcast_status(self) -> None:
        status = self.status()
        for outbox in self._clients.values():
            outbox.post(status)


class _writing:
    """Runs an outbox's writer beside the block; the writer's failure ends the block."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._writer = self._group.create_task(self._outbox.write_all(), name="outbox")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._outbox.finish()
        if error is not None:
            self._writer.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)  # type: ignore[arg-type]  # the traceback as it came
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _nobody(*_: object) -> None:
    """No engine is attached."""
