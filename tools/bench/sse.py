"""Server-sent events, from bytes as they come: a state machine without I/O (WHATWG HTML § 9.2, as far as OpenAI's API needs it)."""

from __future__ import annotations


class EventReader:
    """Cuts a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that ``received`` completes. Comments and other fields are skipped."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
