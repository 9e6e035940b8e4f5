"""``loopback``: every endpoint in one process, memory shared by reference. Scripts, tests, and virtual time run on it.

With neither latency, bandwidth nor faults a write completes inline and never touches the event loop. Otherwise bytes and
notification land later, in each link's order, by the loop's own timers: under the virtual-clock loop exactly, and the same
every time.
"""

from __future__ import annotations

import itertools

from afore.core.clock import Clock, deadline
from afore.core.errors import AccessRefused, ConfigError, LinkClosed, PeerLost
from afore.transport.api import ChannelHandler, Lane, RegionKey
from afore.transport.buffers import refuse_foreign, require_nbytes, revoked
from afore.transport.codec import MESSAGE_LIMIT
from afore.transport.handlers import HandlerTasks
from afore.transport.loopback_channel import LoopbackChannel, channel_pair
from afore.transport.loopback_faults import LoopbackFaults, Wire
from afore.transport.loopback_link import LoopbackLink, LoopbackMapping, LoopbackRegion
from afore.transport.loopback_sky import Sky

__all__ = ["LoopbackFabric", "LoopbackFaults", "LoopbackNetwork"]


class LoopbackNetwork:
    """What connects the endpoints of one process.

    ``clock`` stamps flights; ``latency_us`` each write and message takes; ``bandwidth_gbps`` of each link, in Gbit/s; ``seed`` and
    ``faults`` make the weather; ``credits``: notifications of one link that may wait at their region; ``message_limit`` in bytes.
    """

    def __init__(
        self,
        clock: Clock,
        latency_us: float = 0,
        bandwidth_gbps: float | None = None,
        seed: int | None = None,
        faults: LoopbackFaults | None = None,
        *,
        credits: int = 1024,
        message_limit: int = MESSAGE_LIMIT,
        data_latency_us: float | None = None,
    ) -> None:
        """``data_latency_us``: what writes on data lanes take instead, for rows that weigh more than their emulation does."""
        if not 0 <= latency_us < float("inf"):
            raise ConfigError("latency_us", f"{latency_us!r} is no duration", "give 0 or more microseconds")
        if bandwidth_gbps is not None and not bandwidth_gbps > 0:
            raise ConfigError(
                "bandwidth_gbps", f"{bandwidth_gbps!r} carries nothing", "give more than 0, or None for no limit"
            )
        if credits < 1:
            raise ConfigError("credits", f"{credits} lets no notification through", "give 1 or more")
        self.clock = clock
        self.latency_us = latency_us
        self._data_latency_us = latency_us if data_latency_us is None else data_latency_us
        self.credits = credits
        self.message_limit = message_limit
        self.endpoints: dict[str, LoopbackFabric] = {}
        self.nodes: dict[str, str] = {}
        """Of every endpoint that ever was."""
        self.listeners: dict[str, tuple[LoopbackFabric, ChannelHandler]] = {}
        self._bandwidth_gbps = bandwidth_gbps
        self._seed = seed
        self._faults = faults
        self.sky = Sky(clock)
        self._wires = itertools.count()
        self._regions = itertools.count(1)
        self.region_limit = 1
        """One more than the highest region number that was given."""

    def kill(self, address: str) -> None:
        """The endpoint's process dies: its links, regions, channels and handlers end at once, on every side. Idempotent."""
        endpoint = self.endpoints.get(address)
        if endpoint is not None:
            endpoint.end("it was killed", gentle=False)

    def next_region(self) -> int:
        """A region number that no other region of this network has had."""
        number = next(self._regions)
        self.region_limit = number + 1
        return number

    def wire(self, source: str, target: str, use: str) -> Wire | None:
        """A new wire; nothing where writes are inline."""
        if not self.latency_us and self._bandwidth_gbps is None and self._faults is None:
            return None
        return Wire(
            latency_us=self._data_latency_us if use == Lane.DATA.name.lower() else self.latency_us,
            bandwidth_gbps=self._bandwidth_gbps,
            faults=self._faults,
            seed=self._seed,
            name=f"{source}>{target}/{use}/{next(self._wires)}",
        )

    async def round_trip(self, timeout_us: float, peer: str, operation: str) -> None:
        """What a handshake takes."""
        if self.latency_us:
            async with deadline(timeout_us, peer=peer, operation=operation):
                await self.clock.sleep_us(2 * self.latency_us)


class LoopbackFabric:
    """One endpoint of a ``LoopbackNetwork``; a ``Fabric``."""

    def __init__(self, network: LoopbackNetwork, address: str, *, node: str = "") -> None:
        """``node``: endpoints of other nodes cannot map this one's memory, as if they were on other machines."""
        if address in network.endpoints:
            raise ConfigError("address", f"{address!r} is taken in this network", "give each endpoint its own")
        self._network = network
        self._address = address
        self._node = node
        self._regions: dict[int, LoopbackRegion] = {}
        self._links: dict[LoopbackLink, None] = {}
        self._inbound: dict[LoopbackLink, None] = {}
        self._channels: dict[LoopbackChannel, None] = {}
        self._mappings: dict[LoopbackMapping, None] = {}
        self._handlers = HandlerTasks(address)
        self._ended = ""
        network.endpoints[address] = self
        network.nodes[address] = node

    @property
    def name(self) -> str:
        return "loopback"

    @property
    def address(self) -> str:
        return self._address

    @property
    def maps_memory(self) -> bool:
        return True

    def node_of(self, address: str) -> str:
        return self._network.nodes.get(address, "")

    def register(self, nbytes: int, *, label: str) -> LoopbackRegion:
        self._require_open()
        require_nbytes(nbytes, label)
        number = self._network.next_region()
        key = RegionKey("loopback", self._address, number, nbytes, _token(self._address, number))
        region = LoopbackRegion(key, label, self._forget_region)
        self._regions[number] = region
        return region

    def _forget_region(self, region: LoopbackRegion) -> None:
        self._regions.pop(region.key.region, None)

    def resolve(self, key: RegionKey) -> RegionKey:
        return key

    def map(self, key: RegionKey, *, writable: bool = False) -> LoopbackMapping:
        self._require_open()
        if key.fabric != "loopback":
            raise AccessRefused(key.address, f"cannot map memory of fabric {key.fabric}", "write into it over a link")
        owner = self._network.endpoints.get(key.address)
        if owner is None:
            raise revoked(key)
        if owner._node != self._node:
            raise AccessRefused(key.address, f"its memory is on node {owner._node!r}", "write into it over a link")
        mapping = LoopbackMapping(owner.region_of(key).view(writable), key.address, self._forget_mapping)
        self._mappings[mapping] = None
        return mapping

    def _forget_mapping(self, mapping: LoopbackMapping) -> None:
        self._mappings.pop(mapping, None)

    def region_of(self, key: RegionKey) -> LoopbackRegion:
        """This endpoint's region of ``key``. Raises ``RegionRevoked`` (closed) or ``AccessRefused`` (never was)."""
        region = self._regions.get(key.region)
        if region is None:
            if key.token == _token(self._address, key.region) and 0 < key.region < self._network.region_limit:
                raise revoked(key)
            raise refuse_foreign(key, self._address, "was never registered")
        if region.key is not key and region.key != key:
            raise refuse_foreign(key, self._address, "does not match the region's own key")
        return region

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> LoopbackLink:
        self._require_open()
        await self._network.round_trip(timeout_us, address, "connect")
        self._require_open()
        target = self._network.endpoints.get(address)
        if target is None:
            raise PeerLost(address, "nobody is there", "start it first, or check the address")
        link = LoopbackLink(
            self._address,
            target,
            lane,
            clock=self._network.clock,
            wire=self._network.wire(self._address, address, lane.name.lower()),
            sky=self._network.sky,
            credits=self._network.credits,
            forget=lambda closed: self._forget_link(closed, target),
        )
        self._links[link] = None
        target._inbound[link] = None
        return link

    def _forget_link(self, link: LoopbackLink, target: LoopbackFabric) -> None:
        self._links.pop(link, None)
        target._inbound.pop(link, None)

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        self._require_open()
        if address in self._network.listeners:
            raise ConfigError("address", f"{address!r} has a listener already", "listen at another address")
        self._network.listeners[address] = (self, handler)

    async def dial(self, address: str, *, timeout_us: float) -> LoopbackChannel:
        self._require_open()
        network = self._network
        await network.round_trip(timeout_us, address, "dial")
        self._require_open()
        if address not in network.listeners:
            raise PeerLost(address, "nobody listens there", "start it first, or check the address")
        listener, handler = network.listeners[address]
        wires = (network.wire(self._address, address, "channel"), network.wire(address, self._address, "channel"))
        near, far = channel_pair(
            self._address, address, limit=network.message_limit, clock=network.clock, sky=network.sky, wires=wires
        )
        self._keep(near)
        listener._keep(far)
        listener._handlers.start(handler, far)
        return near

    def _keep(self, channel: LoopbackChannel) -> None:
        self._channels[channel] = None
        channel.on_close = self._forget_channel

    def _forget_channel(self, channel: LoopbackChannel) -> None:
        self._channels.pop(channel, None)

    async def close(self) -> None:
        self.end("it closed its endpoint", gentle=True)
        await self._handlers.ended()

    def end(self, reason: str, *, gentle: bool) -> None:
        """Ends everything of this endpoint, on both sides. ``gentle``: channels deliver what was sent. Idempotent."""
        if self._ended:
            return
        self._ended = reason
        if self._network.endpoints.get(self._address) is self:
            del self._network.endpoints[self._address]
        for address in [a for a, (fabric, _) in self._network.listeners.items() if fabric is self]:
            del self._network.listeners[address]
        self._handlers.cancel()
        for channel in list(self._channels):
            if gentle:
                channel.shut()
            else:
                channel.lose(reason)
        for link in list(self._links):
            if gentle:
                link.shut()
            else:
                link.lose("this endpoint was killed")
        for link in list(self._inbound):
            link.lose(reason)
        for region in list(self._regions.values()):
            region.revoke("ended: " + reason)
        for mapping in list(self._mappings):
            mapping.close()

    def _require_open(self) -> None:
        if self._ended:
            raise LinkClosed(self._address, f"this endpoint has ended: {self._ended}", "make a new one")


def _token(address: str, region: int) -> str:
    return f"{address}#{region}"
