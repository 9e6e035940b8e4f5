"""The doctor's checks: each looks at one thing of this machine and says what it found, whether it will do, and the mend.

Every check takes what it looks at as an argument with the real thing as default, so that a test can show it another machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Status = Literal["ok", "warn", "fail"]
MIB: Final = 1 << 20
GIB: Final = 1 << 30

SHM_LEAST: Final = 32 * MIB
"""The bundled model's regions need a few MiB; less than this is a broken mount."""
SHM_ENOUGH: Final = 256 * MIB
"""Below this a larger model, or a second run, may find no room."""
MEMORY_LEAST: Final = 1 * GIB
MEMORY_ENOUGH: Final = 3 * GIB
"""The default topology takes at most 2 GiB, and the machine has other things to do."""
FILES_LEAST: Final = 256
FILES_ENOUGH: Final = 1024
SLOW_CLOCK_NS: Final = 1_000
"""A clock that costs more than this per reading costs a role more than its spans."""
UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``mend`` says what to do where ``status`` is not ok."""

    name: str
    status: Status
    found: str
    mend: str = ""


def check_platform(platform: str = sys.platform) -> Check:
    """Linux: eventfd, /dev/shm and forkserver as they are used here."""
    if platform == "linux":
        return Check("platform", "ok", f"Linux {os.uname().release}, {os.uname().machine}")
    return Check("platform", "fail", platform, "run it on Linux (in a container or virtual machine)")


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
    fields = _read(cgroup / "cpu.max").split()
    if not fields:
        fields = [_read(cgroup / "cpu" / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
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
            return max(0, int(_read(limit)) - int(_read(used) or 0))
    return UNLIMITED


def check_shm(root: Path = Path("/dev/shm")) -> Check:
    """Room and permission where regions live; takes and returns a page."""
    try:
        _take_a_page(root)
        room = os.statvfs(root)
    except OSError as error:
        mend = f"mount a tmpfs there that you may write to: mount -t tmpfs -o mode=1777,size=1g tmpfs {root}"
        return Check("shared memory", "fail", f"{root}: {error.strerror}", mend)
    free = room.f_bavail * room.f_frsize
    found = f"{root}: {free / MIB:,.0f} MiB free"
    mend = f"enlarge it: mount -o remount,size=1g {root}; in a container: docker run --shm-size=1g"
    if free < SHM_LEAST:
        return Check("shared memory", "fail", found, mend)
    return Check("shared memory", "ok" if free >= SHM_ENOUGH else "warn", found, "" if free >= SHM_ENOUGH else mend)


def _take_a_page(root: Path) -> None:
    """A file without a name: nothing can be left behind, and no sweep can meet it."""
    fd = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, 4096)
    finally:
        os.close(fd)


_SEGMENT = re.compile(r"afore-(?P<run>[A-Za-z0-9_.]+)-(?P<pid>[0-9]+)-.+")
"""Segments of the shm fabric: ``afore-<run>-<pid>-<label>-<number>``."""


def check_stale(root: Path = Path("/dev/shm")) -> Check:
    """What dead runs left: segments whose process is gone, run directories that nobody holds."""
    stale: list[str] = []
    live: set[str] = set()
    nbytes = 0
    for path in sorted(root.glob("afore-*")):
        with suppress(OSError):
            status = path.lstat()
            if _is_live(path):
                match = _SEGMENT.fullmatch(path.name)
                live.add(match["run"] if match else path.name.removeprefix("afore-"))
            else:
                stale.append(path.name)
                nbytes += status.st_blocks * 512
    if stale:
        shown = ", ".join(stale[:3]) + (" …" if len(stale) > 3 else "")
        found = f"{len(stale)} left by dead runs, {nbytes / MIB:.1f} MiB: {shown}"
        return Check("leftovers", "warn", found, "the next start of afore.launch sweeps them; or remove them by hand")
    running = f"none ({len(live)} cluster{'s' * (len(live) > 1)} running)"
    return Check("leftovers", "ok", running if live else "none")


def _is_live(path: Path) -> bool:
    match = _SEGMENT.fullmatch(path.name)
    if match:
        return Path("/proc", match["pid"]).exists()
    # Every user of a run directory holds a shared lock on it; the kernel drops the lock with its process.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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


def check_uvloop() -> Check:
    """The event loop of every role process."""
    try:
        import uvloop
    except Exception as error:
        return Check("uvloop", "fail", f"cannot be imported: {error}", "make run installs it; or pip install uvloop")
    return Check("uvloop", "ok", uvloop.__version__)


def check_fabrics(infiniband: Path = Path("/sys/class/infiniband")) -> list[Check]:
    """What can carry bytes between roles."""
    with suppress(OSError):
        devices = sorted(path.name for path in infiniband.iterdir())
        return [*_fabrics(f"not in this version; this machine has {', '.join(devices) or 'no RDMA device'}")]
    return [*_fabrics("not in this version; this machine has no RDMA device")]


def _fabrics(verbs: str) -> list[Check]:
    mend = "nothing to mend on one machine: shm needs neither"
    return [
        Check("fabric loopback", "ok", "one process"),
        Check("fabric shm", "ok", "processes of one machine; needs shared memory, eventfd (above)"),
        Check("fabric tcp", "warn", "not in this version", mend),
        Check("fabric verbs", "warn", verbs, mend),
    ]


def check_clock(
    source: Path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    reading_ns: float | None = None,
) -> Check:
    """What CLOCK_MONOTONIC is made of and what reading it costs: every span reads it twice."""
    cost_ns = _measure_reading_ns() if reading_ns is None else reading_ns
    found = f"{_read(source).strip() or 'unknown source'}, {cost_ns:.0f} ns a reading"
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
