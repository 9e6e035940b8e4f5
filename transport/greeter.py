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
from afore.core.link_options import TcpOptions
from afore.transport.handshake import Hello, Identity, Purpose, receive_hello
from afore.transport.sockets import Listener
from afore.transport.streams import is_path, listen_stream
from afore.transport.unix_sockets import require_same_user

_log = logging.getLogger(__name__)

GREETINGS_LIMIT = 1024
"""Handshakes that may be under way; one more ends the oldest, so that idle connections cannot lock others out."""

Welcome = Callable[[socket.socket, Hello], Awaitable[None]]
"""Takes over a proven connection (and closes its socket if it raises)."""


class Greeter:
    """Accepts connections and gives the proven ones to the ``Welcome`` of the address they came to."""

    def __init__(self, *, timeout_us: float, limit: int = GREETINGS_LIMIT, tuning: TcpOptions | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        """How many connections were refused, by the error's name."""
        self._timeout_us = timeout_us
        self._limit = limit
        self._tuning = tuning or TcpOptions()
        self._listeners: dict[str, Listener] = {}
        self._greetings: dict[asyncio.Task[None], socket.socket] = {}
        self._leaving: dict[asyncio.Task[None], socket.socket] = {}

    def listen(
        self,
        address: str,
        identify: Callable[[str], Identity],
        purposes: Callable[[], frozenset[Purpose]],
        welcome: Welcome,
    ) -> str:
        """Listens at ``address`` until ``close``; returns it, with the port that the kernel chose where it had 0.

        ``identify`` says who this side is at an address. Raises ``HostError``, ``ConfigError``, ``FileNotFoundError`` (no such
        folder).
        """

        def accepted(sock: socket.socket) -> None:
            while len(self._greetings) >= self._limit:
                oldest = next(iter(self._greetings))
                self._leaving[oldest] = self._greetings.pop(oldest)
                oldest.cancel()
                self._count("Crowded", at, "too many handshakes at once")
            task = asyncio.get_running_loop().create_task(
                self._greet(sock, at, me, purposes(), welcome), name=f"greeting {at}"
            )
            self._greetings[task] = sock
            task.add_done_callback(self._forget)

        listener = listen_stream(address, accepted, self._tuning)
        at = listener.address
        try:
            # Nobody is accepted before this returns to the event loop.
            me = identify(at)
        except BaseException:
            listener.close()
            raise
        self._listeners[at] = listener
        return at

    def listens_at(self, address: str) -> bool:
        """Whether this greeter has a listener there."""
        return address in self._listeners

    def _forget(self, task: asyncio.Task[None]) -> None:
        sock = self._greetings.pop(task, None) or self._leaving.pop(task, None)
        if sock is not None and task.cancelled():
            # A task that is cancelled before its first step never comes to close anything itself.
            sock.close()

    async def _greet(
        self, sock: socket.socket, at: str, me: Identity, purposes: frozenset[Purpose], welcome: Welcome
    ) -> None:
        who = f"client of {at}"
        try:
            async with deadline(self._timeout_us, peer=who, operation="handshake"):
                if is_path(at):
                    require_same_user(sock, who, os.geteuid())
                hello = await receive_hello(sock, me, purposes, peer=who)
        except (AforeError, OSError) as error:
            sock.close()
            self._count(type(error).__name__, at, str(error))
            return
        except BaseException:
            sock.close()
            raise
        try:
            await welcome(sock, hello)
        except (AforeError, OSError) as error:
            self._count(type(error).__name__, at, str(error))

    def _count(self, kind: str, at: str, why: str) -> None:
        self.refusals[kind] += 1
        # A flood of bad clients must not become a flood of lines.
        if self.refusals[kind] & (self.refusals[kind] - 1) == 0:
            _log.warning("%s refused a connection (%s, %d so far): %s", at, kind, self.refusals[kind], why)

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
