"""The doctor's checks of what is installed: Python, libraries, kept kernels, the fork server.

Every check takes what it looks at as an argument with the real thing as default, so that a test can show it another machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from afore.tools.doctor_check import Check


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """3.11 or 3.12; newer ones are untried."""
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "fail", shown, "use Python 3.11 or 3.12: make PYTHON=python3.11 run")
    if version >= (3, 14):
        return Check("python", "warn", f"{shown} (untried)", "use Python 3.11 or 3.12 if anything is odd")
    return Check("python", "ok", f"{shown} at {sys.executable}")


def check_torch(least: tuple[int, int] = (2, 8)) -> Check:
    """Importable, new enough; how many threads it would take by itself, and whether it has OpenMP."""
    try:
        import torch
    except Exception as error:
        return Check(
            "torch", "fail", f"cannot be imported: {error}", "make run installs it; or pip install 'torch>=2.8'"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    openmp = "OpenMP" if "OpenMP" in torch.__config__.parallel_info() else "without OpenMP"
    found = f"{torch.__version__}, {openmp}, {torch.get_num_threads()} threads by default (roles use one)"
    if version < least:
        return Check("torch", "fail", found, f"pip install 'torch>={least[0]}.{least[1]}'")
    return Check("torch", "ok", found)


def _beside_kernels() -> tuple[Callable[..., Any], ...]:
    """A function of each folder that has kernels: numba keeps what it compiles by folder."""
    from afore.models.fused_kernels import compile_fused_kernels
    from afore.scheduler.planner import compile_planner
    from afore.workers.kernels import compile_kernels

    return compile_fused_kernels, compile_planner, compile_kernels


def check_numba_cache(probes: Callable[[], Sequence[Callable[..., Any]]] = _beside_kernels) -> Check:
    """Whether compiled kernels can be kept, and how many are: without that each start compiles them anew."""
    try:
        import numba
    except Exception as error:
        return Check(
            "numba cache", "fail", f"numba cannot be imported: {error}", "make run installs it; or pip install numba"
        )
    try:
        folders = [Path(numba.njit(cache=True)(probe).stats.cache_path) for probe in probes()]
    except RuntimeError as error:
        mend = "set NUMBA_CACHE_DIR to a directory that you may write to; without it every start compiles the kernels"
        return Check("numba cache", "warn", str(error), mend)
    # An index for each kernel; what was compiled for other machines or versions lies in other files.
    count = sum(len(list(folder.glob("*.nbi"))) for folder in folders)
    kept = f"{count} kernels compiled" if count else "no kernel compiled yet (the first start does it)"
    return Check("numba cache", "ok", f"numba {numba.__version__}, {kept}, in {', '.join(map(str, folders))}")


def check_uvloop() -> Check:
    """The event loop of every role process."""
    try:
        import uvloop
    except Exception as error:
        return Check("uvloop", "fail", f"cannot be imported: {error}", "make run installs it; or pip install uvloop")
    return Check("uvloop", "ok", uvloop.__version__)


_START_A_CHILD = """
import multiprocessing, os
process = multiprocessing.get_context("forkserver").Process(target=os._exit, args=(7,))
process.start()
process.join(20)
os._exit(0 if process.exitcode == 7 else 1)
"""


def check_forkserver(python: str = sys.executable, timeout_s: float = 30.0) -> Check:
    """Whether Python's own fork server starts a child here, in a new interpreter (the launcher has another one)."""
    mend = "look at limits on processes (ulimit -u, docker --pids-limit) and at /tmp, where its socket lives"
    begin = time.monotonic()
    # A file, not a pipe: a child that hangs would keep a pipe open, and us with it.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                [python, "-c", _START_A_CHILD], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return Check("fork server", "fail", f"{python}: {error.strerror}", mend)
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Check("fork server", "fail", f"no child within {timeout_s:g} s", mend)
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["the child did not run"]
    if returncode != 0:
        return Check("fork server", "fail", said[-1], mend)
    return Check("fork server", "ok", f"started a child in {time.monotonic() - begin:.1f} s")
