"""Tools end quietly where their reader goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "from afore.tools.ending import end_with\nend_with(lambda: [print('x' * 4096) for _ in range(1000)] and {status})"
)


@pytest.mark.slow
@pytest.mark.parametrize(("reads", "status"), [(True, 3), (False, 141)])
def test_a_closed_pipe_ends_a_tool_without_a_traceback(reads: bool, status: int) -> None:
    tool = subprocess.Popen(
        [sys.executable, "-c", CODE.format(status=3)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert tool.stdout is not None
    assert tool.stderr is not None
    if reads:
        assert len(tool.stdout.read()) == 4097 * 1000
    else:
        tool.stdout.read(1)
    tool.stdout.close()
    assert tool.stderr.read() == b""
    assert tool.wait(60) == status
    tool.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize(("output", "status", "told"), [(">&-", 3, ""), ("> /dev/full", 1, "No space left on device")])
def test_no_standard_output_and_a_full_disk(output: str, status: int, told: str) -> None:
    command = [
        "sh",
        "-c",
        f'exec "$@" {output}',
        "sh",
        sys.executable,
        "-c",
        CODE.replace("1000", "1").format(status=3),
    ]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == status
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == bool(told)
