"""The end of a process that may have left a thread behind in foreign code."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Ends the process with ``status``, its output flushed.

    A thread that was left behind in torch's store would abort the process while the interpreter winds down, so that is left out
    where there is any daemon thread.
    """
    if not any(thread.daemon for thread in threading.enumerate()):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
