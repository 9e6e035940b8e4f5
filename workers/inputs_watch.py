"""Tells the scheduler which inputs have come, for policies that decide only then (``Policy.wants_inputs``). Rank 0 alone does.

A target has no ring entry yet when its inputs come, so the reader of bells notes who rang, and the header of that input slot says
for which target. One record for each attention worker and target: the scheduler knows how many take part. Bells may be more than
targets: one that is looked at late finds the target of the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from afore.core.target import Target

Arrived = Callable[[int, int], Target | None]
"""(attention worker, microbatch) → the target whose inputs its slot holds."""


class InputsWatch:
    """From bells to feedback records."""

    def __init__(self, arrived: Arrived, report: Callable[[Target], Awaitable[None]]) -> None:
        self._arrived = arrived
        self._report = report
        self._rung: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._told: dict[tuple[int, int], Target] = {}

    def rang(self, attention: int, microbatch: int) -> None:
        """An attention worker rang for its inputs of a microbatch."""
        self._rung.put_nowait((attention, microbatch))

    async def run(self) -> None:
        """Reports, in the order of the bells. Never returns."""
        while True:
            slot = await self._rung.get()
            target = self._arrived(*slot)
            if target is not None and target != self._told.get(slot):
                self._told[slot] = target
                await self._report(target)
