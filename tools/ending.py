"""How a tool's process ends: its status, and no traceback where a reader went away, a disk is full, or somebody ended it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from afore.core.descriptors import fill_standard_descriptors
from afore.core.ending import end_process
from afore.core.errors import HostError

PIPE_STATUS = 141
"""What a shell reports of a command that writes to a closed pipe: 128 + SIGPIPE."""
INTERRUPTED_STATUS = 130
"""128 + SIGINT."""
TERMINATED_STATUS = 143
"""128 + SIGTERM."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and exits with what it returns; ``tool | head``, Ctrl-C and SIGTERM end it quietly, a full disk with one line.

    Ctrl-C and SIGTERM take the way out: children are ended, and what was only for the run is removed.
    """
    fill_standard_descriptors()
    terminated = _take_sigterm()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows ? for µ
    try:
        status = main()
        flush_output()
    except BrokenPipeError:
        lose_output()
        status = PIPE_STATUS
    except SystemExit as gone:
        if not isinstance(gone.__context__, BrokenPipeError):
            raise
        status = PIPE_STATUS  # what rich makes of it
    except KeyboardInterrupt:
        status = TERMINATED_STATUS if terminated() else INTERRUPTED_STATUS
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


def _take_sigterm() -> Callable[[], bool]:
    """SIGTERM does what Ctrl-C does, whatever that is just then; whether it has come.

    An exception of its own would break off whichever callback an event loop is in, where Ctrl-C cancels the loop's main task.
    """
    came = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As behind a shell's &: Ctrl-C stays none of our business, and asyncio has its handler to replace.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signum, signal.SIG_DFL)  # who asks again does not wait for the way out
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, terminate)
    return lambda: came


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
