"""Regions of the verbs fabric: segments of their own, or memory that the caller has already, registered for remote access.

Closing a region ends it for its owner at once: buffer and notifications raise. Its registration and its
memory live on until every writer that may have a request under way has let go (a queue pair breaks on a request that reaches no
registration), so that what still lands harms nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from afore.core.errors import RegionRevoked
from afore.transport.api import Notification, RegionKey
from afore.transport.idle import Idle
from afore.transport.private_segment import PrivateSegment
from afore.transport.queues import Inbox
from afore.transport.verbs.binding import Memory


class RegionUser(Protocol):
    """An inbound link whose writer was granted a region."""

    def tell_revoked(self, region: int) -> None:
        """Says to the writer that ``region`` is closed; ``VerbsRegion.let_go`` follows."""
        ...


class VerbsRegion:
    """A ``Region``; made by ``VerbsFabric.register`` and ``VerbsFabric.adopt``."""

    def __init__(
        self,
        key: RegionKey,
        label: str,
        view: memoryview,
        *,
        address: int,
        memory: Memory | None,
        segment: PrivateSegment | None,
        idle: Idle | None,
        forget: Callable[[VerbsRegion], None],
    ) -> None:
        """``memory`` is none for an empty region, ``segment`` none for adopted memory."""
        self._key = key
        self._label = label
        self._view: memoryview | None = view
        self._memory = memory
        self._segment = segment
        self._forget = forget
        self._users: dict[RegionUser, None] = {}
        self.address = address
        """Where its bytes begin."""
        self.inbox = Inbox(key.address, label, idle=idle)

    @property
    def key(self) -> RegionKey:
        return self._key

    @property
    def nbytes(self) -> int:
        return self._key.nbytes

    @property
    def rkey(self) -> int:
        """The remote key; 0 for an empty region."""
        return self._memory.rkey if self._memory is not None else 0

    @property
    def lkey(self) -> int:
        """The local key, for requests of this process out of the region or into it."""
        return self._memory.lkey if self._memory is not None else 0

    @property
    def buffer(self) -> memoryview:
        if self._view is None:
            raise RegionRevoked(self._key.address, f"region {self._label!r} is closed", "register a new one")
        return self._view

    def notified(self, *, timeout_us: float | None) -> Coroutine[Any, Any, list[Notification]]:
        # The inbox's own coroutine: one around it would be resumed at every notification.
        return self.inbox.take(timeout_us)

    def grant(self, user: RegionUser) -> None:
        """``user``'s writer may write from now on."""
        self._users[user] = None

    def let_go(self, user: RegionUser) -> None:
        """Nothing of ``user``'s writer is under way any more, or its link has ended."""
        self._users.pop(user, None)
        self._free_if_unused()

    def close(self) -> None:
        if self._view is None:
            return
        self._view = None
        self._forget(self)
        self.inbox.revoke(self._label, self._key.address, "was closed")
        for user in list(self._users):
            user.tell_revoked(self._key.region)
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._view is None and not self._users:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            if self._segment is not None:
                self._segment.close()
