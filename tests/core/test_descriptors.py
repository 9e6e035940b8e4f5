"""Closed standard descriptors are filled before anything else takes their numbers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from afore.core.descriptors import fill_standard_descriptors
fill_standard_descriptors()
others = os.open("/dev/null", os.O_RDONLY)
print("written to what the shell closed", flush=True)
os._exit(0 if others > 2 and all(os.get_inheritable(fd) for fd in range(3)) else 1)
"""


def test_closed_descriptors_are_filled() -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, PROGRAM], check=False)
        assert done.returncode == 0, closed
