"""A trace that a running role writes: rows are kept as arrays, chunks are written when nobody waits.

A disk that refuses ends the trace, never the role.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from afore.core.errors import HostError
from afore.scheduler.traces import TraceHeader, TraceTarget, TraceWriter

MOST_WAITING: Final = 16
"""Full chunks (a quarter of a MiB each) that wait to be written; with more, the next row waits for the disk."""

_log = logging.getLogger(__name__)


class TraceSink:
    """One run's. ``rows`` of a chunk as ``TraceWriter``."""

    def __init__(self, path: str, header: TraceHeader, *, rows: int | None = None) -> None:
        self._full = asyncio.Event()
        self._writer: TraceWriter | None = None
        try:
            self._writer = TraceWriter(path, header, compress=False, defer=True, rows=rows)
        except HostError as error:
            self._failed(error)

    async def serve(self) -> None:
        """Writes full chunks as they come, until cancelled."""
        while True:
            await self._full.wait()
            self._full.clear()
            self._on_disk(TraceWriter.flush)

    def close(self) -> None:
        """Writes what is left and gives the file its name; idempotent."""
        self._on_disk(TraceWriter.close)
        self._writer = None

    def row(self, row: TraceTarget) -> None:
        """Takes one row."""
        if self._writer is None:
            return
        self._writer.add(row)
        self._taken()
        if self._writer.waiting:
            self._full.set()
            if self._writer.waiting > MOST_WAITING:
                self._on_disk(TraceWriter.flush)

    def _on_disk(self, does: Callable[[TraceWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            does(self._writer)
        except HostError as error:
            self._failed(error)

    def _failed(self, error: HostError) -> None:
        _log.warning("%s; recording ends here; what is there: python -m afore.tools.traces info --partial", error)
        self._writer = None
        self._lost()

    def _taken(self) -> None:
        """A row was taken."""

    def _lost(self) -> None:
        """The disk has refused."""
