"""``verbs``: processes of any hosts that write into each other's memory over RDMA (RoCE, InfiniBand), a queue pair for each link.

Peers meet over a stream (TCP, or a Unix socket on one host): there both prove that they know the run's secret and say their queue
pairs; afterwards it carries what is rare, and its end tells at once that a process is gone. Bytes and notifications go over the
queue pair alone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from afore.core.clock import WallClock, deadline
from afore.core.errors import AccessRefused, AforeError
from afore.transport.api import ChannelHandler, Lane, RegionKey
from afore.transport.buffers import require_nbytes
from afore.transport.channel import StreamChannel
from afore.transport.endpoint import StreamEndpoint
from afore.transport.handshake import Hello, Identity, admit
from afore.transport.idle import make_idle
from afore.transport.private_segment import PrivateSegment
from afore.transport.queues import Inbox
from afore.transport.verbs.binding import Binding, load_binding
from afore.transport.verbs.choice import choose_path
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.connection import Connection
from afore.transport.verbs.credits import MESSAGES_IN_FLIGHT
from afore.transport.verbs.inbound import CREDIT_SENDS, InboundLink, receives
from afore.transport.verbs.link import VerbsLink
from afore.transport.verbs.memory import address_of, view_address
from afore.transport.verbs.nic import Nic
from afore.transport.verbs.numa import numa_distances, own_numa_node
from afore.transport.verbs.region import VerbsRegion
from afore.transport.verbs.requests import small_bytes
from afore.transport.verbs.sending import RESERVE
from afore.transport.verbs.table import DeviceEntry, read_table
from afore.transport.verbs.wire import ENDPOINT_BYTES, NOTICE, EndpointRecord, make_token


class VerbsFabric:
    """One endpoint of the verbs fabric; a ``Fabric``. Used in the event loop that runs when it is made."""

    def __init__(
        self, config: VerbsConfig, *, binding: Binding | None = None, table: Sequence[DeviceEntry] | None = None
    ) -> None:
        """Opens the device and listens. Raises ``HostError`` (no binding, no device, no active port), ``ConfigError``.

        ``binding`` and ``table`` are this machine's unless given.
        """
        self._config = config
        self._idle = make_idle(config.idle, WallClock())
        self._numbers = itertools.count(1)
        self._next_region = 1
        self.regions: dict[int, VerbsRegion] = {}
        """Live regions, by number."""
        self._links: dict[VerbsLink, None] = {}
        self._inbound: dict[InboundLink, None] = {}
        self._closing = asyncio.Lock()
        binding = binding or load_binding(config.api)
        node = own_numa_node() if config.numa_node is None else config.numa_node
        path = choose_path(
            read_table() if table is None else table,
            device=config.device,
            port=config.port,
            gid_index=config.gid_index,
            numa_node=node,
            distances=None if node is None else numa_distances(node),
        )
        self._nic = Nic(binding, path, config)
        self._door = StreamEndpoint(
            timeout_us=config.handshake_timeout_us,
            message_limit=config.message_limit,
            tuning=config.tuning,
            greetings_limit=config.greetings_limit,
        )
        try:
            me = Identity(address=config.advertise or config.listen, secret=config.secret, version=config.version)
            self._door.open(me, self._welcome_link, listen_at=config.listen)
        except BaseException:
            self._nic.close()
            raise

    @property
    def name(self) -> str:
        return "verbs"

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def maps_memory(self) -> bool:
        return False

    @property
    def choice(self) -> tuple[str, ...]:
        """What is used and why, a sentence each: binding, device, port, address, MTU."""
        return self._nic.reasons

    @property
    def refusals(self) -> Counter[str]:
        """Connections and links that were refused, by the error's name."""
        return self._door.refusals

    # Memory

    def register(self, nbytes: int, *, label: str) -> VerbsRegion:
        self._door.require_open()
        require_nbytes(nbytes, label)
        number = self._number()
        segment = PrivateSegment(label=label, region=number, nbytes=nbytes, address=self.address)
        try:
            return self._region(number, segment.view, view_address(segment.view), label, segment)
        except BaseException:
            segment.close()
            raise

    def adopt(self, memory: object, *, label: str) -> VerbsRegion:
        """A region of memory that is there already: a writable buffer, or a tensor in this machine's memory, such as weights.

        The caller keeps that memory until the region is closed and its peers have let go. Raises ``ConfigError``, ``HostError``.
        """
        self._door.require_open()
        address, view = address_of(memory)
        require_nbytes(view.nbytes, label)
        return self._region(self._number(), view, address, label, None)

    def _number(self) -> int:
        number = next(self._numbers)
        assert number < 1 << 32
        self._next_region = number + 1
        return number

    def _region(
        self, number: int, view: memoryview, address: int, label: str, segment: PrivateSegment | None
    ) -> VerbsRegion:
        memory = self._nic.register(address, view.nbytes, f"region {label!r}") if view.nbytes else None
        token = make_token(memory.rkey if memory is not None else 0, address)
        region = VerbsRegion(
            RegionKey("verbs", self.address, number, view.nbytes, token),
            label,
            view,
            address=address,
            memory=memory,
            segment=segment,
            idle=self._idle,
            forget=self._forget_region,
        )
        self.regions[number] = region
        return region

    def _forget_region(self, region: VerbsRegion) -> None:
        self.regions.pop(region.key.region, None)

    def region_was(self, number: int) -> bool:
        """As ``Owner``."""
        return 0 < number < self._next_region

    def _local_key(self, address: int, nbytes: int) -> int | None:
        for region in self.regions.values():
            if region.address <= address and address + nbytes <= region.address + region.nbytes:
                return region.lkey
        return None

    def expose(self, buffer: memoryview, inbox: Inbox, *, label: str) -> RegionKey:
        """Peers may write into ``buffer``, whose owner is another fabric; their notifications go to ``inbox``."""
        region = self.adopt(buffer, label=label)
        region.inbox = inbox
        return region.key

    def conceal(self, key: RegionKey) -> None:
        """Ends that, and with it the inbox. Idempotent."""
        region = self.regions.get(key.region)
        if region is not None:
            region.close()

    def node_of(self, address: str) -> str:
        return address

    def resolve(self, key: RegionKey) -> RegionKey:
        return key

    def map(self, key: RegionKey, *, writable: bool = False) -> NoReturn:
        self._door.require_open()
        raise AccessRefused(key.address, f"cannot map memory of fabric {key.fabric} here", "write into it over a link")

    # Links

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> VerbsLink:
        async with deadline(timeout_us, peer=address, operation="connect"):
            sock, reply, _ = await self._door.meet(address, lane, timeout_us=timeout_us, reply_bytes=ENDPOINT_BYTES)
            link = self._make_link(sock, address, lane, reply)
            try:
                await link.ready
            except BaseException:
                link.shut()
                raise
        return link

    def _make_link(self, sock: socket.socket, address: str, lane: Lane, reply: bytes) -> VerbsLink:
        config = self._config
        try:
            theirs = EndpointRecord.unpack(reply, address)
            small, pair, ours = self._nic.queue_pair(
                sends=config.send_depth + RESERVE,
                receives=MESSAGES_IN_FLIGHT,
                receive_bytes=NOTICE.size,
                small_bytes=small_bytes(config),
                credits=theirs.credits,
            )
        except BaseException:
            sock.close()
            raise
        link = VerbsLink(
            self._nic.device,
            config,
            peer=address,
            lane=lane,
            credits=theirs.credits,
            small=small,
            local_key=self._local_key,
            forget=self._forget_link,
        )
        self._links[link] = None
        connection = Connection(sock, pair, link, peer=address)
        try:
            link.attach(connection)
            connection.send(ours)
            link.mtu_reason = self._nic.connect(pair, address, ours, theirs)
        except BaseException:
            link.shut()
            raise
        return link

    def _forget_link(self, link: VerbsLink) -> None:
        self._links.pop(link, None)

    def _welcome_link(self, sock: socket.socket, hello: Hello) -> None:
        config, peer = self._config, hello.address
        try:
            small, pair, ours = self._nic.queue_pair(
                sends=CREDIT_SENDS,
                receives=receives(config.credits),
                receive_bytes=NOTICE.size,
                small_bytes=receives(config.credits) * NOTICE.size,
                credits=config.credits,
            )
        except BaseException:
            sock.close()
            raise
        link = InboundLink(self, config, small, ours, peer=peer)
        self._inbound[link] = None
        try:
            link.attach(Connection(sock, pair, link, peer=peer))
            admit(sock, self._door.identity, hello, reply=ours.pack())
        except BaseException:
            link.close()
            raise

    def connect_pair(self, connection: Connection, ours: EndpointRecord, theirs: EndpointRecord) -> None:
        """As ``Owner``."""
        self._nic.connect(connection.pair, connection.peer, ours, theirs)

    def forget_inbound(self, link: InboundLink) -> None:
        """As ``Owner``."""
        self._inbound.pop(link, None)

    def count_refusal(self, error: AforeError) -> None:
        """As ``Owner``."""
        self.refusals[type(error).__name__] += 1

    # Channels

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        """As ``Fabric.listen``; ``address`` is this endpoint's own, a path, or ``HOST:PORT``."""
        self._door.listen(address, handler)

    async def dial(self, address: str, *, timeout_us: float) -> StreamChannel:
        return await self._door.dial(address, timeout_us=timeout_us)

    # The end

    async def close(self) -> None:
        self._door.shut()
        async with self._closing:
            try:
                if self._links:
                    await asyncio.gather(*[link.close() for link in self._links])
            finally:
                # Also where closing is cut short. Before the regions: peers learn that the endpoint is gone, not that this
                # region or that is closed.
                for inbound in list(self._inbound):
                    inbound.close()
                for region in list(self.regions.values()):
                    region.close()
                try:
                    await self._door.close()
                finally:
                    self._nic.close()
