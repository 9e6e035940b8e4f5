"""Files of what one endpoint said and wrote: length-prefixed msgpack, versioned, bounded. Written by ``recording``.

    4 bytes, little-endian length, then one msgpack value; the first is the header (a map), each other one a list:

    ["region", t_ns, label, [[fabric, address, region, nbytes, token], …]]   registered here, by every key that leads to it
    ["write", t_ns, peer, lane, address, region, offset, data, nbytes, notify]   a one-sided write, before it is made
    ["read", t_ns, peer, lane, address, region, offset, nbytes]   a one-sided read, before it is made
    ["message", t_ns, "in" | "out", channel, peer, map]   of a control channel
    ["entry", t_ns, sequence, bytes]   of the plan ring of this endpoint, when it is announced
    ["asked", t_ns, target]   the scheduler plans on the target's demand, which is complete
    ["predicted", t_ns, target]   likewise on what was predicted of it
    ["heard", t_ns, [records, …]]   how many feedback records of each FFN worker the scheduler has taken by now
    ["end", t_ns, records, dropped]

``data`` is None where there were more than ``PAYLOAD_LIMIT`` bytes. Times are the role's clock, one for all processes of a host.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgpack

from afore.core.clock import Clock, WallClock
from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError, HostError
from afore.core.regular_file import open_regular
from afore.core.version import VERSION
from afore.transport.wire_form import fault

WIRE_FILE_FORMAT: Final = 2
SUFFIX: Final = ".wire"
PAYLOAD_LIMIT: Final = 64 << 10
"""Bytes of one write that are kept."""
FILE_LIMIT: Final = 256 << 20
"""Bytes of one file; what comes later is counted."""
BUFFER_BYTES: Final = 64 << 10
RECORD_LIMIT: Final = 32 << 20
REMEDY: Final = "record the run again"
_LENGTH = struct.Struct("<I")


class WireWriter:
    """Appends records to a file. Whatever happens to the file, a role that is recorded goes on."""

    def __init__(self, path: Path, clock: Clock, *, member: str, address: str, limit: int = FILE_LIMIT) -> None:
        """Raises ``HostError`` where the file cannot be made."""
        self._clock = clock
        self._limit = limit
        self._parts: list[bytes] = []
        self._pending = 0
        self._written = 0
        self.records = 0
        self.dropped = 0
        """Records that found no room, or no disk."""
        wall = isinstance(clock, WallClock)
        header = {
            "afore_wire": WIRE_FILE_FORMAT,
            "member": member,
            "address": address,
            "clock": "monotonic" if wall else "virtual",
            "clock_base_ns": clock.now_ns(),
            "unix_base_ns": time.time_ns() if wall else None,
            "host": os.uname().nodename if wall else "",
            "wire_version": WIRE_VERSION,
            "version": VERSION,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Demand, prompts and keys are in it.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostError(
                f"wire file {path}",
                f"cannot be written: {error.strerror}",
                "give --record-wire a directory that you may write to",
            ) from error
        self._file: IO[bytes] | None = os.fdopen(fd, "wb", buffering=0)
        self._append(header)

    def add(self, kind: str, *fields: Any) -> None:
        """Keeps one record, stamped now."""
        if self._file is None or self._written + self._pending > self._limit:
            self.dropped += 1
            return
        self.records += 1
        self._append([kind, self._clock.now_ns(), *fields])

    def _append(self, value: Any) -> None:
        body = msgpack.packb(value, use_bin_type=True)
        self._parts += (_LENGTH.pack(len(body)), body)
        self._pending += len(body) + _LENGTH.size
        if self._pending >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands what is kept to the kernel."""
        data, self._parts, self._pending = b"".join(self._parts), [], 0
        if self._file is None or not data:
            return
        try:
            self._file.write(data)
            self._written += len(data)
        except OSError:
            self.dropped += 1
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Ends the file. Idempotent."""
        if self._file is not None:
            self._append(["end", self._clock.now_ns(), self.records, self.dropped])
            self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


class WireFile:
    """A recorded file. ``records`` may be read as often as one likes."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ``ConfigError`` for what is no such file, or of another format or wire version."""
        self.path = path
        self.torn = False
        """Whether the last ``records`` ended within a record: the role was killed, or still runs."""
        header = next(self._values(), None)
        if not isinstance(header, dict) or "afore_wire" not in header:
            raise ConfigError(str(path), "is no file of --record-wire")
        if header["afore_wire"] != WIRE_FILE_FORMAT or header.get("wire_version") != WIRE_VERSION:
            theirs = f"format {header['afore_wire']!r}, wire version {header.get('wire_version')!r}"
            ours = f"{WIRE_FILE_FORMAT} and {WIRE_VERSION}"
            raise ConfigError(
                str(path), f"was recorded in {theirs}; this AFORE reads {ours}", "read it with that version"
            )
        for name in ("member", "address"):
            if type(header.get(name)) is not str:
                raise ConfigError(str(path), f"its header lacks {name!r}", REMEDY)
        self.member, self.address = header["member"], header["address"]

    def records(self) -> Iterator[list[Any]]:
        """Every whole record after the header, in order. Raises ``ConfigError`` at the first that is damaged."""
        values = self._values()
        next(values, None)
        for number, value in enumerate(values):
            wrong = fault(value)
            if wrong:
                raise ConfigError(str(self.path), f"holds a damaged record, number {number}: {wrong}", REMEDY)
            yield value

    def _values(self) -> Iterator[Any]:
        self.torn = False
        try:
            with open_regular(self.path) as file:
                while length := file.read(_LENGTH.size):
                    nbytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else RECORD_LIMIT + 1
                    body = file.read(nbytes) if nbytes <= RECORD_LIMIT else b""
                    if len(body) != nbytes:
                        self.torn = True
                        return
                    try:
                        yield msgpack.unpackb(body, raw=False, strict_map_key=True)
                    except (ValueError, RecursionError, msgpack.UnpackException):
                        self.torn = True
                        return
        except OSError as error:
            raise ConfigError(str(self.path), f"cannot be read: {error.strerror}") from error
