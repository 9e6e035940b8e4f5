"""A role's tasks: they live and fail together, and a failure comes out as itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from afore.core import control
from afore.core.errors import AforeError, TransportError
from afore.transport.session import RoleContext, Stopped


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
    """The block is a role's life: ``Stopped`` ends it well; any other error is told to the hub, as ``Failure``, and raised."""
    try:
        yield
    except Stopped:
        return
    except AforeError as error:
        try:
            await ctx.hub.send(control.Failure(type(error).__name__, str(error)))
        except TransportError as lost:
            error.add_note(f"the hub could not be told: {lost}")
        raise
