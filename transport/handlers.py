"""Tasks that serve accepted control channels: one each, ended with their fabric, never taking it down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from afore.core.errors import TransportError
from afore.transport.api import Channel, ChannelHandler

_log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long a cancelled handler may take to clean up."""


class HandlerTasks:
    """The running handlers of one endpoint."""

    def __init__(self, address: str) -> None:
        self._address = address
        # A dict, because the order of a set would differ from run to run.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, handler: ChannelHandler, channel: Channel) -> None:
        """Gives ``channel`` to ``handler`` in a task of its own; a handler that fails closes its channel."""
        self.start_job(self._serve(handler, channel), f"channel {self._address}<{channel.peer}")

    def start_job(self, job: Coroutine[Any, Any, None], name: str) -> None:
        """Runs ``job``, which handles its own errors, until it ends or the endpoint does."""
        task = asyncio.get_running_loop().create_task(job, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    async def _serve(self, handler: ChannelHandler, channel: Channel) -> None:
        try:
            await handler(channel)
        except TransportError as error:
            _log.info("channel of %s to %s ended: %s", self._address, channel.peer, error)
            await channel.close()
        except Exception:
            _log.exception("the handler of a channel of %s to %s failed", self._address, channel.peer)
            await channel.close()

    def cancel(self) -> None:
        """Cancels all but the calling task."""
        for task in self._others():
            task.cancel()

    async def ended(self) -> None:
        """Returns when all but the calling task are done, or after ``GRACE_S`` for those that swallow their cancellation."""
        others = self._others()
        if others:
            _, stuck = await asyncio.wait(others, timeout=GRACE_S)
            for task in stuck:
                _log.error("%s does not end: its handler swallows cancellation", task.get_name())

    def _others(self) -> list[asyncio.Task[None]]:
        current = asyncio.current_task() if _in_loop() else None
        return [task for task in self._tasks if task is not current]


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
