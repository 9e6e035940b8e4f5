"""Runs the launcher as a user does, and looks at what it leaves behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


class Launcher:
    """``python -m afore.launch …`` in a process of its own."""

    started: ClassVar[list[Launcher]] = []
    """Those of the running test, for its fixture to end."""

    def __init__(self, *arguments: str, cwd: Path = ROOT, prefix: Sequence[str] = ()) -> None:
        """``prefix``: a command that runs another one, such as in another network."""
        self.cluster = f"t{os.getpid()}_{id(self) % 10_000_019}"
        named = (
            ()
            if any(a.startswith(("--role", "--cluster", "--print_config", "--help")) for a in arguments)
            else (
                "--cluster",
                self.cluster,
            )
        )
        # Several clusters of the tests run side by side: none may insist on the default port.
        port = () if any(a.startswith(("--port", "--serve", "--help")) for a in arguments) else ("--port", "0")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "afore.launch", *arguments, *named, *port],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_module_path()), "COLUMNS": "120"},
        )
        Launcher.started.append(self)
        self.seen: list[str] = []
        self._partial = b""

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """The first line of standard output that holds ``text``."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while True:
            while self._partial.count(b"\n"):
                line, _, self._partial = self._partial.partition(b"\n")
                self.seen.append(line.decode() + "\n")
                if text in self.seen[-1]:
                    return self.seen[-1]
            # Below the stream's own buffer, which select knows nothing of.
            readable, _, _ = select.select([fd], [], [], timeout_s)
            data = os.read(fd, 65536) if readable else b""
            if not data:
                self.process.kill()
                raise AssertionError(f"{text!r} never came; seen {self.seen}, then {self.process.communicate()}")
            self._partial += data

    def processes(self) -> list[psutil.Process]:
        """The launcher, its fork server and every role."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def roles(self) -> list[psutil.Process]:
        """The role processes: children of the fork server."""
        return psutil.Process(self.process.pid).children()[0].children()

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """(status, standard output, standard error) once it has ended by itself."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            left = [(p.pid, p.name()) for p in self.processes()]
            self.kill_all()
            raise AssertionError(f"still there after {timeout_s} s: {left}; {self.process.communicate()}") from None
        return self.process.returncode, "".join(self.seen) + self._partial.decode() + out, err

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill_all(self) -> None:
        """kill -9 of everything, fork server and roles first."""
        for process in reversed(self.processes()):
            process.kill()

    def leftovers(self) -> list[str]:
        """What stands in /dev/shm under this cluster's name."""
        return sorted(name for name in os.listdir("/dev/shm") if self.cluster in name)


def _module_path() -> list[str]:
    """This checkout first, then what the tests themselves were given: a machine's RDMA binding may come that way."""
    return [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def run(*arguments: str, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
    """One invocation to its end."""
    return Launcher(*arguments).end(timeout_s)


def gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those of ``processes`` that are still alive after ``timeout_s``."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
