"""A process's span file, bounded: segments one after another, of which the oldest goes.

``ffn-2.jsonl``, then ``ffn-2.1.jsonl``, ``ffn-2.2.jsonl`` and so on, each with a header of its own and whole lines. A segment is
never renamed nor written again, and an earlier run's is removed rather than emptied: who reads while a run goes on keeps what it
opened.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import IO, Any, Final

from afore.core.clock import Clock, WallClock
from afore.core.errors import HostError
from afore.core.spans import TRACE_FORMAT, split_member
from afore.core.version import VERSION

SEGMENTS: Final = 4
"""Most segments of a process: of a full bound, three quarters are there at least."""
DEFAULT_BYTES: Final = 256 << 20
"""Of a process, in all its segments: about two million records."""
_SEGMENT: Final = re.compile(r"(.*?)(?:\.(\d{1,18}))?\.jsonl", re.DOTALL)


def segment_path(directory: Path, process: str, number: int) -> Path:
    """Where segment ``number`` of ``process`` lies."""
    return directory / (f"{process}.{number}.jsonl" if number else f"{process}.jsonl")


def segment_of(path: Path) -> tuple[str, int] | None:
    """The (process, number) that a path is a segment of by its name; none for other names."""
    match = _SEGMENT.fullmatch(path.name)
    return (match[1], int(match[2] or 0)) if match is not None else None


class SpanWriter:
    """Writes one process's lines; ``most_bytes`` bounds all its segments together.

    Raises ``HostError`` where the first segment cannot be made.
    """

    def __init__(self, directory: Path, process: str, clock: Clock, *, most_bytes: int = DEFAULT_BYTES) -> None:
        self.path = segment_path(directory, process, 0)
        """The first segment."""
        self.written = 0
        """Records written so far, those in segments that are gone included."""
        self._directory = directory
        self._process = process
        self._segment_bytes = max(1, most_bytes // SEGMENTS)
        self._number = 0
        self._nbytes = 0
        self._file: IO[bytes] | None = None
        wall = isinstance(clock, WallClock)
        role, rank = split_member(process)
        self._header: dict[str, Any] = {
            "afore_trace": TRACE_FORMAT,
            "process": process,
            "role": role,
            "rank": rank,
            "clock": "monotonic" if wall else "virtual",
            "clock_base_ns": clock.now_ns() if wall else 0,
            "unix_base_ns": time.time_ns() if wall else None,
            "host": os.uname().nodename if wall else "",
            "version": VERSION,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._open()
        except OSError as error:
            self.close()
            raise HostError(
                f"trace file {self.path}",
                f"cannot be written: {error.strerror}",
                "give --trace a directory with room that you may write to",
            ) from error

    def write(self, text: str, count: int, dropped: int) -> None:
        """Appends whole lines, ``count`` records among them; ``dropped`` of this process so far. Raises ``OSError``."""
        data = text.encode()
        if self._nbytes + len(data) > self._segment_bytes and self._nbytes > self._empty_nbytes:
            self._rotate(dropped)
        self._put(data)
        self.written += count

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sweep(self) -> None:
        """What an earlier run left of this process."""
        for path in self._directory.iterdir():
            found = segment_of(path)
            if found is not None and found[0] == self._process and path.is_file():
                path.unlink()

    def _open(self) -> None:
        path = segment_path(self._directory, self._process, self._number)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by close(); unbuffered: one write a batch
        self._nbytes = 0
        self._put(json.dumps(self._header).encode() + b"\n")
        self._empty_nbytes = self._nbytes

    def _rotate(self, dropped: int) -> None:
        self.close()
        self._number += 1
        self._header |= {"segment": self._number, "before": self.written}
        if self._number >= SEGMENTS:
            segment_path(self._directory, self._process, self._number - SEGMENTS).unlink(missing_ok=True)
        self._open()
        if dropped:
            self._put(f'{{"dropped":{dropped}}}\n'.encode())

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            done = self._file.write(rest)
            self._nbytes += done
            rest = rest[done:]
