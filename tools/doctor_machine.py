"""The doctor's checks of the machine: kernel, cores, memory, descriptors, clock."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from afore.tools.doctor_check import GIB, Check, read_text

MEMORY_LEAST: Final = 1 * GIB
MEMORY_ENOUGH: Final = 3 * GIB
"""The default topology takes at most 2 GiB, and the machine has other things to do."""
FILES_LEAST: Final = 256
FILES_ENOUGH: Final = 1024
SLOW_CLOCK_NS: Final = 1_000
"""A clock that costs more than this per reading costs a role more than its spans."""
UNLIMITED: Final = 1 << 60


def check_platform(platform: str = sys.platform) -> Check:
    """Linux: eventfd, /dev/shm and forkserver as they are used here."""
    if platform == "linux":
        return Check("platform", "ok", f"Linux {os.uname().release}, {os.uname().machine}")
    return Check("platform", "fail", platform, "run it on Linux (in a container or virtual machine)")


def check_cores(affinity: int | None = None, cgroup: Path = Path("/sys/fs/cgroup")) -> Check:
    """Cores that this process may use, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quota = cgroup_cpus(cgroup)
    usable = allowed if quota is None else min(float(allowed), quota)
    found = f"{allowed} of {os.cpu_count()} allowed, quota " + ("none" if quota is None else f"{quota:g}")
    if usable < 2:
        mend = "give it 2 cores or more (taskset, docker --cpus); it works with one, but nothing overlaps"
        return Check("cores", "warn", found, mend)
    return Check("cores", "ok", found)


def cgroup_cpus(cgroup: Path) -> float | None:
    """The CPU quota in cores (version 2: cpu.max; version 1: cpu.cfs_quota_us); none without one."""
    fields = read_text(cgroup / "cpu.max").split()
    if not fields:
        fields = [read_text(cgroup / "cpu" / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def check_memory(available: int | None = None, cgroup: Path = Path("/sys/fs/cgroup")) -> Check:
    """Memory that can still be taken, here and in this control group."""
    import psutil

    machine = psutil.virtual_memory().available if available is None else available
    room = min(machine, cgroup_memory(cgroup))
    found = f"{room / GIB:.1f} GiB available" + (", limited by the control group" if room < machine else "")
    mend = "end other programs, or use a smaller topology (--topology with fewer workers)"
    if room < MEMORY_LEAST:
        return Check("memory", "fail", found, mend)
    return Check("memory", "ok" if room >= MEMORY_ENOUGH else "warn", found, "" if room >= MEMORY_ENOUGH else mend)


def cgroup_memory(cgroup: Path) -> int:
    """What the control group leaves, in bytes; a huge number without a limit."""
    for limit, used in (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory" / "memory.limit_in_bytes", cgroup / "memory" / "memory.usage_in_bytes"),
    ):
        with suppress(ValueError):
            return max(0, int(read_text(limit)) - int(read_text(used) or 0))
    return UNLIMITED


def check_eventfd() -> Check:
    """The doorbell of the shm fabric."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            os.eventfd_write(fd, 3)
            works = os.eventfd_read(fd) == 3
        finally:
            os.close(fd)
    except (AttributeError, OSError) as error:
        return Check("eventfd", "fail", f"does not work: {error}", "use a Linux kernel that has eventfd")
    if not works:
        return Check("eventfd", "fail", "does not count", "use a Linux kernel that has eventfd")
    return Check("eventfd", "ok", "works")


def check_files(soft: int | None = None, hard: int | None = None) -> Check:
    """How many file descriptors a role may open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = limits[0] if soft is None else soft
    hard = limits[1] if hard is None else hard
    unlimited = resource.RLIM_INFINITY
    found = f"{'unlimited' if soft == unlimited else soft} (hard {'unlimited' if hard == unlimited else hard})"
    if soft != unlimited and soft < FILES_ENOUGH:
        mend = f"ulimit -n {FILES_ENOUGH * 4}" + ("" if hard == unlimited or hard >= FILES_ENOUGH else " (as root)")
        return Check("file descriptors", "fail" if soft < FILES_LEAST else "warn", found, mend)
    return Check("file descriptors", "ok", found)


def check_clock(
    source: Path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    reading_ns: float | None = None,
) -> Check:
    """What CLOCK_MONOTONIC is made of and what reading it costs: every span reads it twice."""
    cost_ns = _measure_reading_ns() if reading_ns is None else reading_ns
    found = f"{read_text(source) or 'unknown source'}, {cost_ns:.0f} ns a reading"
    if cost_ns > SLOW_CLOCK_NS:
        mend = "boot with clocksource=tsc if the machine's counter is stable; until then spans cost more"
        return Check("clock", "warn", found, mend)
    return Check("clock", "ok", found)


def _measure_reading_ns(readings: int = 2_000, rounds: int = 5) -> float:
    """The best of a few rounds: other programs only ever make it longer."""
    best = float("inf")
    for _ in range(rounds):
        begin_ns = time.perf_counter_ns()
        for _ in range(readings):
            time.monotonic_ns()
        best = min(best, (time.perf_counter_ns() - begin_ns) / readings)
    return best
