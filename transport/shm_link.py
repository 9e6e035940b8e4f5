"""Links of the shm fabric: ``ShmLink`` writes into mapped regions, ``InboundLink`` is what its peer keeps for it.

The connection that made a link carries no data: it stays open so that the kernel tells each side at once when the other is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from afore.core.errors import LinkClosed, PeerLost, TransportError, WireError
from afore.transport.api import Buffer, Lane, Notification, RegionKey
from afore.transport.buffers import flat, refuse_bounds, refuse_foreign, require_immediate, revoked
from afore.transport.queues import Inbox, Turnstile
from afore.transport.shm_ring import RingReader, RingWriter
from afore.transport.shm_segments import LIVE, STATE_WORD, Mapping


class MappingCache:
    """Writable mappings of peers' regions, one for each whatever number of links use it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._mappings: dict[str, tuple[Mapping, int]] = {}

    def acquire(self, key: RegionKey) -> Mapping:
        """The mapping of ``key``; ``release`` it. Raises ``RegionRevoked``, ``AccessRefused``, ``HostError``."""
        mapping, uses = self._mappings.get(key.token) or (Mapping(self._root, key, writable=True), 0)
        if mapping.key != key:
            raise refuse_foreign(key, key.address, f"does not match segment {key.token}")
        self._mappings[key.token] = (mapping, uses + 1)
        return mapping

    def release(self, mapping: Mapping) -> None:
        """Unmaps after the last use."""
        token = mapping.key.token
        _, uses = self._mappings[token]
        if uses > 1:
            self._mappings[token] = (mapping, uses - 1)
        else:
            del self._mappings[token]
            mapping.close()


class ShmLink:
    """A ``Link`` into the memory of another process of this host."""

    def __init__(
        self,
        sock: socket.socket,
        fds: tuple[int, int, int],
        slots: int,
        *,
        peer: str,
        lane: Lane,
        mappings: MappingCache,
        forget: Callable[[ShmLink], None],
    ) -> None:
        """Owns ``sock`` and ``fds`` (ring, the owner's doorbell, this link's credit bell) from now on. Raises ``WireError``."""
        ring_fd, self._doorbell_fd, self._credit_fd = fds
        self._ring = RingWriter(ring_fd, slots, peer)
        os.close(ring_fd)
        self._sock: socket.socket | None = sock
        self._peer = peer
        self._lane = lane
        self._mappings = mappings
        self._forget = forget
        self._targets: dict[str, Mapping] = {}
        self._turnstile = Turnstile()
        self._ending: Callable[[], TransportError] | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_connection)
        self._loop.add_reader(self._credit_fd, self._on_credit)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def lane(self) -> Lane:
        return self._lane

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        if self._ending is not None:
            raise self._ending()
        target = self._targets.get(remote.token)
        if target is None or (target.key is not remote and target.key != remote):
            target = self._reach(remote)
        if type(data) is not bytes:
            data = flat(data, self._peer)
        nbytes = len(data)
        if offset < 0 or offset + nbytes > remote.nbytes:
            raise refuse_bounds(remote, offset, nbytes)
        if notify is not None and notify >> 32:
            require_immediate(notify, self._peer)
        if target.state[STATE_WORD] != LIVE:
            raise self._drop(target)
        ring = self._ring
        if self._turnstile.line or (notify is not None and ring.tail >= ring.limit and not ring.has_room()):
            await self._wait_turn(remote, notify is not None, timeout_us)
            # Another writer may have let go of the mapping meanwhile.
            if self._targets.get(remote.token) is not target or target.state[STATE_WORD] != LIVE:
                raise self._drop(target)
        # From here on nothing suspends: bytes and notification go together or not at all.
        if nbytes:
            target.view[offset : offset + nbytes] = data
        if notify is not None:
            ring.push(remote.region << 32 | notify)
            os.eventfd_write(self._doorbell_fd, 1)

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        if self._ending is not None:
            raise self._ending()
        target = self._targets.get(remote.token)
        if target is None or (target.key is not remote and target.key != remote):
            target = self._reach(remote)
        if offset < 0 or offset + len(into) > remote.nbytes:
            raise refuse_bounds(remote, offset, len(into))
        if target.state[STATE_WORD] != LIVE:
            raise self._drop(target)
        into[:] = target.view[offset : offset + len(into)]

    async def _wait_turn(self, remote: RegionKey, needs_credit: bool, timeout_us: float) -> None:
        def may_go() -> bool:
            if self._ending is not None:
                raise self._ending()
            return not needs_credit or self._ring.has_room_or_announce()

        await self._turnstile.enter(
            may_go,
            timeout_us,
            peer=self._peer,
            what=f"write to region {remote.region} on lane {self._lane.name.lower()}: no credit for a notification",
            hint="its owner does not take its notifications",
        )

    def _reach(self, remote: RegionKey) -> Mapping:
        """The mapping of ``remote``, made on first use. Raises ``AccessRefused``, ``RegionRevoked``."""
        if remote.fabric != "shm" or remote.address != self._peer:
            raise refuse_foreign(remote, self._peer, "is not this peer's")
        if remote.token in self._targets:
            raise refuse_foreign(remote, self._peer, f"does not match segment {remote.token}")
        for stale in [mapping for mapping in self._targets.values() if not mapping.is_live()]:
            self._drop(stale)
        mapping = self._mappings.acquire(remote)
        self._targets[remote.token] = mapping
        return mapping

    def _drop(self, mapping: Mapping) -> TransportError:
        if self._targets.pop(mapping.key.token, None) is not None:
            self._mappings.release(mapping)
        return revoked(mapping.key)

    async def close(self) -> None:
        self.shut()

    def shut(self) -> None:
        """Closes without waiting. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ending = lambda: LinkClosed(self._peer, "the link was closed on this side", "connect again")
        self._hang_up()
        self._loop.remove_reader(self._credit_fd)
        os.close(self._credit_fd)
        os.close(self._doorbell_fd)
        for mapping in list(self._targets.values()):
            self._drop(mapping)
        self._turnstile.poke()
        self._ring.close()
        self._forget(self)

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _on_connection(self) -> None:
        """The peer never sends: what makes the connection readable is its end."""
        assert self._sock is not None
        try:
            reason = "it sent bytes over a link" if self._sock.recv(1) else "its process or endpoint is gone"
        except BlockingIOError:
            return
        except OSError as error:
            reason = f"the connection broke ({error.strerror})"
        self._hang_up()
        self._ending = lambda: PeerLost(self._peer, reason, "wait for the next epoch and connect again")
        self._turnstile.poke()

    def _on_credit(self) -> None:
        os.eventfd_read(self._credit_fd)
        self._turnstile.poke()


class InboundLink:
    """The owner's side of one link: takes the immediates, gives credit, notices the end."""

    def __init__(
        self,
        sock: socket.socket,
        ring_fd: int,
        credit_fd: int,
        slots: int,
        *,
        peer: str,
        inboxes: dict[int, Inbox],
        forget: Callable[[InboundLink], None],
    ) -> None:
        """Owns ``sock`` and ``credit_fd`` from now on; ``ring_fd`` stays the caller's."""
        self._ring = RingReader(ring_fd, slots, peer)
        self._credit_fd = credit_fd
        self._sock = sock
        self._peer = peer
        self._inboxes = inboxes
        self._forget = forget
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_connection)

    @property
    def peer(self) -> str:
        """Address of the endpoint that writes."""
        return self._peer

    def deliver(self) -> None:
        """Moves what is published into the inboxes, whose readers wake. Raises ``WireError`` for a ring that cannot be right."""
        ring, inboxes = self._ring, self._inboxes
        for entry in ring.drain():
            inbox = inboxes.get(entry >> 32)
            if inbox is not None:
                inbox.put(Notification(self._peer, entry & 0xFFFFFFFF), self)
            else:
                ring.taken += 1  # written before the writer saw that the region was closed
        if ring.taken >= ring.due:
            self._give_credit()

    def give_back(self, count: int) -> None:
        """As ``Creditor``: readers took ``count`` notifications."""
        ring = self._ring
        ring.taken += count
        if ring.taken >= ring.due:
            self._give_credit()

    def _give_credit(self) -> None:
        """Credit for what was taken; rings the writer if it sleeps."""
        if self._open and self._ring.give_credit():
            os.eventfd_write(self._credit_fd, 1)

    def close(self) -> None:
        """Ends the link; its writer gets ``PeerLost``. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            os.close(self._credit_fd)
            self._ring.close()
            self._forget(self)

    def _on_connection(self) -> None:
        """The writer never sends: its end, or bytes that it should not send, end the link."""
        try:
            self._sock.recv(1)
        except BlockingIOError:
            return
        except OSError:
            pass
        # What it published before it ended counts.
        with suppress(WireError):
            self.deliver()
        self.close()
