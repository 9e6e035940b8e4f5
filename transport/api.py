"""The transport's seam: registered regions, one-sided writes, notifications, and message channels.

Promises, the same for every fabric and held by one conformance suite (``tests/transport/conformance``):

- the bytes of a write are visible before its notification; writes of one link arrive in order; nothing is delivered twice;
- every await takes a deadline and ends in a typed error, never a hang, never a dead process; ``None`` is for idle waits of a
  service, which end when the region or channel is closed;
- cancellation propagates and leaves a link usable or closed, nothing between;
- nothing spins under the GIL: readers sleep on a descriptor, at once or after a bounded while of turns of the event loop;
- a new epoch means new regions and keys.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from afore.core.record import record

Buffer = bytes | bytearray | memoryview


class Lane(enum.IntEnum):
    """Separate queues to one peer, so that a small vector never waits behind hidden states."""

    DEMAND = 0
    DATA = 1
    CONTROL = 2


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a peer needs to write into a region (or, on one host, to map it). Plain data: travels in control messages."""

    fabric: str
    address: str
    """Endpoint of the region's owner."""
    region: int
    """Number that the owner gave it; never reused."""
    nbytes: int
    token: str
    """Fabric specific: the segment's name for shm, the remote key for verbs."""


@record
class Notification:
    """An immediate that a peer attached to a write; it is delivered after the write's bytes are visible."""

    peer: str
    """Address of the endpoint that wrote."""
    immediate: int
    """0 … 2^32 - 1."""


class Region(Protocol):
    """Registered memory of this process that peers write into."""

    @property
    def key(self) -> RegionKey: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The memory itself, writable, format ``B``, aligned to 64 bytes; zero at first.

        Raises ``RegionRevoked`` after ``close``; views taken before stay valid memory as long as they are held.
        """
        ...

    async def notified(self, *, timeout_us: float | None) -> list[Notification]:
        """Awaits notifications; returns all that are queued (at least one), in each link's order.

        Does not suspend where some are queued already. Taking them gives their writers credit back. Says nothing of writers that
        died: their channel does. Raises ``DeadlineExceeded``; ``RegionRevoked`` once the region is closed.
        """
        ...

    def close(self) -> None:
        """Drops the registration; later writes of peers fail typed. Idempotent."""
        ...


class MappedRegion(Protocol):
    """A peer's region, mapped into this process (one host only).

    It stays valid memory when the owner closes the region: a new epoch, not the memory, says that it is over.
    """

    @property
    def buffer(self) -> memoryview:
        """The memory, read-only unless mapped writable. Raises ``RegionRevoked`` after ``close``."""
        ...

    def close(self) -> None:
        """Unmaps, once no view is held any more. Idempotent."""
        ...


class Link(Protocol):
    """One lane to one peer."""

    @property
    def peer(self) -> str: ...

    @property
    def lane(self) -> Lane: ...

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        """Writes ``data`` at ``offset`` of the peer's region; with ``notify``, the owner gets that immediate afterwards.

        Zero bytes with ``notify`` is a doorbell. Returns when ``data`` may be reused; does not suspend where there is credit.
        Calls take effect in their order, also those that wait. What raises, or is cancelled, has written nothing. Raises
        ``AccessRefused`` (out of bounds, a foreign key, an immediate over 32 bits), ``RegionRevoked``, ``PeerLost``,
        ``LinkClosed``, ``DeadlineExceeded`` (no credit for a notification, or the peer does not read; the link stays usable).
        Where news travel, ``RegionRevoked`` comes once they have: writes that cross them are dropped by the owner, whole.
        """
        ...

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        """Fills ``into`` (flat bytes) from ``offset`` of the peer's region, one-sided, behind what this link wrote before.

        Where it raises, or is cancelled, ``into`` may hold a part, and verbs may still change it until the link is closed.
        Raises as ``write`` does.
        """
        ...

    async def close(self) -> None:
        """Ends waiting writers with ``LinkClosed``; what was written arrives. Idempotent."""
        ...


class Channel(Protocol):
    """An ordered, reliable duplex of control messages (msgpack maps), authenticated and length limited."""

    @property
    def peer(self) -> str: ...

    async def send(self, message: dict[str, object], *, timeout_us: float) -> None:
        """Waits while the peer does not read. What raises has sent nothing: after ``DeadlineExceeded`` it may be sent again.

        Raises ``PeerLost``, ``LinkClosed``, ``DeadlineExceeded``, ``WireError`` (over the length limit, or no plain message).
        """
        ...

    async def receive(self, *, timeout_us: float | None) -> dict[str, object]:
        """The next message; a cancelled call loses none. What was sent before an end is received before ``PeerLost``.

        Raises ``PeerLost``, ``LinkClosed``, ``WireError``, ``DeadlineExceeded``.
        """
        ...

    async def close(self) -> None:
        """Ends both directions; the peer receives what was sent. Idempotent."""
        ...


ChannelHandler = Callable[[Channel], Awaitable[None]]


class Fabric(Protocol):
    """One way of moving bytes between processes: ``loopback``, ``shm``, ``tcp``."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """Where peers connect to."""
        ...

    @property
    def maps_memory(self) -> bool:
        """Whether ``map`` works between all peers: they share one host."""
        ...

    def node_of(self, address: str) -> str:
        """The node that an endpoint is on: endpoints of one node can ``map`` each other's regions."""
        ...

    def register(self, nbytes: int, *, label: str) -> Region:
        """New zeroed region. ``label`` names it for humans and tools. Raises ``HostError`` (no room, no permission)."""
        ...

    def resolve(self, key: RegionKey) -> RegionKey:
        """The key by which this endpoint's links and ``map`` know a peer's region: the same one, where there is only one way."""
        ...

    def map(self, key: RegionKey, *, writable: bool = False) -> MappedRegion:
        """Maps a peer's region in place. Raises ``RegionRevoked`` when it is gone, ``AccessRefused`` where memory is not shared."""
        ...

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> Link:
        """Raises ``PeerLost`` (nobody there), ``VersionMismatch``, ``AuthenticationFailed``, ``DeadlineExceeded``.

        ``WireError`` where something else listens; ``HostError`` where this machine lacks something.
        """
        ...

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        """Accepts control channels at ``address`` (may be the endpoint's own) until ``close``, which cancels the handlers.

        Each is given to ``handler`` in a task of its own; a handler that raises closes its channel, one that returns leaves it
        open. Raises ``HostError`` or ``ConfigError`` where the address is taken.
        """
        ...

    async def dial(self, address: str, *, timeout_us: float) -> Channel:
        """Opens a control channel. Raises as ``connect`` does."""
        ...

    async def close(self) -> None:
        """Closes links, regions and listeners; frees every descriptor and segment. Idempotent."""
        ...
