"""Standard input, output and error of a process whose shell closed some of them."""

from __future__ import annotations

import os
import sys


def fill_standard_descriptors() -> None:
    """Puts /dev/null where descriptor 0, 1 or 2 is closed: what is opened next would take its number, and be written to."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one: those below it are there by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
