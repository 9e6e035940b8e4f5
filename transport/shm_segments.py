"""Regions in POSIX shared memory: named 0600 files in /dev/shm, a header page, then the region's bytes.

Room is taken when a region is registered (``posix_fallocate``), so a full /dev/shm is refused there and never a SIGBUS later. The
creator holds a shared lock on the file for as long as its mapping lives: the kernel drops it with the process, whatever
kills that, which is how ``shm_sweep`` tells leftovers from living regions.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass

from afore.core.errors import AccessRefused, HostError
from afore.transport.api import RegionKey
from afore.transport.buffers import refuse_foreign, revoked
from afore.transport.host import TABLE_FULL, host_error
from afore.transport.publish import publishing_words

ROOT = "/dev/shm"
HEADER_BYTES = 4096
MAGIC = b"AFORESHM"
LAYOUT = 1
LIVE, REVOKED = 1, 2
STATE_WORD = 8
"""Index of the header's 64-bit state word; in a cache line of its own, since every write looks at it."""
_HEADER = struct.Struct("<8sIIQQQQ")
_OPENING = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Whatever somebody else may have put there under that name, a FIFO too, opening it does not wait."""
_LABEL_AT, _LABEL_BYTES = 256, 64
_ADDRESS_AT, _ADDRESS_BYTES = 1024, 1024
NAME = re.compile(r"afore-(?P<run>[A-Za-z0-9_.]+)-(?P<pid>[0-9]+)-(?P<label>[A-Za-z0-9_.\-]+)-(?P<number>[0-9]+)")
"""``afore-<run id>-<pid>-<label>-<n>``; a run id has no dash."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says about itself."""

    pid: int
    start_ticks: int
    """When its creator started, in clock ticks since boot: a recycled pid is told by it."""
    region: int
    nbytes: int
    label: str
    address: str
    """Endpoint of its owner."""


def start_ticks(pid: int) -> int | None:
    """When process ``pid`` started, in clock ticks since boot (field 22 of proc_pid_stat(5)); nothing if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The command name before the last ")" may hold anything.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def clean_label(label: str) -> str:
    """``label`` as part of a file name: other characters become ``_``, at most 40."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", label)[:40].strip("-.") or "region"


class Segment:
    """A region's memory, on the owner's side."""

    def __init__(self, root: str, run_id: str, *, label: str, region: int, nbytes: int, address: str) -> None:
        """Creates it, zeroed. Raises ``HostError`` naming ``root``, with needed and free bytes and the remedy."""
        total = HEADER_BYTES + nbytes
        self._path, fd = _create(root, run_id, label, region)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                _require_room(root, label, total)
                os.posix_fallocate(fd, 0, total)
                self._memory = mmap.mmap(fd, total)
            except OSError as error:
                if error.errno in TABLE_FULL:
                    raise host_error(error, root, f"cannot map region {label!r}", "") from error
                raise _no_room(root, label, total, error) from error
        except BaseException:
            os.unlink(self._path)
            raise
        finally:
            # The mapping keeps a duplicate of its own, and with it the lock.
            os.close(fd)
        self.name = os.path.basename(self._path)
        self._whole = memoryview(self._memory)
        self._state = publishing_words(self._whole[:HEADER_BYTES])
        write_header(self._whole, region=region, nbytes=nbytes, label=label, address=address)
        self._state[STATE_WORD] = LIVE
        self.view = self._whole[HEADER_BYTES:]
        self.open = True

    def close(self) -> None:
        """Tells mapped peers, unlinks the file, unmaps as soon as no view of it is left. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._state[STATE_WORD] = REVOKED
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._state.release()
        for view in (self.view, self._whole):
            with suppress(BufferError):
                view.release()
        # An array over the region keeps it mapped until that array goes; the mapping then closes itself.
        with suppress(BufferError):
            self._memory.close()


class Mapping:
    """A peer's region, mapped here."""

    def __init__(self, root: str, key: RegionKey, *, writable: bool) -> None:
        """Maps it. Raises ``RegionRevoked`` when it is gone, ``AccessRefused`` when ``key`` does not belong to it."""
        self.key = key
        self._memory = _open_memory(root, key, writable)
        self._whole = memoryview(self._memory)
        self.state = publishing_words(self._whole[:HEADER_BYTES])
        self.view = self._whole[HEADER_BYTES:]
        header = read_header(self._whole)
        if header is None or (header.region, header.nbytes, header.address) != (key.region, key.nbytes, key.address):
            self.close()
            raise refuse_foreign(key, key.address, f"is not what segment {key.token} holds")
        if not self.is_live():
            self.close()
            raise revoked(key)

    def is_live(self) -> bool:
        """Whether the owner has not closed it. Cheap: one load."""
        return self.state[STATE_WORD] == LIVE

    def close(self) -> None:
        """Unmaps as soon as no view of it is left. Idempotent."""
        self.state.release()
        for view in (self.view, self._whole):
            with suppress(BufferError):
                view.release()
        with suppress(BufferError):
            self._memory.close()


def write_header(memory: memoryview, *, region: int, nbytes: int, label: str, address: str) -> None:
    """Says what a new segment of this process is; its state word follows."""
    pid = os.getpid()
    _HEADER.pack_into(memory, 0, MAGIC, LAYOUT, 0, pid, start_ticks(pid) or 0, region, nbytes)
    _put_text(memory, _LABEL_AT, _LABEL_BYTES, label)
    _put_text(memory, _ADDRESS_AT, _ADDRESS_BYTES, address)


def read_header(memory: memoryview) -> Header | None:
    """The header at the start of ``memory``; nothing if it is not one of a finished segment."""
    if len(memory) < HEADER_BYTES:
        return None
    magic, layout, _, pid, ticks, region, nbytes = _HEADER.unpack_from(memory)
    if magic != MAGIC or layout != LAYOUT:
        return None
    return Header(
        pid,
        ticks,
        region,
        nbytes,
        _get_text(memory, _LABEL_AT, _LABEL_BYTES),
        _get_text(memory, _ADDRESS_AT, _ADDRESS_BYTES),
    )


def _create(root: str, run_id: str, label: str, region: int) -> tuple[str, int]:
    for number in itertools.count(region):
        path = f"{root}/afore-{run_id}-{os.getpid()}-{clean_label(label)}-{number}"
        try:
            return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            what = f"cannot create a segment for region {label!r}"
            raise host_error(error, root, what, "mount a writable tmpfs there") from error
    raise AssertionError("unreachable: there is always another number")


def _free_bytes(root: str) -> int | None:
    """Free bytes of the file system; nothing for one without a limit."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _require_room(root: str, label: str, total: int) -> None:
    # posix_fallocate alone would fill all that is left before it fails, and starve everybody for that while.
    free = _free_bytes(root)
    if free is not None and total > free:
        raise _no_room(root, label, total, None)


def _no_room(root: str, label: str, total: int, error: OSError | None) -> HostError:
    free = _free_bytes(root)
    why = f" ({error.strerror})" if error else ""
    return HostError(
        root,
        f"region {label!r} needs {total:,} bytes, {'unlimited' if free is None else format(free, ',')} are free{why}",
        "remove leftovers (`python -m afore.tools.doctor` finds them), enlarge it (mount -o remount,size=8G /dev/shm; "
        "docker run --shm-size=8g), or use fewer workers, slots or KV blocks",
    )


def _open_memory(root: str, key: RegionKey, writable: bool) -> mmap.mmap:
    if not NAME.fullmatch(key.token):
        raise refuse_foreign(key, key.address, f"names no segment ({key.token!r})")
    try:
        fd = os.open(f"{root}/{key.token}", _OPENING | (os.O_RDWR if writable else os.O_RDONLY))
    except FileNotFoundError:
        raise revoked(key) from None
    except PermissionError as error:
        raise AccessRefused(
            key.address, f"no permission to map {key.token}", "run all roles as the same user"
        ) from error
    except OSError as error:
        raise host_error(error, root, f"cannot open {key.token}", "see who else writes there") from error
    try:
        status = os.fstat(fd)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size != HEADER_BYTES + key.nbytes
        ):
            raise refuse_foreign(key, key.address, f"is not what {key.token} is")
        try:
            return mmap.mmap(fd, status.st_size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except OSError as error:
            raise host_error(error, root, f"cannot map {key.token}", "see why the kernel refuses") from error
    finally:
        os.close(fd)


def _put_text(memory: memoryview, at: int, room: int, text: str) -> None:
    raw = text.encode()[:room]
    memory[at : at + len(raw)] = raw


def _get_text(memory: memoryview, at: int, room: int) -> str:
    return bytes(memory[at : at + room]).rstrip(b"\0").decode(errors="replace")
