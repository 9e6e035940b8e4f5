"""Files that a user names: read with a bound before anything is started, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from afore.core.errors import ConfigError, HostError

MOST_BYTES: Final = 64 << 20
"""Of an input: an endless one (a device, a pipe that never ends) is refused instead of filling memory."""
PARTIAL: Final = ".partial"
"""How names of files end that are not whole yet: one that is found was left by a process that was killed."""
_LEFT = re.compile(r".+\.[a-z0-9_]{8}\.partial")
_LONGEST_NAME = 200
"""Of a name, what its unfinished file keeps of it: the system takes 255 bytes."""


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


def read_kept(path: Path) -> bytes:
    """A file that an earlier run left. Raises ``OSError``, also for what is no file (a pipe would never end) or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return content


def check_file(option: str, name: str | None) -> None:
    """Raises ``ConfigError`` for a file that could not be written in the end, before hours of work. None names none."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir() or not path.name:
        raise ConfigError(option, f"{name!r} is a directory", "name a file")
    if not path.parent.is_dir():
        raise ConfigError(option, f"there is no directory {path.parent}", "make it, or name a file elsewhere")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(option, f"{name} cannot be written", "name a file elsewhere")


def check_place(path: Path) -> None:
    """Raises ``HostError`` where something is in the way of a file to be: known before the work, not after it."""
    if os.path.lexists(path) and not path.is_file():
        kind = "a directory" if path.is_dir() else "no file"
        raise HostError(str(path), f"it is {kind}, so no result can take its place", "remove it, or write elsewhere")


def sweep(directory: Path) -> None:
    """Removes what ``write_whole`` left in ``directory`` where its process was killed. Only for who alone writes there."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if _LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def write_whole(path: str, content: bytes) -> None:
    """Writes a file so that it appears whole or not at all. Raises ``HostError``."""
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)  # a device or a pipe: written to, never replaced
            return
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(
            prefix=f"{target.name[:_LONGEST_NAME]}.", suffix=PARTIAL, dir=target.parent
        )
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
