"""The lead's part in bringing to its node what comes from others: publish what is all there, wake everybody on the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afore.core.errors import WireError
from afore.transport.api import Link, Region, RegionKey
from afore.transport.bells import Bell, BellKind, decode
from afore.transport.input_mirror import InputMirror
from afore.transport.ring_mirror import RingMirror
from afore.workers.belfry import Belfry

Publish = Callable[[Bell], object]


class MirrorKeeper:
    """Listens on one mirror. ``publish``: what each kind of bell asks for; ``neighbours``: (link, bells) of the node's others."""

    def __init__(
        self,
        region: Region,
        publish: dict[BellKind, Publish],
        belfry: Belfry,
        neighbours: Sequence[tuple[Link, RegionKey]],
        *,
        timeout_us: float,
    ) -> None:
        self._region = region
        self._publish = publish
        self._belfry = belfry
        self._neighbours = neighbours
        self._timeout_us = timeout_us

    async def run(self) -> None:
        """Never returns. Raises ``RegionRevoked`` once the region is closed, ``WireError`` for a bell that means nothing here."""
        while True:
            rung: dict[BellKind, int] = {}
            for notification in await self._region.notified(timeout_us=None):
                bell = decode(notification.immediate)
                publish = self._publish.get(bell.kind)
                if publish is None:
                    raise WireError(notification.peer, f"rang {bell.kind.name} at a mirror", "do versions agree?")
                publish(bell)
                self._belfry.heard(bell)
                rung[bell.kind] = notification.immediate
            # Bells are hints: one of a kind says "look" for all that has come.
            for immediate in rung.values():
                for link, key in self._neighbours:
                    await link.write(key, 0, b"", notify=immediate, timeout_us=self._timeout_us)


def input_bells(mirror: InputMirror) -> dict[BellKind, Publish]:
    """What an input mirror hears."""
    return {BellKind.INPUTS: lambda bell: mirror.publish(bell.rank, bell.microbatch)}


def ring_bells(mirror: RingMirror) -> dict[BellKind, Publish]:
    """What a ring's copy hears: entries, and verdicts that are there already."""
    return {BellKind.PLAN: mirror.publish, BellKind.VERDICTS: _nothing}


def _nothing(_: Bell) -> None:
    """A verdict is a word: it needs no publishing."""
