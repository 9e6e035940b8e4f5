"""The doctor's checks of shared memory: room, permission, and what dead runs left there."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from afore.tools.doctor_check import MIB, Check
from afore.tools.printable import printable

SHM_LEAST: Final = 32 * MIB
"""The bundled model's regions need a few MiB; less than this is a broken mount."""
SHM_ENOUGH: Final = 256 * MIB
"""Below this a larger model, or a second run, may find no room."""


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
    strange: list[str] = []
    live: set[str] = set()
    nbytes = 0
    for path in sorted(root.glob("afore-*")):
        with suppress(OSError):
            status = path.lstat()
            if not _can_be_ours(path, status.st_mode):
                strange.append(path.name)
            elif _is_live(path):
                match = _SEGMENT.fullmatch(path.name)
                live.add(match["run"] if match else path.name.removeprefix("afore-"))
            else:
                stale.append(path.name)
                nbytes += status.st_blocks * 512
    if stale:
        found = f"{len(stale)} left by dead runs, {nbytes / MIB:.1f} MiB: {_some(stale)}"
        return Check("leftovers", "warn", found, "the next start of afore.launch sweeps them; or remove them by hand")
    if strange:
        found = f"{_some(strange)}: named like a cluster's, and nothing that one makes"
        return Check("leftovers", "warn", found, "see whose they are (ls -l), and remove them by hand")
    running = f"none ({len(live)} cluster{'s' * (len(live) > 1)} running)"
    return Check("leftovers", "ok", running if live else "none")


def _some(names: list[str]) -> str:
    return ", ".join(printable(name) for name in names[:3]) + (" …" if len(names) > 3 else "")


def _can_be_ours(path: Path, mode: int) -> bool:
    """Segments are regular files, run directories are directories; anything else is not opened."""
    return stat.S_ISREG(mode) if _SEGMENT.fullmatch(path.name) else stat.S_ISDIR(mode)


def _is_live(path: Path) -> bool:
    match = _SEGMENT.fullmatch(path.name)
    if match:
        return Path("/proc", match["pid"]).exists()
    # Every user of a run directory holds a shared lock on it; the kernel drops the lock with its process.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
