"""Run directories, where the sockets of one run's endpoints live, and the sweep that removes what dead processes left.

Every user of a run directory holds a shared lock on it. The kernel drops locks with their process, however it ends, so a
directory or segment that can be locked exclusively belongs to nobody; for segments the header's pid and start time must agree.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress

from afore.core.errors import HostError
from afore.transport.host import host_error
from afore.transport.shm_segments import HEADER_BYTES, NAME, ROOT, read_header, start_ticks

SECRET = "secret"
SECRET_BYTES = 32
_TRIES = 100


class RunDirectory:
    """A 0700 directory, kept from the sweep while this is open. ``fd`` is a descriptor of it."""

    def __init__(self, path: str) -> None:
        """Makes it, or joins those who use it. Raises ``HostError``: no permission, or it is somebody else's."""
        self.path = path
        self.fd = _join(path)

    def secret(self) -> bytes:
        """The run's secret, kept here in a 0600 file; the first to ask makes it. Raises ``HostError``."""
        for _ in range(_TRIES):
            try:
                fd = os.open(SECRET, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
                with os.fdopen(fd, "rb") as file:
                    return file.read(SECRET_BYTES)
            except FileNotFoundError:
                pass
            except OSError as error:
                what = "cannot read the run's secret there"
                raise host_error(error, self.path, what, "run all roles as the same user") from error
            draft = f"{SECRET}-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(draft, flags, 0o600, dir_fd=self.fd), "wb") as file:
                    file.write(secrets.token_bytes(SECRET_BYTES))
                # A link appears with its content or not at all, and only one of several is first.
                with suppress(FileExistsError):
                    os.link(draft, SECRET, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except FileNotFoundError:
                raise
            except OSError as error:
                what = "cannot keep the run's secret there"
                raise host_error(error, self.path, what, "choose another directory") from error
            finally:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=self.fd)
        raise HostError(self.path, "its secret disappears as often as it is made", "see who else writes there")

    def close(self, *, remove: bool) -> bool:
        """Leaves the directory; with ``remove`` the last one out takes it away. True if it did. Idempotent."""
        if self.fd < 0:
            return False
        os.close(self.fd)
        self.fd = -1
        return remove and remove_run_directory(self.path)


def _join(path: str) -> int:
    for _ in range(_TRIES):
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(path)):
                continue  # swept between the two calls
            raise HostError(
                path, "its parent directory does not exist", "make it, or choose another directory"
            ) from None
        except OSError as error:
            root = os.path.dirname(path)
            remedy = (
                f"let this user write there (ls -ld {root}; mount -o remount,rw {root}), or choose another directory"
            )
            raise host_error(error, path, "cannot make the run's directory", remedy) from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise HostError(
                    path, "it is open to other users or belongs to one", "choose another run id or directory"
                )
            fcntl.flock(fd, fcntl.LOCK_SH)
            # Whoever removed it held the lock that we waited for.
            if os.path.exists(path) and os.path.samestat(os.lstat(path), status):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise HostError(path, "it disappears as often as it is made", "see who else sweeps this machine")


def remove_run_directory(path: str) -> bool:
    """Removes a run directory that nobody uses, with its secret and the sockets of killed processes. True if it did.

    One that holds anything else, or is open to others, is somebody's own and stays as it is.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.lstat(path), os.fstat(fd)):
            return False  # removed between the two calls, and made anew by somebody who uses it
        names = os.listdir(fd)
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077 or not all(_is_run_file(fd, name) for name in names):
            return False
        for name in names:
            os.unlink(name, dir_fd=fd)
        os.rmdir(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_run_file(folder_fd: int, name: str) -> bool:
    """Whether a file of a run directory is one that endpoints make: a socket, the secret, or a draft of it."""
    if name == SECRET or name.startswith(f"{SECRET}-"):
        return True
    return stat.S_ISSOCK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)


def sweep_stale(root: str = ROOT, run_id: str | None = None) -> tuple[str, ...]:
    """Removes segments and run directories whose processes are dead, of ``run_id`` or of any run; returns their names.

    Leaves what is alive, what belongs to another user, and what it cannot remove.
    """
    removed = []
    for name in sorted(os.listdir(root)):
        if not name.startswith("afore-") or (run_id is not None and name.split("-")[1] != run_id):
            continue
        path = f"{root}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid():
            continue
        if stat.S_ISDIR(status.st_mode):
            if remove_run_directory(path):
                removed.append(name)
        elif stat.S_ISREG(status.st_mode) and NAME.fullmatch(name) and _remove_segment(path, name):
            removed.append(name)
    return tuple(removed)


def _remove_segment(path: str, name: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _creator_lives(os.pread(fd, HEADER_BYTES, 0), name):
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _creator_lives(raw: bytes, name: str) -> bool:
    header = read_header(memoryview(raw))
    if header is not None:
        return start_ticks(header.pid) == header.start_ticks
    # Its creator has not come to the header yet, or died before.
    match = NAME.fullmatch(name)
    return match is not None and start_ticks(int(match["pid"])) is not None
