"""Tools end quietly where their reader goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "from afore.tools.ending import end_with\nend_with(lambda: [print('x' * 4096) for _ in range(1000)] and {status})"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads", "status", "prints"),
    [(True, 3, "print"), (False, 141, "print"), (False, 141, "__import__('rich').get_console().out")],
)
def test_a_closed_pipe_ends_a_tool_without_a_traceback(reads: bool, status: int, prints: str) -> None:
    tool = subprocess.Popen(
        [sys.executable, "-c", CODE.format(status=3).replace("print", prints).replace("1000", "100")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert tool.stdout is not None
    assert tool.stderr is not None
    if reads:
        assert tool.stdout.read().count(b"x") == 4096 * 100
    else:
        tool.stdout.read(1)
    tool.stdout.close()
    assert tool.stderr.read() == b""
    assert tool.wait(60) == status
    tool.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here(); threading.Event().wait()", "asyncio.run(waits())", "run_virtual(works)"])
@pytest.mark.parametrize("started", [[], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]], ids=["by hand", "behind an &"])
def test_a_tool_that_is_told_to_end_cleans_up_and_says_nothing(where: str, started: list[str]) -> None:
    code = f"""
import asyncio, threading
from afore.testing import run_virtual
from afore.tools.ending import end_with

def here():
    print("here", flush=True)

async def waits():
    here()
    await asyncio.Event().wait()

async def works():
    here()
    while True:
        await asyncio.gather(*(asyncio.sleep(number) for number in range(9)))

def main():
    try:
        {where}
    finally:
        print("removed what it made")

end_with(main)
"""
    tool = subprocess.Popen(
        [*started, sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert tool.stdout is not None
    assert tool.stdout.readline() == b"here\n"
    tool.terminate()
    assert (*tool.communicate(timeout=60), tool.returncode) == (b"removed what it made\n", b"", 143)


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


@pytest.mark.parametrize(
    "tool",
    sorted({*(ROOT / "tools").rglob("*.py")} - {*(ROOT / "tools").rglob("*_child.py")}),
    ids=lambda path: path.stem,
)
def test_every_tool_ends_so(tool: Path) -> None:
    lines = tool.read_text().splitlines()
    if 'if __name__ == "__main__":' in lines:
        assert lines[-1].strip() == "end_with(main)"


@pytest.mark.slow
def test_a_letter_that_the_terminal_lacks_ends_no_tool() -> None:
    code = "from afore.tools.ending import end_with\nend_with(lambda: print('5 \\u00b5s') or 3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"5 ?s\n", b"")
