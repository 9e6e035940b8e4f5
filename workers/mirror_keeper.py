"""The lead's part in bringing inputs from other nodes: publish what has come, wake everybody on the node."""

from __future__ import annotations

from collections.abc import Sequence

from afore.core.errors import WireError
from afore.transport.api import Link, Region, RegionKey
from afore.transport.bells import BellKind, decode
from afore.transport.input_mirror import InputMirror
from afore.workers.belfry import Belfry


class MirrorKeeper:
    """``neighbours``: (link, bells) of the other FFN workers of this node."""

    def __init__(
        self,
        region: Region,
        mirror: InputMirror,
        belfry: Belfry,
        neighbours: Sequence[tuple[Link, RegionKey]],
        *,
        timeout_us: float,
    ) -> None:
        self._region = region
        self._mirror = mirror
        self._belfry = belfry
        self._neighbours = neighbours
        self._timeout_us = timeout_us

    async def run(self) -> None:
        """Listens. Raises ``RegionRevoked`` once the region is closed, ``WireError`` for what is no announcement of inputs."""
        while True:
            immediate = 0
            for notification in await self._region.notified(timeout_us=None):
                immediate = notification.immediate
                bell = decode(immediate)
                if bell.kind is not BellKind.INPUTS:
                    raise WireError(
                        notification.peer, f"rang {bell.kind.name} at the input mirror", "do versions agree?"
                    )
                self._mirror.publish(bell.rank, bell.microbatch)
                self._belfry.heard(bell)
            # Bells are hints: one says "look" for all that has come.
            for link, key in self._neighbours:
                await link.write(key, 0, b"", notify=immediate, timeout_us=self._timeout_us)
