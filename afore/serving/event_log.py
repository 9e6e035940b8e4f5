"""Everything that happened in a virtual run, in a form that two runs can be compared by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from afore.core.trace import Span


class EventLog:
    """The records of every process (spans, published entries, tokens at the client), each process's in its own order."""

    def __init__(self) -> None:
        self._records: dict[str, list[Span]] = {}

    def take(self, process: str, records: list[Span]) -> None:
        """A tracer's ``Listener``."""
        self._records.setdefault(process, []).extend(records)

    def instant(self, process: str, name: str, at_ns: int, **args: Any) -> None:
        """Adds one moment."""
        self._records.setdefault(process, []).append(Span("instant", name, None, at_ns, at_ns, args))

    def records(self, name: str, process: str = "") -> list[Span]:
        """The records called ``name``, of one process or of those whose name begins with ``process``, by process."""
        return [
            record
            for owner in sorted(self._records)
            if owner.startswith(process)
            for record in self._records[owner]
            if record.name == name
        ]

    def lines(self) -> Iterator[str]:
        """One JSON list a record: process, kind, name, target, start, end, arguments; by process name, then in its order."""
        for process in sorted(self._records):
            for kind, name, target, start_ns, end_ns, args in self._records[process]:
                where = None if target is None else astuple(target)
                yield json.dumps([process, kind, name, where, start_ns, end_ns, args], sort_keys=True)

    def to_bytes(self) -> bytes:
        """All of it: equal runs have equal bytes."""
        return "".join(f"{line}\n" for line in self.lines()).encode()

    def digest(self) -> str:
        """SHA-256 of the bytes, for logs of different processes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()
