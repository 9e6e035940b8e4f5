"""Descriptors 0 to 2 are the standard streams': a process that starts without one must not give its number to a socket."""

from __future__ import annotations

import os
import sys


def fill_standard_descriptors() -> None:
    """Opens ``/dev/null`` at each of the descriptors 0, 1, 2 that is closed (a shell's ``>&-``); the open ones stay as they are.

    To be called before anything opens a file: the kernel gives the lowest free number, and what a library then takes
    for standard output would be that file, or a socket. Python has no ``sys.stdout`` then, and gets one that goes nowhere.
    Raises ``OSError`` where ``/dev/null`` cannot be opened.
    """
    while True:
        found = os.open(os.devnull, os.O_RDWR)
        if found > 2:
            os.close(found)
            break
        # Standard streams go on to children; Python opens everything else to be closed there.
        os.set_inheritable(found, True)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # the interpreter's
