"""``python -m afore.tools.calibrate``: a hardware profile from a run's span files, or measured on this machine."""

from afore.tools.calibrate.command import main

__all__ = ["main"]
