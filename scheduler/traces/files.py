"""Files that may be read as a whole: what has no size (a pipe, a device) is refused before it is opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from afore.scheduler.traces.records import TraceError


def regular(path: Path) -> os.stat_result:
    """The file's status. Raises ``TraceError`` for what is no regular file, ``OSError`` where there is nothing."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise TraceError(path, "it is no file: a pipe or a device may never end", "copy what it gives into a file")
    return status
