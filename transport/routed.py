"""``routed``: shared memory inside a node, another fabric beyond it; which one, each pair of endpoints decides when it connects.

A region is one piece of shared memory that every fabric of the endpoint knows: neighbours map it, others write into it, and all of
them notify the same inbox. Nothing is added to a write: ``connect`` returns the chosen fabric's own link, and ``resolve`` turns a
key that travelled into that link's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from afore.core.errors import AccessRefused, PeerLost, WireError
from afore.core.topology import NODE_NAME
from afore.transport.api import (
    Channel,
    ChannelHandler,
    Fabric,
    Lane,
    Link,
    MappedRegion,
    Notification,
    Region,
    RegionKey,
)
from afore.transport.queues import Inbox
from afore.transport.routed_names import ROUTED, RoutedAddress, RoutedKey, is_routed
from afore.transport.shm import ShmFabric
from afore.transport.shm_region import ShmRegion


class FarFabric(Fabric, Protocol):
    """A fabric that can take in memory that is there already."""

    def expose(self, buffer: memoryview, inbox: Inbox, *, label: str) -> RegionKey:
        """Peers may write into ``buffer``; their notifications go to ``inbox``. Raises ``HostError``."""
        ...

    def conceal(self, key: RegionKey) -> None:
        """Ends that; later writes of peers fail typed. Idempotent."""
        ...


class RoutedRegion:
    """A ``Region`` that neighbours map and others write into."""

    def __init__(self, near: ShmRegion, far: Mapping[FarFabric, RegionKey], key: RegionKey) -> None:
        self._near = near
        self._far = dict(far)
        self._key = key

    @property
    def key(self) -> RegionKey:
        return self._key

    @property
    def nbytes(self) -> int:
        return self._near.nbytes

    @property
    def buffer(self) -> memoryview:
        return self._near.buffer

    async def notified(self, *, timeout_us: float | None) -> list[Notification]:
        return await self._near.notified(timeout_us=timeout_us)

    def close(self) -> None:
        for fabric, key in self._far.items():
            fabric.conceal(key)
        self._far.clear()
        self._near.close()


class RoutedFabric:
    """One endpoint of a cluster on several nodes; a ``Fabric``. Owns ``near`` and ``far`` from now on."""

    def __init__(self, node: str, near: ShmFabric, far: Mapping[str, FarFabric]) -> None:
        """``node``: this process's. ``far``: by fabric's name, the preferred first; none: this endpoint is for neighbours only."""
        assert NODE_NAME.fullmatch(node), node
        self._node = node
        self._near = near
        self._far = dict(far)
        self._resolved: dict[RegionKey, RegionKey] = {}
        self._address = self._route(near.address)

    def _route(self, near: str) -> RoutedAddress:
        return RoutedAddress(self._node, near, {name: fabric.address for name, fabric in self._far.items()})

    @property
    def name(self) -> str:
        return ROUTED

    @property
    def address(self) -> str:
        return str(self._address)

    @property
    def maps_memory(self) -> bool:
        return False

    def node_of(self, address: str) -> str:
        return RoutedAddress.parse(address).node

    # Memory

    def register(self, nbytes: int, *, label: str) -> RoutedRegion:
        near = self._near.register(nbytes, label=label)
        far: dict[FarFabric, RegionKey] = {}
        try:
            for fabric in self._far.values():
                far[fabric] = fabric.expose(near.buffer, near.inbox, label=label)
        except BaseException:
            RoutedRegion(near, far, near.key).close()
            raise
        keys = {name: far[fabric] for name, fabric in self._far.items()}
        return RoutedRegion(near, far, RoutedKey(near.key, keys).pack(self._address))

    def resolve(self, key: RegionKey) -> RegionKey:
        """The key by which this endpoint's links, or ``map``, know the region.

        Raises ``PeerLost`` where no fabric leads there, ``WireError`` for a key that no owner makes.
        """
        if key.fabric != ROUTED:
            return key
        found = self._resolved.get(key)
        if found is None:
            routed = RoutedKey.parse(key, self._near.name)
            way = self._way(RoutedAddress.parse(key.address))
            if way is not None and way not in routed.far:
                raise WireError(key.address[:80], f"region {key.region} has no key for {way}", "do all sides agree?")
            found = self._resolved[key] = routed.near if way is None else routed.far[way]
        return found

    def map(self, key: RegionKey, *, writable: bool = False) -> MappedRegion:
        own = self.resolve(key)
        if own.fabric != self._near.name:
            raise AccessRefused(
                key.address, f"its memory is on node {self.node_of(key.address)}", "write into it over a link"
            )
        return self._near.map(own, writable=writable)

    # Peers

    def _way(self, peer: RoutedAddress) -> str | None:
        """The far fabric that leads to a peer; None for a neighbour. The peer's order of preference decides, then both agree."""
        if peer.node == self._node:
            return None
        for name in peer.far:
            if name in self._far:
                return name
        ours = ", ".join(self._far) or "none"
        theirs = ", ".join(peer.far) or "none"
        raise PeerLost(
            peer.near,
            f"is on node {peer.node}; from node {self._node} no fabric leads there (ours: {ours}; theirs: {theirs})",
            "give both a topology.fabric that reaches other nodes",
        )

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> Link:
        peer = RoutedAddress.parse(address)
        way = self._way(peer)
        if way is None:
            return await self._near.connect(peer.near, lane, timeout_us=timeout_us)
        return await self._far[way].connect(peer.far[way], lane, timeout_us=timeout_us)

    def reachable_at(self, near: str) -> str:
        """The address at which a listener at ``near`` is dialled, from any node."""
        return str(self._route(near))

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        """At ``address`` for neighbours, at each far fabric's own address for others."""
        await self._near.listen(address, handler)
        for fabric in self._far.values():
            await fabric.listen(fabric.address, handler)

    async def dial(self, address: str, *, timeout_us: float) -> Channel:
        if not is_routed(address):
            return await self._near.dial(address, timeout_us=timeout_us)
        peer = RoutedAddress.parse(address)
        way = self._way(peer)
        if way is None:
            return await self._near.dial(peer.near, timeout_us=timeout_us)
        return await self._far[way].dial(peer.far[way], timeout_us=timeout_us)

    async def close(self) -> None:
        try:
            await asyncio.gather(*[fabric.close() for fabric in self._far.values()])
        finally:
            # Also where closing is cut short: peers that cannot be reached are waited for, and files of this node must not stay.
            await self._near.close()


__all__ = ["FarFabric", "Region", "RoutedFabric", "RoutedRegion"]
