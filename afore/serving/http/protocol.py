"""Connections that do not ask for anything are closed: uvicorn's h11 with a deadline for the head of a request.

uvicorn bounds the pause between two requests, and the door bounds the body; the head alone could take for ever, and every such
connection holds a descriptor.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def h11_with_head_deadline(head_s: float) -> type[H11Protocol]:
    """uvicorn's h11 protocol, closing a connection whose next request's head is not whole ``head_s`` after it could begin."""

    class HeadDeadline(H11Protocol):
        _due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_head()
            elif self._due is None:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            self._forget_head()
            self._due = self.loop.call_later(head_s, self._close_idle)

        def _forget_head(self) -> None:
            if self._due is not None:
                self._due.cancel()
                self._due = None

        def _close_idle(self) -> None:
            self._due = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return HeadDeadline
