"""How a tool's process ends: its status, and no traceback where a reader went away or somebody pressed Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

PIPE_STATUS = 141
"""What a shell reports of a command that writes to a closed pipe: 128 + SIGPIPE."""
INTERRUPTED_STATUS = 130
"""128 + SIGINT."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and exits with what it returns; ``tool | head`` and Ctrl-C end it quietly."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = PIPE_STATUS
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    sys.exit(status)
