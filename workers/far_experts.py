"""Primaries of FFN workers on other nodes, read one-sided when a copy first needs them.

Primaries never change after loading, so what was read once stays right. It is kept in memory of this process laid out as the
peer's store is: pages are taken as experts come, up to the size of the peer's primaries.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from afore.core.slots import PrimariesVector, StoreLayout
from afore.transport.api import Link, RegionKey
from afore.workers.experts import primary_row
from afore.workers.slot_table import HeldCopy
from afore.workers.store_shape import StoreShape


class FarStore:
    """One peer's primaries. ``key``: its experts' region."""

    def __init__(
        self, link: Link, key: RegionKey, shape: StoreShape, layout: StoreLayout, *, timeout_us: float
    ) -> None:
        self._link = link
        self._key = key
        self._shape = shape
        self._layout = layout
        self._timeout_us = timeout_us
        self.buffer = memoryview(mmap.mmap(-1, max(1, key.nbytes)))
        """As the peer's region, where it was read."""
        self._here: set[tuple[int, int]] = set()
        self._weightless = key.nbytes < shape.nbytes
        """An emulated worker has no weights to read."""

    def has(self, layer: int, expert: int) -> bool:
        """Whether the expert was read already."""
        return self._weightless or (layer, expert) in self._here

    async def fetch(self, layer: int, expert: int) -> None:
        """Reads it. Raises ``TransportError``."""
        row = primary_row(self._layout, expert)
        for offset, nbytes in self._shape.primary_spans(layer, row):
            room = self.buffer[offset : offset + nbytes]
            await self._link.read(self._key, offset, room, timeout_us=self._timeout_us)
        self._here.add((layer, expert))


class FarExperts:
    """All that are on other nodes, by the rank of their worker."""

    def __init__(self, stores: Mapping[int, FarStore], primaries_E: PrimariesVector) -> None:
        self._stores = stores
        self._primaries_E = primaries_E

    def has(self, held: HeldCopy) -> bool:
        """Whether the copy's source can be read here."""
        store = self._stores.get(int(self._primaries_E[held.expert]))
        return store is None or store.has(held.layer, held.expert)

    async def fetch(self, held: HeldCopy) -> None:
        """Brings the copy's source here. Raises ``TransportError``."""
        await self._stores[int(self._primaries_E[held.expert])].fetch(held.layer, held.expert)
