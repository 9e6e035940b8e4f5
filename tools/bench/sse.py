"""Server-sent events, from bytes as they come: a state machine without I/O (WHATWG HTML § 9.2, as far as OpenAI's API needs it)."""

from __future__ import annotations

from typing import Final

MOST_BYTES: Final = 16 << 20
"""Of one event: a stream without an end of line would fill memory."""


class EventReader:
    """Cuts a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that ``received`` completes. Comments and other fields are skipped.

        Raises ``ValueError`` for an event beyond ``MOST_BYTES``.
        """
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + self._held > MOST_BYTES:
            raise ValueError(f"an event of more than {MOST_BYTES >> 20} MiB")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._held += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._held = 0
        return events
