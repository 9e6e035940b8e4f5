"""Starts a topology's processes through the zygote, notices the first that ends, and sees all of them out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from afore.core.clock import deadline
from afore.core.config import RunConfig
from afore.core.errors import CheckpointError, ConfigError, HostError
from afore.serving.preload import KERNELS
from afore.serving.spec import ProcessSpec, config_to_json

ZYGOTE = "fork server"
COMPILE_PATIENCE_S = 900.0
"""How long one group of kernels may compile."""
_REFUSALS = {kind.__name__: kind for kind in (ConfigError, CheckpointError, HostError)}


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended."""

    name: str
    status: int

    @property
    def reason(self) -> str:
        """``killed by SIGKILL``, ``ended with status 1``."""
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


class Supervisor:
    """The processes of one cluster. Use as ``async with Supervisor() as supervisor``: nothing is left behind on exit."""

    def __init__(self, policy: str, on_progress: Callable[[str], None] | None = None) -> None:
        """``policy`` is the one whose planner is compiled ahead, as the configuration names it.

        ``on_progress`` hears what the fork server does until it is ready, then an empty text.
        """
        self._policy = policy
        self._on_progress = on_progress or _nobody
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reports: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._moved = asyncio.Event()
        self._doing = "starting"
        """What the fork server does until it is ready."""
        self._checked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._expected: set[str] = set()
        self._exits: list[Exit] = []
        self._changed = asyncio.Condition()
        self.pids: dict[str, int] = {}
        """Process id of each role process, by name."""

    async def __aenter__(self) -> Supervisor:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # A policy that this process can import is found by the scheduler's too, also where a script's own folder holds it.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        try:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "afore.serving.zygote",
                    str(theirs.fileno()),
                    self._policy,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            )
            try:
                self._process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # A signal in this very moment: what has been started must not outlive us.
                process = await starting
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reports = asyncio.create_task(self._read(reader), name="zygote reports")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(grace_s=0.0)

    async def check(self, config: RunConfig, *, timeout_s: float) -> list[str]:
        """Has the fork server look at policy, checkpoint and lengths; returns what each role will take, a line each.

        Raises the ``ConfigError``, ``CheckpointError`` or ``HostError`` that refuses the configuration.
        """
        await self._imported(timeout_s)
        assert self._writer is not None
        self._writer.write(json.dumps({"check": config_to_json(config)}).encode() + b"\n")
        async with deadline(timeout_s * 1e6, peer=ZYGOTE, operation="checking the configuration"):
            answer = await self._answer()
        if "refused" in answer:
            kind, *parts = answer["refused"]
            raise _REFUSALS[kind](*parts)
        return list(answer["memory"])

    async def _answer(self) -> dict[str, Any]:
        """What the check found. Raises ``HostError`` where the fork server ends instead."""
        assert self._reports is not None
        answer = asyncio.create_task(self._checked.get())
        try:
            await asyncio.wait({answer, self._reports}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise HostError(ZYGOTE, "it ended while it looked at the configuration", "its message stands above")
            return await answer
        finally:
            answer.cancel()

    async def _imported(self, timeout_s: float) -> None:
        """Returns once the fork server can fork. Raises ``HostError`` where it ends, or stands still for ``timeout_s``.

        Kernels are given more time: a group of them compiles for a minute on an idle machine, and what is compiled is kept.
        """
        reports = self._reports
        assert reports is not None
        while not self._ready.is_set():
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            patience_s = max(timeout_s, COMPILE_PATIENCE_S) if self._doing.startswith(KERNELS) else timeout_s
            done, _ = await asyncio.wait({moved, reports}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            if not done:
                raise HostError(
                    "fork server",
                    f"{self._doing}: not done after {patience_s:g} s; the machine is very busy",
                    "start again (compiled kernels are kept), or raise --times.join_s",
                )
            if reports in done and not self._ready.is_set():
                raise HostError("fork server", "it ended before it was ready", "its message stands above")

    async def start(self, specs: Sequence[ProcessSpec], *, timeout_s: float) -> None:
        """Forks one process for each spec. Raises ``HostError`` when the fork server does not come up."""
        assert self._writer is not None
        await self._imported(timeout_s)
        for spec in specs:
            self._expected.add(spec.name)
            self._writer.write(json.dumps({"fork": spec.to_json()}).encode() + b"\n")
        await self._writer.drain()

    async def first_exit(self) -> Exit:
        """Returns when a process has ended (or the fork server with all of them)."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._exits)
        return self._exits[0]

    async def exit_of(self, name: str) -> Exit:
        """Returns when that process has ended. Where the fork server ended before it, and took it along, its end is the answer."""
        names = (name, ZYGOTE)
        async with self._changed:
            await self._changed.wait_for(lambda: any(exit_.name in names for exit_ in self._exits))
        return next(exit_ for exit_ in self._exits if exit_.name in names)

    async def all_exited(self) -> None:
        """Returns when every process has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._expected)

    async def stop(self, *, grace_s: float) -> None:
        """Waits ``grace_s`` for the processes to end by themselves, then ends them; idempotent.

        The zygote's own session makes one signal reach everything that is left.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.all_exited()
        assert self._writer is not None
        assert self._reports is not None
        left = list(self.pids.values())
        self._writer.close()
        if self._ready.is_set():
            # The end of its socket: it sends SIGTERM to its children and waits for them.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0 if self._expected else 3.0):
                    await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        # Who would reap them is dead too. Until they are, they hold the locks that keep their shared memory from being swept.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while any(map(_lives, left)):  # noqa: ASYNC110  # the kernel sets no event for a process that is not our child
                    await asyncio.sleep(0.01)
        self._reports.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reports

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                report = json.loads(line)
                if "ready" in report:
                    self._on_progress("")
                    self._ready.set()
                    self._moved.set()
                elif "progress" in report:
                    self._doing = report["progress"]
                    self._moved.set()
                    self._on_progress(self._doing)
                elif "checked" in report:
                    self._checked.put_nowait(report["checked"])
                elif "forked" in report:
                    self.pids[report["forked"]] = report["pid"]
                else:
                    await self._ended(Exit(report["exited"], report["status"]))
        if self._process is not None and self._expected:
            # Nobody asked it to end.
            await self._ended(Exit(ZYGOTE, await self._process.wait()))
        for name in sorted(self._expected):
            await self._ended(Exit(name, -signal.SIGKILL))

    async def _ended(self, exit_: Exit) -> None:
        self._expected.discard(exit_.name)
        self._exits.append(exit_)
        async with self._changed:
            self._changed.notify_all()


def _nobody(_: str) -> None:
    """Nobody wants to know."""


def _lives(pid: int) -> bool:
    """Whether a process still holds what it held: false for one that is gone, or waits only for being reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        # The first thread of a killed process may be dead while others still end, and they share its files.
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
