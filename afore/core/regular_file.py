"""Opening files that others may have put there: a FIFO waits for its other end for ever, a device does what it does."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """``path`` for reading, at once. Raises ``OSError``, with ``strerror`` ``is no regular file`` for anything else than one."""
    # Looked at first, since opening a device may do something; and again behind the open, since a name can change its file.
    _require(os.stat(path).st_mode, path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require(os.fstat(fd).st_mode, path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _require(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
