"""Files that a user names: read with a bound before anything is started, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from afore.core.errors import ConfigError, HostError

MOST_BYTES: Final = 64 << 20
"""Of an input: an endless one (a device, a pipe that never ends) is refused instead of filling memory."""


def read_lines(path: str, option: str) -> Iterator[str]:
    """The lines of a UTF-8 file (with or without a byte order mark) or of a pipe that ends, with their line ends.

    Reading blocks, and Ctrl-C ends it: so call it outside the event loop.
    Raises ``ConfigError`` naming ``option`` after ``MOST_BYTES``; ``OSError`` and ``UnicodeDecodeError``.
    """
    left = MOST_BYTES
    with open(path, "rb") as file:
        first = True
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise ConfigError(option, f"{path} has more than {MOST_BYTES >> 20} MiB", "give a part of it")
            yield line.decode("utf-8-sig" if first else "utf-8")
            first = False


def write_whole(path: str, content: bytes) -> None:
    """Writes a file so that it appears whole or not at all. Raises ``HostError``."""
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)  # a device or a pipe: written to, never replaced
            return
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(prefix=target.name, dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _fill(file, content, mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise HostError(path, f"it cannot be written: {error.strerror}", "give a file where there is room") from error


def _fill(file: IO[bytes], content: bytes, mode: int) -> None:
    file.write(content)
    os.fchmod(file.fileno(), mode)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
