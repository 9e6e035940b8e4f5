"""Regions and mappings of the shm fabric: what their users hold."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from afore.core.errors import RegionRevoked
from afore.transport.api import Notification, RegionKey
from afore.transport.idle import Idle
from afore.transport.queues import Inbox
from afore.transport.shm_segments import Mapping, Segment


class ShmRegion:
    """A ``Region`` in a shared-memory segment; made by ``ShmFabric.register``."""

    def __init__(
        self,
        segment: Segment,
        key: RegionKey,
        label: str,
        *,
        look: Callable[[], None],
        idle: Idle | None,
        forget: Callable[[ShmRegion], None],
    ) -> None:
        self._segment = segment
        self._key = key
        self._label = label
        self._forget = forget
        self.inbox = Inbox(key.address, label, look=look, idle=idle)

    @property
    def key(self) -> RegionKey:
        return self._key

    @property
    def nbytes(self) -> int:
        return self._key.nbytes

    @property
    def buffer(self) -> memoryview:
        if not self._segment.open:
            raise RegionRevoked(self._key.address, f"region {self._label!r} is closed", "register a new one")
        return self._segment.view

    def notified(self, *, timeout_us: float | None) -> Coroutine[Any, Any, list[Notification]]:
        # The inbox's own coroutine: one frame less on the way of each wake-up.
        return self.inbox.take(timeout_us)

    def close(self) -> None:
        if self._segment.open:
            self._segment.close()
            self._forget(self)
            self.inbox.revoke(self._label, self._key.address, "was closed")


class ShmMapping:
    """A ``MappedRegion``; made by ``ShmFabric.map``."""

    def __init__(self, mapping: Mapping, *, forget: Callable[[ShmMapping], None]) -> None:
        self._mapping: Mapping | None = mapping
        self._key = mapping.key
        self._forget = forget

    @property
    def buffer(self) -> memoryview:
        if self._mapping is None:
            raise RegionRevoked(
                self._key.address, f"this mapping of region {self._key.region} is closed", "map it again"
            )
        return self._mapping.view

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
            self._forget(self)
