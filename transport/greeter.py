"""Listening sockets of one endpoint, and the handshakes of those who come: bounded in time, number and memory.

A client that fails costs its own connection and a count in ``refusals``; nothing it sends reaches anybody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from afore.core.clock import deadline
from afore.core.errors import AforeError
from afore.transport.handshake import Hello, Identity, Purpose, receive_hello
from afore.transport.sockets import UnixListener, require_same_user

_log = logging.getLogger(__name__)

GREETINGS_LIMIT = 1024
"""Handshakes that may be under way; one more ends the oldest, so that idle connections cannot lock others out."""

Welcome = Callable[[socket.socket, Hello], Awaitable[None]]
"""Takes over a proven connection (and closes its socket if it raises)."""


class Greeter:
    """Accepts connections and gives the proven ones to the ``Welcome`` of the address they came to."""

    def __init__(self, *, timeout_us: float, limit: int = GREETINGS_LIMIT) -> None:
        self.refusals: Counter[str] = Counter()
        """How many connections were refused, by the error's name."""
        self._timeout_us = timeout_us
        self._limit = limit
        self._listeners: dict[str, UnixListener] = {}
        self._greetings: dict[asyncio.Task[None], socket.socket] = {}
        self._leaving: dict[asyncio.Task[None], socket.socket] = {}

    def listen(self, path: str, me: Identity, purposes: Callable[[], frozenset[Purpose]], welcome: Welcome) -> None:
        """Listens at ``path`` until ``close``. Raises ``HostError``, ``FileNotFoundError`` (no such folder)."""

        def accepted(sock: socket.socket) -> None:
            while len(self._greetings) >= self._limit:
                oldest = next(iter(self._greetings))
                self._leaving[oldest] = self._greetings.pop(oldest)
                oldest.cancel()
                self._count("Crowded", path, "too many handshakes at once")
            task = asyncio.get_running_loop().create_task(
                self._greet(sock, path, me, purposes(), welcome), name=f"greeting {path}"
            )
            self._greetings[task] = sock
            task.add_done_callback(self._forget)

        self._listeners[path] = UnixListener(path, accepted)

    def listens_at(self, path: str) -> bool:
        """Whether this greeter has a listener there."""
        return path in self._listeners

    def _forget(self, task: asyncio.Task[None]) -> None:
        sock = self._greetings.pop(task, None) or self._leaving.pop(task, None)
        if sock is not None and task.cancelled():
            # A task that is cancelled before its first step never comes to close anything itself.
            sock.close()

    async def _greet(
        self, sock: socket.socket, path: str, me: Identity, purposes: frozenset[Purpose], welcome: Welcome
    ) -> None:
        who = f"client of {path}"
        try:
            async with deadline(self._timeout_us, peer=who, operation="handshake"):
                require_same_user(sock, who, os.geteuid())
                hello = await receive_hello(sock, me, purposes, peer=who)
        except (AforeError, OSError) as error:
            sock.close()
            self._count(type(error).__name__, path, str(error))
            return
        except BaseException:
            sock.close()
            raise
        try:
            await welcome(sock, hello)
        except (AforeError, OSError) as error:
            self._count(type(error).__name__, path, str(error))

    def _count(self, kind: str, path: str, why: str) -> None:
        self.refusals[kind] += 1
        # A flood of bad clients must not become a flood of lines.
        if self.refusals[kind] & (self.refusals[kind] - 1) == 0:
            _log.warning("%s refused a connection (%s, %d so far): %s", path, kind, self.refusals[kind], why)

    async def close(self) -> None:
        """Stops listening and ends all handshakes. Idempotent."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        greetings = [*self._greetings, *self._leaving]
        for task in greetings:
            task.cancel()
        if greetings:
            await asyncio.wait(greetings)
