"""Reads under way: where they land, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from afore.core.errors import TransportError
from afore.transport.verbs.memory import LocalMemory


class Reading:
    """A read under way; it may still land after its reader has gone."""

    def __init__(self, into: memoryview, own: LocalMemory | None) -> None:
        """``own``: where it lands, if not in ``into`` itself."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._into = into
        self._own = own

    def settle(self, ending: Callable[[], TransportError] | None) -> None:
        """It has completed; or never will, and ``ending`` makes the error that says why."""
        if not self.done.done():
            if ending is not None:
                self.done.set_exception(ending())
            else:
                if self._own is not None:
                    self._into[:] = self._own.view
                self.done.set_result(None)
        if self._own is not None:
            self._own.close()


def settle(held: list[object], ending: Callable[[], TransportError] | None = None) -> None:
    """What was held for requests that have completed, or never will (``ending``), is let go."""
    for thing in held:
        if isinstance(thing, Reading):
            thing.settle(ending)
        elif isinstance(thing, LocalMemory):
            thing.close()
