"""A loopback endpoint whose links do as a test says: stall, or swallow what they should carry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from afore.transport.api import Buffer, Channel, ChannelHandler, Fabric, Lane, Link, MappedRegion, Region, RegionKey
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork

Weather = Callable[[str, str, Lane, int | None], Awaitable[bool]]
"""(from, to, lane, immediate) of a write that has just been made, before its writer goes on: it may stall the writer.

For a bell without bytes it is asked before: False swallows the bell.
"""


class FaultyLink:
    """A ``Link`` under ``weather``."""

    def __init__(self, link: Link, source: str, weather: Weather) -> None:
        self._link = link
        self._source = source
        self._weather = weather

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def lane(self) -> Lane:
        return self._link.lane

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        if data:
            await self._link.write(remote, offset, data, notify=notify, timeout_us=timeout_us)
            await self._weather(self._source, self.peer, self.lane, notify)
        elif await self._weather(self._source, self.peer, self.lane, notify):
            await self._link.write(remote, offset, data, notify=notify, timeout_us=timeout_us)

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        await self._link.read(remote, offset, into, timeout_us=timeout_us)

    async def close(self) -> None:
        await self._link.close()


class FaultyFabric:
    """A ``Fabric`` whose links are under ``weather``."""

    def __init__(self, network: LoopbackNetwork, address: str, weather: Weather, *, node: str = "") -> None:
        self._fabric: Fabric = LoopbackFabric(network, address, node=node)
        self._weather = weather

    @property
    def name(self) -> str:
        return self._fabric.name

    @property
    def address(self) -> str:
        return self._fabric.address

    @property
    def maps_memory(self) -> bool:
        return self._fabric.maps_memory

    def node_of(self, address: str) -> str:
        return self._fabric.node_of(address)

    def register(self, nbytes: int, *, label: str) -> Region:
        return self._fabric.register(nbytes, label=label)

    def resolve(self, key: RegionKey) -> RegionKey:
        return self._fabric.resolve(key)

    def map(self, key: RegionKey, *, writable: bool = False) -> MappedRegion:
        return self._fabric.map(key, writable=writable)

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> Link:
        link = await self._fabric.connect(address, lane, timeout_us=timeout_us)
        return FaultyLink(link, self.address, self._weather)

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        await self._fabric.listen(address, handler)

    async def dial(self, address: str, *, timeout_us: float) -> Channel:
        return await self._fabric.dial(address, timeout_us=timeout_us)

    async def close(self) -> None:
        await self._fabric.close()


class Stalls:
    """Attention workers that stop between their demand and their inputs: the n-th demand of a worker for so many µs."""

    def __init__(self, stalls: dict[tuple[int, int], float]) -> None:
        self.stalls = stalls
        self.demands: dict[str, int] = {}
        self.stalled = 0

    async def __call__(self, source: str, target: str, lane: Lane, immediate: int | None) -> bool:
        if source.startswith("attention") and target == "scheduler-0" and lane is Lane.DEMAND:
            number = self.demands.get(source, 0)
            self.demands[source] = number + 1
            stall_us = self.stalls.get((int(source[-1]), number))
            if stall_us is not None:
                self.stalled += 1
                await asyncio.sleep(stall_us * 1e-6)
        return True
