"""A process with closed standard streams gets ``/dev/null`` there, and nothing else ever has their numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, socket
before = {fd for fd in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{fd}")}
links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in before}
from afore.core.descriptors import fill_standard_descriptors
fill_standard_descriptors()
fill_standard_descriptors()
for fd in (0, 1, 2):
    assert os.readlink(f"/proc/self/fd/{fd}") == links.get(fd, os.devnull), fd
    assert os.get_inheritable(fd), fd
assert socket.socket().fileno() > 2
for name in ("stdin", "stdout", "stderr"):
    assert getattr(__import__("sys"), name) is not None
print("said", flush=True)
raise SystemExit(40 + len(before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-", "<&- 2>&-"])
def test_closed_standard_streams_are_filled(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120)
    assert done.returncode == 43 - closed.count("&-"), done.stderr.decode()
