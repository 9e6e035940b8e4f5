"""How a tool's process ends: its status, and no traceback where a reader went away, a disk is full, or somebody pressed Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from afore.core.descriptors import fill_standard_descriptors
from afore.core.ending import end_process
from afore.core.errors import HostError

PIPE_STATUS = 141
"""What a shell reports of a command that writes to a closed pipe: 128 + SIGPIPE."""
INTERRUPTED_STATUS = 130
"""128 + SIGINT."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and exits with what it returns; ``tool | head`` and Ctrl-C end it quietly, a full disk with one line."""
    fill_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows ? for µ
    try:
        status = main()
        flush_output()
    except BrokenPipeError:
        lose_output()
        status = PIPE_STATUS
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    except HostError as error:
        print(error, file=sys.stderr)
        status = 1
    except OSError as error:
        # Of what was printed by hand: files of a tool have their own words.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        lose_output()
        print(f"cannot be written: {error.strerror}", file=sys.stderr)
        status = 1
    end_process(status)


def flush_output() -> None:
    """Sends on what was printed. Raises ``BrokenPipeError``, or ``HostError`` where it cannot be written otherwise."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        lose_output()
        raise HostError(
            "standard output", f"it cannot be written: {error.strerror}", "send it where there is room"
        ) from error


def lose_output() -> None:
    """Standard output goes nowhere from now on: the interpreter flushes once more at its end, which would fail again."""
    # A stream that has no descriptor has nothing to lose either.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
