"""A pair of processes that exchange messages, led from here."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from afore.core.clock import deadline
from afore.core.errors import HostError, RoleLost, TransportError
from afore.tools.bench.transport_ends import FOLLOW, LEAD, Setting

LINE_BYTES: Final = 64 << 20
START_US: Final = 120e6
MEASURE_US: Final = 600e6
END_US: Final = 10e6
SHARED: Final = "loopback"
"""The way whose two sides share one process."""

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pings:
    """One round of messages and answers."""

    one_way_ns: Nanoseconds
    """Handed over here → there in the other side's hands."""
    round_trip_ns: Nanoseconds
    """Handed over → its answer in hands."""
    cpu_s: float
    """Of all processes of the pair."""

    @property
    def operations(self) -> int:
        """Messages that were delivered, answers too."""
        return 2 * len(self.round_trip_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One round of messages that wait for no answer."""

    count: int
    wall_s: float
    """First handed over → last in the other side's hands."""
    cpu_s: float


class _Process:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, setting: Setting, sides: tuple[str, ...]) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "afore.tools.bench.transport_child",
            json.dumps(dataclasses.asdict(setting)),
            *sides,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        return cls(setting.way, process)

    async def answer(self, operation: str, timeout_us: float) -> dict[str, Any]:
        """Raises ``RoleLost`` where it ended, ``HostError`` and ``TransportError`` for what it says went wrong."""
        assert self._process.stdout is not None
        async with deadline(timeout_us, peer=self._name, operation=operation):
            line = await self._process.stdout.readline()
        if not line:
            raise RoleLost(self._name, f"a process of it ended while {operation}", "its message stands above")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            if found["error"] in ("HostError", "ConfigError"):
                raise HostError(self._name, found["text"])
            raise TransportError(self._name, f"{operation}: {found['error']}: {found['text']}")
        return found

    async def ask(self, command: Mapping[str, Any], operation: str, timeout_us: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()
        return await self.answer(operation, timeout_us)

    async def end(self) -> None:
        """Lets it close what it has; kills it where it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_US / 1e6):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Pair:
    """Both sides of one way; use as ``async with Pair.start(setting) as pair``."""

    def __init__(self, processes: list[_Process]) -> None:
        self._processes = processes

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, setting: Setting) -> AsyncIterator[Pair]:
        """Starts and connects. Raises ``HostError`` where this machine has no such way, ``TransportError``."""
        parts: list[tuple[str, ...]] = [(FOLLOW, LEAD)] if setting.way == SHARED else [(FOLLOW,), (LEAD,)]
        processes: list[_Process] = []
        try:
            for sides in parts:
                processes.append(await _Process.start(setting, sides))
            offers: dict[str, Any] = {}
            for process in processes:
                offers |= (await process.answer("starting", START_US))["offers"]
            await asyncio.gather(*[process.ask(offers, "connecting", START_US) for process in processes])
            yield cls(processes)
        finally:
            await asyncio.gather(*[process.end() for process in processes])

    async def ping(self, *, nbytes: int, count: int, warmup: int) -> Pings:
        """``count`` messages of ``nbytes``, each with its answer of the same size."""
        times, cpu_s = await self._measure("ping", nbytes, count, warmup)
        return Pings(one_way_ns=times["got"] - times["sent"], round_trip_ns=times["back"] - times["sent"], cpu_s=cpu_s)

    async def stream(self, *, nbytes: int, count: int, warmup: int) -> Stream:
        """``count`` messages of ``nbytes`` as fast as they go."""
        times, cpu_s = await self._measure("stream", nbytes, count, warmup)
        return Stream(count=count, wall_s=float(times["ended"][0] - times["began"][0]) / 1e9, cpu_s=cpu_s)

    async def _measure(self, what: str, nbytes: int, count: int, warmup: int) -> tuple[dict[str, Nanoseconds], float]:
        command = {"what": what, "nbytes": nbytes, "count": count, "warmup": warmup}
        said = await asyncio.gather(
            *[process.ask(command, f"measuring {nbytes:,} bytes", MEASURE_US) for process in self._processes]
        )
        times = {
            name: np.frombuffer(base64.b64decode(text), np.int64)
            for answer in said
            for name, text in answer["times"].items()
        }
        return times, sum(answer["cpu_s"] for answer in said)
