"""The driver's library itself: whether there is one, and the call of it that the bindings would get in the way of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from afore.core.errors import HostError

LIBRARY = "libcuda.so.1"


class NoDriver(HostError):
    """This machine has no library of the driver's."""


def library_loads() -> bool:
    """Whether this machine has the driver's library. It is loaded into this process, and not initialised."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def launch_host_function() -> Callable[[int, int, int], int] | None:
    """``cuLaunchHostFunc`` of the library itself; none where it cannot be loaded, which whoever opens the driver is told.

    The bindings hand the driver a function of their own, which takes the GIL before it calls ours.
    """
    try:
        launch = ctypes.CDLL(LIBRARY).cuLaunchHostFunc
    except (OSError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 3, ctypes.c_int
    call: Callable[[int, int, int], int] = launch
    return call
