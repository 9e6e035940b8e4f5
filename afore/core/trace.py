"""Spans: plain tuples while running, written late and in batches, one file per process, merged by ``afore.tools.trace``.

Formatting a span costs ten times what keeping it costs, so a role keeps tuples in a bounded buffer, and ``write_spans`` writes
them once a second, a few at a time: a process that is killed loses what it recorded since. A full buffer drops the oldest and
counts them, and so does a full file: what led to the end is what is looked for. Nothing ever waits for a trace.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from afore.core.clock import Clock
from afore.core.span_file import DEFAULT_BYTES, SpanWriter
from afore.core.spans import SPANS, Kind, Span, SpanName, format_record, split_member
from afore.core.target import Target

__all__ = ["SPANS", "Listener", "Span", "SpanName", "Tracer", "split_member", "write_spans"]

DEFAULT_CAPACITY: Final = 1 << 17
"""Records a process keeps between two flushes: about 30 MB."""
WRITE_PERIOD_US: Final = 1e6
"""How often a role's spans are written."""
PIECE: Final = 32
"""Records that are written at once: what else the loop has to do waits for no more."""
CLOSING_PIECE: Final = 4096
"""Records that are written at once when nothing waits any more."""
PAUSE_US: Final = 1e3
"""Between two pieces, at least."""
WRITING_SHARE: Final = 0.05
"""Of a core, at most; a role that records more than this writes loses the oldest."""

Listener = Callable[[str, "list[Span]"], None]
"""Called with the process's name and what was recorded since the last call."""

_log = logging.getLogger(__name__)


class Tracer:
    """Records the spans of one process.

    ``process`` is the member's name (``ffn-2``); ``directory`` gets ``<process>.jsonl``, replacing that of an earlier run; none
    writes no file; ``capacity`` bounds what is kept between flushes, ``most_bytes`` what is kept of it on disk. Without directory
    and listener it is disabled. Appending is safe from the device's threads; ``flush`` and ``close`` belong to one thread.
    Raises ``HostError`` where the file cannot be made.
    """

    def __init__(
        self,
        process: str,
        clock: Clock,
        directory: Path | None,
        capacity: int = DEFAULT_CAPACITY,
        *,
        listener: Listener | None = None,
        most_bytes: int = DEFAULT_BYTES,
    ) -> None:
        if capacity < 1:
            raise ValueError(
                f"capacity {capacity} would keep nothing; give 1 or more, or no directory to disable tracing"
            )
        self.process = process
        self.capacity = capacity
        self.dropped = 0
        """Records lost so far: to a full buffer, or to a disk that failed. Those that a full file let go are not among them."""
        self._clock = clock
        self._buffer: deque[tuple[Kind, str, Target | None, int, int, dict[str, Any]]] = deque()
        self._append = self._buffer.append
        self._told_dropped = 0
        self._file = SpanWriter(directory, process, clock, most_bytes=most_bytes) if directory is not None else None
        self.path = self._file.path if self._file is not None else None
        """The file's first segment."""
        self._listener = listener
        self.enabled = self._file is not None or listener is not None
        """Whether anything is recorded: look here before computing costly arguments."""
        self.only: frozenset[str] | None = None
        """The spans that whoever listens wants; none: all. A hint: others may be kept as well."""

    @property
    def listener(self) -> Listener | None:
        """Who gets each batch at ``flush``, beside the file. It must not raise, nor keep the loop long."""
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = listener
        self.enabled = self._file is not None or listener is not None

    def now_ns(self) -> int:
        """The clock that spans are stamped with."""
        return self._clock.now_ns()

    @property
    def waiting(self) -> int:
        """Records that are not written yet."""
        return len(self._buffer)

    def span(self, name: SpanName, target: Target | None, start_ns: int, end_ns: int, **args: Any) -> None:
        """Keeps one span: ``name`` of ``SPANS``, its target, and when it ran. One append; nothing is checked or formatted here."""
        if self.enabled:
            if len(self._buffer) >= self.capacity:
                self._drop_oldest()
            self._append(("span", name, target, start_ns, end_ns, args))

    def instant(self, name: str, at_ns: int, target: Target | None = None, **args: Any) -> None:
        """Keeps one moment (an epoch, an abort, a refusal)."""
        if self.enabled:
            if len(self._buffer) >= self.capacity:
                self._drop_oldest()
            self._append(("instant", name, target, at_ns, at_ns, args))

    def counter(self, name: str, at_ns: int, value: float) -> None:
        """Keeps one value of a quantity that goes up and down."""
        if self.enabled:
            if len(self._buffer) >= self.capacity:
                self._drop_oldest()
            self._append(("counter", name, None, at_ns, at_ns, {"value": value}))

    def flush(self, most: int | None = None) -> int:
        """Writes and hands out at most ``most`` of the oldest records (all without it); returns how many. About 7 us each."""
        batch = []
        for _ in range(len(self._buffer) if most is None else min(most, len(self._buffer))):
            # popleft, not a swap of buffers: a device thread may be appending, and drop the oldest while it does.
            try:
                batch.append(self._buffer.popleft())
            except IndexError:
                break
        if batch:
            if self._file is not None:
                self._write(batch)
            if self._listener is not None:
                self._listener(self.process, [Span._make(record) for record in batch])
        return len(batch)

    def close(self) -> None:
        """Writes what is left and closes the file; idempotent. What is recorded afterwards is ignored."""
        while self.flush(CLOSING_PIECE):
            pass
        self.enabled = False
        if self._file is not None:
            self._put(f'{{"end":true,"records":{self._file.written},"dropped":{self.dropped}}}\n', 0)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_oldest(self) -> None:
        try:
            self._buffer.popleft()
        except IndexError:  # another thread was faster
            return
        self.dropped += 1

    def _write(self, batch: list[tuple[Kind, str, Target | None, int, int, dict[str, Any]]]) -> None:
        lines = [format_record(*record) for record in batch]
        if self.dropped > self._told_dropped:
            self._told_dropped = self.dropped
            # Before them: what was dropped is older.
            lines.insert(0, f'{{"dropped":{self.dropped}}}\n')
        self._put("".join(lines), len(batch))

    def _put(self, text: str, count: int) -> None:
        assert self._file is not None
        try:
            self._file.write(text, count, self.dropped)
        except OSError as error:
            # A full disk must not end a role that serves: the trace ends, and says so.
            _log.warning("%s: trace file %s failed (%s); spans are no longer written", self.process, self.path, error)
            self.dropped += count
            self._file.close()
            self._file = None
            self.enabled = self._listener is not None


async def write_spans(tracer: Tracer, clock: Clock) -> None:
    """Writes what ``tracer`` keeps once in ``WRITE_PERIOD_US``; runs beside a role of real time until cancelled.

    Between the steps of the loop, ``PIECE`` records at a time and with pauses, so that no target waits for more than one piece and
    no more than ``WRITING_SHARE`` of a core goes into it.
    """
    while True:
        await clock.sleep_us(WRITE_PERIOD_US)
        # What comes meanwhile is the next batch's.
        left = tracer.waiting
        while left > 0:
            begin_ns = clock.now_ns()
            wrote = tracer.flush(min(PIECE, left))
            left = left - wrote if wrote else 0
            took_us = (clock.now_ns() - begin_ns) / 1e3
            await clock.sleep_us(max(PAUSE_US, took_us * (1 / WRITING_SHARE - 1)))
