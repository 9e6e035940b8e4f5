"""What a figure depends on and a reader must know: machine, versions, load, and who used how much CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console

from afore.core.trace import split_member
from afore.core.version import VERSION

PACKAGES: Final = ("torch", "transformers", "numba", "numpy", "uvloop")


def machine_facts() -> dict[str, Any]:
    """Cores, processor, memory, load average over one minute, versions."""
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "afore": VERSION,
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    """One line for people."""
    return (
        f"machine: {facts['usable_cores']} of {facts['cores']} cores, {facts['processor']}, {facts['memory_gib']} GiB; "
        f"load average {facts['load_average_1min']}; AFORE {facts['afore']}, Python {facts['python']}, torch {facts['torch']}"
    )


def report_console() -> Console:
    """Standard output; where it is a file or a pipe, wide enough that no column is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds (user and system, all threads) that each process has used so far; those that are gone are left out."""
    found = {}
    for name, pid in pids.items():
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        found[name] = times.user + times.system
    return found


def cpu_by_role(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """``{"ffn": {"processes": 2, "cpu_s": 1.5}}`` of what was used between two readings, by role, most first."""
    roles: dict[str, dict[str, float]] = {}
    for name, used in after.items():
        if name in before:
            row = roles.setdefault(split_member(name)[0], {"processes": 0, "cpu_s": 0.0})
            row["processes"] += 1
            row["cpu_s"] += used - before[name]
    return dict(sorted(roles.items(), key=lambda item: -item[1]["cpu_s"]))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
