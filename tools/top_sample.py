"""What ``top`` asks a running cluster: the hub as one more client, segments read-only, /proc, the door's /metrics.

Nothing is forwarded for it, nothing waits for it: one request for statistics a sample is all that the cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from afore.core.clock import Clock
from afore.core.errors import ConfigError
from afore.serving.client import HUB, Client
from afore.tools.top_links import LinkReader, Seen

LABEL: Final = "top"
"""What this tool's own endpoint is called in the run's directory."""
METRICS_TIMEOUT_S: Final = 2.0
GAUGES: Final[Mapping[str, str]] = {
    "afore_num_requests_running": "running",
    "afore_num_requests_waiting": "waiting",
    "afore_kv_cache_usage_perc": "kv_usage",
}
_PREFIX: Final = "afore-"
_ENDPOINT: Final = re.compile(r"(?P<name>.+)-(?P<pid>\d+)-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the run."""

    name: str
    pid: int
    cpu_s: float
    """User and system, all threads, so far."""
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was so at a moment. What could not be learned is empty or none."""

    at_ns: int
    """When the statistics and processes were asked for."""
    looked_ns: int
    """When shared memory had been looked at."""
    serving: bool
    missing: tuple[str, ...]
    lost: str
    url: str
    stats: Mapping[str, Any]
    """The scheduler's, since the epoch began; empty before it answers."""
    requests: Mapping[str, float]
    """running, waiting, kv_usage; empty where no door listens for HTTP."""
    seen: Seen
    """The ring and the links, as they lie in shared memory."""
    processes: tuple[Process, ...]


def find_run(run: str | None, root: str) -> Path:
    """The run's directory. Raises ``ConfigError`` where none runs here, or more than one and none is named."""
    found = {
        path.name.removeprefix(_PREFIX): path
        for path in sorted(Path(root).glob(f"{_PREFIX}*"))
        if path.is_dir() and (path / HUB).exists()
    }
    if run is not None:
        if run not in found:
            there = f"there are: {', '.join(found)}" if found else "start one: python -m afore.launch"
            raise ConfigError("run", f"no cluster {run!r} runs on this machine", there)
        return found[run]
    if not found:
        raise ConfigError("run", "no cluster runs on this machine", "start one: python -m afore.launch")
    if len(found) > 1:
        raise ConfigError("run", f"{len(found)} clusters run on this machine: {', '.join(found)}", "choose with --run")
    return next(iter(found.values()))


async def take(client: Client, directory: Path, reader: LinkReader, clock: Clock) -> Sample:
    """One sample. Raises ``PeerLost`` once the cluster has ended."""
    stats: Mapping[str, Any] = {}
    if client.status.serving:
        stats = await client.stats()
    status = client.status
    requests = await asyncio.to_thread(read_gauges, status.url) if status.url else {}
    processes = read_processes(directory)
    here = {name for process in processes for name in process.name.split(", ")}
    at_ns = clock.now_ns()
    seen = await asyncio.to_thread(reader.look, status.serving, here)
    return Sample(
        at_ns=at_ns,
        looked_ns=clock.now_ns(),
        serving=status.serving,
        missing=status.missing,
        lost=status.lost,
        url=status.url,
        stats=stats,
        requests=requests,
        seen=seen,
        processes=processes,
    )


def read_processes(directory: Path) -> tuple[Process, ...]:
    """Whose endpoints live in the run's directory, by name; several roles of one process are one line."""
    names: dict[int, list[str]] = {}
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(directory)):
            match = _ENDPOINT.fullmatch(entry)
            if match and match["name"] != LABEL and match["name"] not in names.get(int(match["pid"]), ()):
                names.setdefault(int(match["pid"]), []).append(match["name"])
    found = []
    for pid, mine in names.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                found.append(
                    Process(
                        name=", ".join(mine),
                        pid=pid,
                        cpu_s=times.user + times.system,
                        rss_bytes=process.memory_info().rss,
                    )
                )
    return tuple(sorted(found, key=lambda process: process.name))


def read_gauges(url: str) -> dict[str, float]:
    """Requests and KV cache, from the door; empty where it does not answer."""
    found: dict[str, float] = {}
    # The machine's own door: no proxy is to be asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, ValueError), opener.open(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        for line in answer.read().decode().splitlines():
            name, _, value = line.partition(" ")
            if name in GAUGES:
                found[GAUGES[name]] = float(value)
    return found
