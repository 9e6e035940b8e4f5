"""A client in the hub's own process: the same events as ``client.Client``, without a channel in between."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from afore.core import control
from afore.core.clock import deadline
from afore.core.errors import RequestError, RoleLost
from afore.serving.client import Event, failure
from afore.serving.hub import Hub


class LocalClient:
    """Submits requests to the engine beside it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._number = hub.attach(self._take)
        self._asks: dict[str, tuple[Ask, int]] = {}
        self._next_name = 0
        self._closed: RoleLost | None = None
        self._stats: dict[int, asyncio.Future[str]] = {}
        self._next_ticket = 0

    @contextlib.contextmanager
    def ask(self, submits: Sequence[control.Submit]) -> Iterator[Ask]:
        """Submits one or several requests (their names are given here) whose events come as one stream; what has not ended when
        the block ends is cancelled.

        Raises ``RequestError`` (``PromptTooLong``, ``QueueFull``) or ``RoleLost`` when one of them is refused; then none runs.
        """
        if self._closed is not None:
            raise self._closed
        ask = Ask()
        names = []
        try:
            for choice, submit in enumerate(submits):
                name = f"r{self._next_name}"
                self._next_name += 1
                names.append(name)
                self._asks[name] = (ask, choice)
                self._hub.from_local(self._number, dataclasses.replace(submit, request=name))
                if ask.refused is not None:
                    raise ask.refused
            yield ask
        finally:
            for name in names:
                # Those that have ended are not here any more.
                if self._asks.pop(name, None) is not None:
                    self._hub.from_local(self._number, control.Cancel(name))

    async def stats(self, *, timeout_us: float) -> dict[str, Any]:
        """The scheduler's statistics so far. Raises ``DeadlineExceeded``."""
        ticket = self._next_ticket
        self._next_ticket += 1
        future = self._stats[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._hub.from_local(self._number, control.StatsRequest(ticket))
            async with deadline(timeout_us, peer="scheduler-0", operation="statistics"):
                return dict(json.loads(await future))
        finally:
            del self._stats[ticket]

    def close(self, reason: str) -> None:
        """Every request ends with ``RoleLost``, and so does every later one; idempotent."""
        if self._closed is None:
            self._closed = RoleLost("door-0", reason)
            for name in list(self._asks):
                self._take(control.Failed(name, "RoleLost", f"door-0: {reason}", self._closed.hint))
            self._hub.detach(self._number)

    def _take(self, message: control.Message) -> None:
        if isinstance(message, control.TokenOut | control.Finished | control.Failed):
            found = self._asks.get(message.request)
            if found is not None:
                ask, choice = found
                if not isinstance(message, control.TokenOut):
                    del self._asks[message.request]
                ask.put(choice, message)
        elif isinstance(message, control.Stats):
            future = self._stats.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message.payload)


class Ask:
    """The events of requests that were submitted together."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.refused: RequestError | RoleLost | None = None
        """What refused or ended one of them."""

    def put(self, choice: int, event: Event) -> None:
        """What has happened to the ``choice``-th request."""
        if isinstance(event, control.Failed) and self.refused is None:
            self.refused = failure(event)
        self._queue.put_nowait((choice, event))

    async def next(self) -> tuple[int, control.TokenOut | control.Finished]:
        """(which request, event), in the order they came. Raises what ended a request without its tokens."""
        choice, event = await self._queue.get()
        if isinstance(event, control.Failed):
            raise failure(event)
        return choice, event
