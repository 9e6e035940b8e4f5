"""A part as a process: what it found, why it did not, where it stood when its time was over; and nothing is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afore.tools.gpu_child import run_part
from afore.tools.gpu_claims import ClaimFailed, NotHere
from afore.tools.gpu_part import SPARE_S, write_found

PYTHON = [sys.executable, "-c"]
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({}))"


@pytest.mark.slow
def test_what_a_part_found_or_why_it_did_not() -> None:
    good = run_part([*PYTHON, WRITE.format("{'a_us': 3}")], 60)
    assert good == {"outcome": "passed", "result": {"a_us": 3}}
    bad = run_part([*PYTHON, "raise SystemExit('no kernel image')"], 60)
    assert (bad["outcome"], bad["why"].splitlines()) == ("failed", ["no kernel image", "exit status 1"])
    silent = run_part([*PYTHON, "pass"], 60)
    assert (silent["outcome"], silent["why"]) == ("failed", "exit status 0")
    killed = run_part([*PYTHON, "import os; os.kill(os.getpid(), 9)"], 60)
    assert killed["why"] == "killed by SIGKILL"
    claim = run_part([*PYTHON, WRITE.format("{'failed': 'no pair moved', 'pairs': 3}")], 60)
    assert claim == {"outcome": "failed", "why": "no pair moved", "result": {"pairs": 3}}
    lacking = run_part([*PYTHON, WRITE.format("{'skipped': 'no CUDA IPC'}")], 60)
    assert lacking == {"outcome": "skipped", "why": "no CUDA IPC", "result": {}}


@pytest.mark.slow
def test_a_part_that_runs_into_its_deadline_says_where_it_stands(tmp_path: Path) -> None:
    """All that it has logged is kept, and the place where every thread stands is at the end."""
    script = """
import logging, signal, sys, types
from afore.tools import gpu_part
def stands_here():
    logging.getLogger("afore").info("the driver is slow")
    signal.pause()
sys.modules["afore.tools.gpu_parts"] = types.SimpleNamespace(PARTS={"device": stands_here})
gpu_part.main(["device", *sys.argv[1:]])
"""
    late = run_part([*PYTHON, script], 8, log=tmp_path / "logs" / "device.log")
    assert late["outcome"] == "took too long"
    assert "in stands_here" in late["why"]
    assert "the driver is slow" in late["why"]
    assert "the driver is slow" in (tmp_path / "logs" / "device.log").read_text()


LEAVES = """
import os, subprocess, sys, time
middle = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
'''], start_new_session=True, stdout=subprocess.PIPE, text=True)
print("left", middle.pid, middle.stdout.readline().strip(), flush=True)
{}
"""
RUN = """
import json, subprocess, sys
from afore.tools.gpu_child import adopt_orphans, run_part
other = subprocess.Popen(["sleep", "1000"])
adopt_orphans()
outcome = run_part([sys.executable, "-c", sys.argv[1]], float(sys.argv[2]))
print(json.dumps([outcome, other.poll()]))
other.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "limit_s"), [("time.sleep(1000)", 6), ("sys.exit(3)", 60)])
def test_what_a_part_leaves_ends_with_it_in_whatever_session(end: str, limit_s: float) -> None:
    """A fork server and its roles have sessions of their own; whom the check itself has started goes on."""
    child = subprocess.run(
        [*PYTHON, RUN, LEAVES.format(end), str(limit_s)], capture_output=True, text=True, check=True, timeout=100
    )
    outcome, other = json.loads(child.stdout)
    left = next(line for line in outcome["why"].splitlines() if line.startswith("left")).split()[1:]
    assert len(left) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)
    assert "left" not in outcome
    assert other is None


@pytest.mark.slow
def test_a_part_dies_with_the_check() -> None:
    """Whatever ends it, SIGKILL too."""
    script = """
import os, subprocess, sys
part = subprocess.Popen([sys.executable, "-c", "import os, signal; from afore.tools.gpu_child import end_with_parent; "
    "end_with_parent(os.getppid()); print('ready', flush=True); signal.pause()"], stdout=subprocess.PIPE, text=True)
part.stdout.readline()
print(part.pid, flush=True)
sys.stdin.read()
"""
    check = subprocess.Popen([*PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert check.stdout is not None
    pid = int(check.stdout.readline())
    descriptor = os.pidfd_open(pid)
    check.kill()
    check.communicate()
    try:
        import select

        readable, _, _ = select.select([descriptor], [], [], 60)
        assert readable, "the part lives"
    finally:
        os.close(descriptor)


def test_a_part_writes_what_it_lacks_and_what_does_not_hold(tmp_path: Path) -> None:
    file = tmp_path / "result.json"

    def lacks() -> dict[str, Any]:
        raise NotHere("no CUDA IPC, because of the container")

    def fails(limit_s: float) -> dict[str, Any]:
        assert 0 < limit_s <= 50 - SPARE_S
        raise ClaimFailed("none of 9 pairs", {"pairs": 9})

    parts: dict[str, Callable[..., dict[str, Any]]] = {"ipc": lacks, "serving": fails}
    until = time.monotonic() + 50
    write_found(parts, "ipc", file, until)
    assert json.loads(file.read_text()) == {"skipped": "no CUDA IPC, because of the container"}
    write_found(parts, "serving", file, until)
    assert json.loads(file.read_text()) == {"failed": "none of 9 pairs", "pairs": 9}
