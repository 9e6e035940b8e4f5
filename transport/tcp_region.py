"""Regions of the tcp fabric: what their users hold."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from afore.core.errors import RegionRevoked
from afore.transport.api import Notification, RegionKey
from afore.transport.idle import Idle
from afore.transport.private_segment import PrivateSegment
from afore.transport.queues import Inbox


class TcpRegion:
    """A ``Region``; made by ``TcpFabric.register``."""

    def __init__(
        self,
        segment: PrivateSegment,
        key: RegionKey,
        number: int,
        label: str,
        *,
        look: Callable[[], None],
        idle: Idle | None,
        forget: Callable[[TcpRegion], None],
    ) -> None:
        self._segment = segment
        self._key = key
        self._label = label
        self._forget = forget
        self.number = number
        """The token's: frames name it."""
        self.inbox = Inbox(key.address, label, look=look, idle=idle)

    @property
    def key(self) -> RegionKey:
        return self._key

    @property
    def nbytes(self) -> int:
        return self._key.nbytes

    @property
    def memory(self) -> memoryview:
        """Where frames land."""
        return self._segment.view

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
            # Links are told first: after this no byte lands here.
            self._forget(self)
            self._segment.close()
            self.inbox.revoke(self._label, self._key.address, "was closed")
