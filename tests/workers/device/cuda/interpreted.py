"""Our Triton kernels run by Triton's interpreter, on this machine's CPU: the same source, compiled for nothing.

Triton decides at its first import whether it interprets, for its own functions too. So such tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afore.workers.device.cuda.kernels import Implementation, triton_implementation

SWITCH = "TRITON_INTERPRET"


def interpreted(blocks: tuple[int, int] | None = None) -> Implementation:
    """Both kernels, with such blocks. Skips the test where Triton does not interpret."""
    if os.environ.get(SWITCH) != "1":
        pytest.skip("runs in the interpreter's own process: see test_in_the_interpreter")
    return triton_implementation(blocks)


def run_interpreted(file: str) -> str:
    """Runs the tests of ``file`` whose names say "interpreted", in a process that interprets; what they printed."""
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "interpreted and not gpu"],
        env={**os.environ, SWITCH: "1"},
        cwd=Path(file).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-1000:]
    return child.stdout
