"""``tcp``: processes of any hosts that write into each other's memory over sockets, one for each lane.

A write is a frame; the owner receives its payload straight into the region and then puts the notification into the region's
queue. Keys are proven before they are used, regions that end are told to every writer, credit flows back as notifications are
taken. What travels is authenticated when two endpoints meet, and neither encrypted nor signed afterwards: the network between
them is trusted to deliver what was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from functools import partial

from afore.core.clock import WallClock
from afore.core.errors import AccessRefused, WireError
from afore.core.topology import split_address
from afore.transport.api import ChannelHandler, Lane, MappedRegion, RegionKey
from afore.transport.buffers import require_nbytes
from afore.transport.channel import StreamChannel
from afore.transport.endpoint import StreamEndpoint
from afore.transport.handshake import Hello, Identity, admit
from afore.transport.idle import make_idle
from afore.transport.private_segment import PrivateSegment
from afore.transport.queues import Inbox
from afore.transport.records import LINK_TERMS
from afore.transport.tcp_config import CREDITS_LIMIT, TcpConfig
from afore.transport.tcp_exposed import ExposedMemory
from afore.transport.tcp_keys import new_key, require_genuine
from afore.transport.tcp_link import Owned, TcpInbound, TcpLink, close_inbound
from afore.transport.tcp_region import TcpRegion
from afore.transport.tcp_sockets import EXAMPLE, require_secret

__all__ = ["TcpConfig", "TcpFabric", "TcpRegion"]


class TcpFabric:
    """One endpoint of the tcp fabric; a ``Fabric``. Used in the event loop that runs when it is made."""

    def __init__(self, config: TcpConfig) -> None:
        """Listens. Raises ``HostError`` (address in use, descriptors), ``ConfigError`` (a secret too short)."""
        self._config = config
        self._idle = make_idle(config.idle, WallClock())
        self._numbers = itertools.count(1)
        self._regions: dict[int, TcpRegion] = {}
        self._owned: dict[int, Owned] = {}
        self._links: dict[TcpLink, None] = {}
        self._inbound: dict[TcpInbound, None] = {}
        self._door = StreamEndpoint(
            timeout_us=config.handshake_timeout_us,
            message_limit=config.message_limit,
            tuning=config.tuning,
            greetings_limit=config.greetings_limit,
        )
        me = Identity(address=config.advertise or config.listen, secret=config.shared_secret, version=config.version)
        self._door.open(me, self._welcome_link, listen_at=config.listen)

    @property
    def name(self) -> str:
        return "tcp"

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def listens_at(self) -> str:
        """The local address, which differs from ``address`` where another one is advertised."""
        return self._door.listens_at

    @property
    def maps_memory(self) -> bool:
        return False

    @property
    def refusals(self) -> Counter[str]:
        """Connections that were refused or ended for what they sent, by the error's name."""
        return self._door.refusals

    # Memory

    def register(self, nbytes: int, *, label: str) -> TcpRegion:
        self._door.require_open()
        require_nbytes(nbytes, label)
        region = next(self._numbers)
        assert region < 1 << 32
        segment = PrivateSegment(label=label, region=region, nbytes=nbytes, address=self.address)
        key, number = new_key(self._config.shared_secret, self.address, region, nbytes)
        made = TcpRegion(segment, key, number, label, look=self._look, idle=self._idle, forget=self._forget_region)
        self._regions[region] = self._owned[region] = made
        return made

    def _forget_region(self, region: TcpRegion) -> None:
        number = region.key.region
        del self._regions[number], self._owned[number]
        for link in self._inbound:
            link.revoke(number, region.number)

    def _look(self) -> None:
        """Takes what lies in every socket."""
        for link in list(self._inbound):
            link.look()

    def expose(self, buffer: memoryview, inbox: Inbox, *, label: str) -> RegionKey:
        """Peers may write into ``buffer``, whose owner is another fabric; their notifications go to ``inbox``."""
        self._door.require_open()
        region = next(self._numbers)
        key, number = new_key(self._config.shared_secret, self.address, region, buffer.nbytes)
        self._owned[region] = ExposedMemory(buffer, key, number, inbox)
        return key

    def conceal(self, key: RegionKey) -> None:
        """Ends that: writers are told, and nothing lands any more. Idempotent."""
        exposed = self._owned.pop(key.region, None)
        if exposed is not None:
            for link in self._inbound:
                link.revoke(key.region, exposed.number)

    def node_of(self, address: str) -> str:
        return address

    def resolve(self, key: RegionKey) -> RegionKey:
        return key

    def map(self, key: RegionKey, *, writable: bool = False) -> MappedRegion:
        """Raises ``AccessRefused``: nothing is shared here."""
        self._door.require_open()
        raise AccessRefused(
            key.address,
            f"region {key.region} cannot be mapped over tcp",
            "write into it over a link, or use shm on one host",
        )

    # Links

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> TcpLink:
        self._require_secret(address)
        sock, reply, _ = await self._door.meet(address, lane, timeout_us=timeout_us, reply_bytes=LINK_TERMS.nbytes)
        (credits,) = LINK_TERMS.unpack_from(reply)
        if not 1 <= credits <= CREDITS_LIMIT:
            sock.close()
            raise WireError(address, f"it offers {credits} credits for a link")
        link = TcpLink(
            sock,
            peer=address,
            lane=lane,
            credits=credits,
            unsent_limit=self._config.unsent_bytes,
            prove=partial(require_genuine, self._config.shared_secret),
            forget=self._forget_link,
        )
        self._links[link] = None
        return link

    def _forget_link(self, link: TcpLink) -> None:
        self._links.pop(link, None)

    def _welcome_link(self, sock: socket.socket, hello: Hello) -> None:
        credits = self._config.credits
        try:
            admit(sock, self._door.identity, hello, reply=LINK_TERMS.pack(credits))
        except BaseException:
            sock.close()
            raise
        link = TcpInbound(
            sock,
            peer=hello.address,
            credits=credits,
            regions=self._owned,
            forget=self._forget_inbound,
        )
        self._inbound[link] = None

    def _forget_inbound(self, link: TcpInbound, complaint: str) -> None:
        self._inbound.pop(link, None)
        if complaint:
            self.refusals[complaint] += 1

    # Channels

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        """As ``Fabric.listen``; ``address`` is this endpoint's own, or another ``HOST:PORT`` of this machine."""
        self._require_secret(address)
        self._door.listen(address, handler)

    async def dial(self, address: str, *, timeout_us: float) -> StreamChannel:
        self._require_secret(address)
        return await self._door.dial(address, timeout_us=timeout_us)

    def _require_secret(self, address: str) -> None:
        self._door.require_open()
        split_address(address, field="address", example=EXAMPLE, any_port=True)
        require_secret(address, self._config.secret)

    # The end

    async def close(self) -> None:
        if self._door.shut():
            # Before the regions, so that their writers hear of this endpoint's end and not of one region after another.
            close_inbound(self._inbound)
            for region in list(self._regions.values()):
                region.close()
        try:
            if self._links:
                await asyncio.gather(*[link.close() for link in list(self._links)])
        finally:
            # Also where closing is cut short: a peer that does not take what was written is waited for, and nobody may come in.
            await self._door.close()
