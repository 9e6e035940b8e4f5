"""Small words of the suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from afore.core.errors import RegionRevoked
from afore.transport.api import Fabric, Lane, Link, Notification, Region
from tests.transport.conformance.worlds import World

TIMEOUT_US = 20e6
"""Never reached where things work."""
AT_ONCE_US = 1_000.0
"""For what is expected not to come."""


async def pair(near: Fabric, far: Fabric, nbytes: int = 4096, lane: Lane = Lane.DATA) -> tuple[Link, Region]:
    """A region of ``far`` and a link of ``near`` to it."""
    region = far.register(nbytes, label="target")
    return await near.connect(far.address, lane, timeout_us=TIMEOUT_US), region


async def take(region: Region, count: int) -> list[Notification]:
    """Exactly ``count`` notifications."""
    taken: list[Notification] = []
    while len(taken) < count:
        taken += await region.notified(timeout_us=TIMEOUT_US)
    assert len(taken) == count
    return taken


async def immediates(region: Region, count: int) -> list[int]:
    """The immediates of exactly ``count`` notifications."""
    return [one.immediate for one in await take(region, count)]


async def raises_soon(error: type[Exception], attempt: Callable[[], Awaitable[object]]) -> Exception:
    """The ``error`` that ``attempt`` raises once the event loop has had a few turns."""
    for _ in range(100_000):
        try:
            await attempt()
        except error as caught:
            return caught
        await asyncio.sleep(0)
    pytest.fail(f"{error.__name__} did not come")


async def revoked_soon(world: World, attempt: Callable[[], Awaitable[object]]) -> None:
    """``attempt`` raises ``RegionRevoked``: at once, or where news travel once they have come."""
    if world.tells_late:
        await raises_soon(RegionRevoked, attempt)
    with pytest.raises(RegionRevoked, match="closed"):
        await attempt()


async def until(condition: Callable[[], bool]) -> None:
    """Gives the event loop turns until ``condition`` holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("the condition did not come true")


async def started(*tasks: asyncio.Task[object]) -> None:
    """Lets each task run up to where it waits."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
