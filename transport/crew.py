"""A role's tasks: they live and fail together, and a failure comes out as itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from afore.core import control
from afore.core.errors import AforeError, PeerLost, RegionRevoked, TransportError
from afore.transport.session import RoleContext, Stopped

STOP_FOLLOWS_US = 1e6
"""How long a role that has lost a peer waits for the hub's word of the end."""


@asynccontextmanager
async def crew() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure (of the block or of a task) is raised by itself; the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


@asynccontextmanager
async def reporting(ctx: RoleContext) -> AsyncIterator[None]:
    """The block is a role's life: ``Stopped`` ends it well; any other error is told to the hub, as ``Failure``, and raised.

    A peer that is gone may be the first sign of an orderly end, or of another role's loss that the hub will name: only where
    the hub has nothing to say of it is it this role's error.
    """
    try:
        yield
    except Stopped:
        return
    except AforeError as error:
        if isinstance(error, (PeerLost, RegionRevoked)) and await ctx.hub.stop_follows(timeout_us=STOP_FOLLOWS_US):
            return
        try:
            await ctx.hub.send(control.Failure(type(error).__name__, str(error)))
        except TransportError as lost:
            error.add_note(f"the hub could not be told: {lost}")
        raise
