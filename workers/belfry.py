"""An FFN worker's doorbells: one region that everyone rings, one coroutine that says what to look at. Bells are hints only."""

from __future__ import annotations

from collections.abc import Callable

from afore.core.errors import WireError
from afore.core.signal import Signal
from afore.transport.api import Notification, Region
from afore.transport.bells import KIND_SHIFT, Bell, BellKind, decode
from afore.transport.queues import attend


class Belfry:
    """Sets an event for each kind of bell; whoever waits clears it, looks, and waits again."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.plan = Signal()
        """The ring has an entry."""
        self.verdicts = Signal()
        """A set of verdicts is complete."""
        self.inputs = Signal()
        """Inputs of some target have come. The sequencer also wakes itself with it."""
        self.on_inputs: Callable[[int, int], None] | None = None
        """Also told (attention worker, microbatch) of every input bell."""
        self._events: dict[int, Signal] = {
            BellKind.PLAN: self.plan,
            BellKind.VERDICTS: self.verdicts,
            BellKind.INPUTS: self.inputs,
        }

    async def run(self) -> None:
        """Listens. Raises ``RegionRevoked`` once the region is closed, ``WireError`` for a bell that is not for an FFN worker."""
        await attend(self._region, self._hear)

    def _hear(self, notifications: list[Notification]) -> None:
        for notification in notifications:
            kind = notification.immediate >> KIND_SHIFT
            event = self._events.get(kind)
            if event is None or (self.on_inputs is not None and kind == BellKind.INPUTS):
                bell = decode(notification.immediate)
                if not self.heard(bell):
                    raise WireError(notification.peer, f"rang {bell.kind.name} at an FFN worker", "do versions agree?")
            else:
                event.set()

    def heard(self, bell: Bell) -> bool:
        """Sets the event of a bell; False for one that is not for an FFN worker."""
        event = self._events.get(bell.kind)
        if event is None:
            return False
        event.set()
        if bell.kind is BellKind.INPUTS and self.on_inputs is not None:
            self.on_inputs(bell.rank, bell.microbatch)
        return True
