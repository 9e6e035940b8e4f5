"""A part of a GPU check as a process: its deadline, what it leaves, and how all that it has started ends with it.

A part starts others in sessions of their own (a fork server and its roles, a test run), which no signal to the part's group
reaches. So whoever runs parts adopts orphans: what a part leaves becomes his child, is found, and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TELL_S = 4.0
"""Before its limit a part is told to say where it stands."""
END_S = 5.0
"""How long what was killed has to end. A process that the driver holds in the kernel ends whenever that lets go of it."""
TAIL = 6000
"""Letters of what a part said that the report repeats; all of it is in the part's log."""
_SUBREAPER, _DEATH_SIGNAL = 36, 1


def adopt_orphans() -> None:
    """What this process's children leave becomes its own: it can be ended. Nothing where the system cannot."""
    _prctl(_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """This process is killed when ``parent``, who started it, ends in whatever way."""
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it has ended before that was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def end_orphans(kept: Sequence[int], *, within_s: float = END_S) -> list[str]:
    """Kills all children of this process but ``kept``, and theirs, which become its own by that; names those that do not end."""
    give_up = time.monotonic() + within_s
    while True:
        left = [pid for pid in children_of(os.getpid()) if pid not in kept]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left:
            return []
        if time.monotonic() > give_up:
            return [f"{pid} ({_name(pid)})" for pid in left]
        time.sleep(0.01)


def children_of(parent: int) -> list[int]:
    """Processes whose parent that is; none where the system shows none."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    status = Path("/proc", entry, "stat").read_text()
                    if int(status.rpartition(")")[2].split()[1]) == parent:
                        found.append(int(entry))
    return found


def run_part(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    log: Path | None = None,
) -> dict[str, Any]:
    """Runs ``command FILE UNTIL``; what it wrote into the file, or why it did not. Ends it, and all that it has started.

    ``log``: where all that was said is kept.
    """
    before = children_of(os.getpid())
    with tempfile.TemporaryDirectory(prefix="afore-gpu-", ignore_cleanup_errors=True) as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        with said.open("wb") as output:
            child = subprocess.Popen(
                [*command, str(result), f"{time.monotonic() + limit_s - TELL_S:.3f}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                left = _end(child, before)
        text = said.read_text(errors="replace")
        if log is not None:
            with contextlib.suppress(OSError):  # a full disk: the tail is in the report
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(text, encoding="utf-8")
        outcome = _outcome(status, limit_s, text[-TAIL:], result)
        if left:
            outcome["left"] = f"did not end when they were killed: {', '.join(left)}"
        return outcome


def _outcome(status: int | None, limit_s: float, said: str, result: Path) -> dict[str, Any]:
    if status is None:
        return {"outcome": "took too long", "why": f"more than {limit_s:.0f} s; where it stood:\n{said}"}
    if status != 0 or not result.exists():
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return {"outcome": "failed", "why": f"{said.rstrip()}\n{ended}" if said.strip() else ended}
    try:
        found = json.loads(result.read_text())
    except ValueError as error:  # it was ended while it wrote
        return {"outcome": "failed", "why": f"its result cannot be read: {error}\n{said}"}
    for outcome, key in (("failed", "failed"), ("skipped", "skipped")):
        if key in found:
            return {"outcome": outcome, "why": found.pop(key), "result": found}
    return {"outcome": "passed", "result": found}


def _end(child: subprocess.Popen[bytes], kept: Sequence[int]) -> list[str]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    return end_orphans(kept)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
