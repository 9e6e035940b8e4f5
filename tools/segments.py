"""Regions of running clusters, as they lie in files: named ones in /dev/shm, nameless ones behind /proc/<pid>/fd. Read-only."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from afore.core.errors import ConfigError
from afore.core.regular_file import open_regular
from afore.transport.records import MAILBOX_MAGIC, RING_MAGIC
from afore.transport.shm_segments import HEADER_BYTES, NAME, Header, read_header, start_ticks

PAGE = 4096
MAGICS = {"ring": RING_MAGIC, "mailbox": MAILBOX_MAGIC}
MIRROR = re.compile(r"(?P<member>ffn-[0-9]+)-(?P<what>ring|inputs)")
"""Labels of the copies that the lead of a node keeps."""
_ENDPOINT = re.compile(r"(?P<member>[A-Za-z0-9_.\-]+?)-[0-9]+-[0-9]+")
"""An shm endpoint's socket: ``<label>-<pid>-<number>``."""


@dataclass(frozen=True, slots=True)
class Found:
    """A region in a file: behind a header of whole pages, or at its start."""

    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A registered region of a run."""

    path: str
    run: str
    """Empty where nothing says it."""
    fabric: str
    """``shm``; ``private``: memory without a name, of tcp or verbs."""
    header: Header
    member: str
    """Who owns it, as far as its endpoint or process says."""
    alive: bool
    """Whether its owner's process lives."""
    revoked: bool


def regions(root: str, run: str | None, proc: str = "/proc") -> Iterator[Listed]:
    """Every region that can be read, named ones first, then those of processes whose descriptors may be looked at."""
    runs: dict[int, str] = {}
    for named in named_regions(root, run):
        runs[named.header.pid] = named.run
        yield named
    for path in _memory_files(proc):
        listed = _listed(path, "", "private")
        if listed is not None and (run is None or listed.header.pid in runs):
            # Nothing names the run of nameless memory but what else its process has.
            yield dataclasses.replace(listed, run=runs.get(listed.header.pid, ""))


def named_regions(root: str, run: str | None) -> Iterator[Listed]:
    """Those with a name in ``root`` alone: a directory's worth of work, whatever else runs on the machine."""
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        match = NAME.fullmatch(name)
        if match and run in (None, match["run"]):
            listed = _listed(f"{root}/{name}", match["run"], "shm")
            if listed is not None:
                yield listed


def _memory_files(proc: str) -> Iterator[str]:
    seen = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        with suppress(OSError):
            for fd in sorted(os.listdir(f"{proc}/{pid}/fd"), key=int):
                path = f"{proc}/{pid}/fd/{fd}"
                with suppress(OSError):
                    if os.readlink(path).startswith("/memfd:afore-"):
                        status = os.stat(path)
                        if (status.st_dev, status.st_ino) not in seen:
                            seen.add((status.st_dev, status.st_ino))
                            yield path


def _listed(path: str, run: str, fabric: str) -> Listed | None:
    try:
        with open_regular(path) as file:
            page = file.read(HEADER_BYTES)
    except OSError:
        return None  # it ended meanwhile, belongs to another user, or is something else that has such a name
    header = read_header(memoryview(page))
    if header is None:
        return None
    endpoint = _ENDPOINT.fullmatch(os.path.basename(header.address)) if "/" in header.address else None
    member = endpoint["member"] if endpoint else _process_name(header.pid)
    alive = start_ticks(header.pid) == header.start_ticks
    return Listed(path, run, fabric, header, member, alive, page[64:72] == (2).to_bytes(8, "little"))


def _process_name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return "?"


def find(what: str, *, path: str | None, run: str | None, root: str, of: str | None = None) -> Found:
    """The one ring or mailbox to look at: the scheduler's, or with ``of`` the copy that this FFN worker keeps of the ring.

    Raises ``ConfigError`` when there is none, or more than one.
    """
    if path is not None:
        try:
            found = locate(path, what)
        except OSError as error:
            raise ConfigError("--path", f"cannot read {path}: {error.strerror}") from error
        if found is None:
            raise ConfigError("--path", f"{path} holds no {what}", f"name the segment of a scheduler's {what}")
        return found
    candidates: list[tuple[str, Found]] = []
    copies: list[tuple[str, Found]] = []
    unreadable = ""
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        match = NAME.fullmatch(name)
        if match and what in match["label"] and run in (None, match["run"]):
            mirror = MIRROR.fullmatch(match["label"])
            if of is not None and (mirror is None or mirror["member"] != of):
                continue
            try:
                located = locate(os.path.join(root, name), what)
            except OSError as error:
                unreadable = f"; {name} cannot be read: {error.strerror}"
                continue
            if located is not None:
                (candidates if mirror is None else copies).append((match["run"], located))
    # A node without the scheduler has only a copy.
    candidates = candidates or copies
    where = f"of run {run} " if run is not None else ""
    where += f"of {of} " if of is not None else ""
    if not candidates:
        hint = "start a cluster with the shm fabric, or give --path"
        if of is not None:
            hint = "only the lead of a node without the scheduler keeps a copy; leave out --of for the scheduler's"
        raise ConfigError(what, f"no {what} {where}in {root}{unreadable}", hint)
    if len(candidates) > 1:
        listed = ", ".join(f"{os.path.basename(found.path)} (run {name})" for name, found in candidates)
        raise ConfigError(
            what, f"{len(candidates)} {what} segments {where}in {root}: {listed}", "choose with --path, --run or --of"
        )
    return candidates[0][1]


def locate(path: str, what: str) -> Found | None:
    """Where the region's magic stands, at a page boundary. Raises ``OSError``."""
    magic = MAGICS[what].to_bytes(8, "little")
    with open_regular(path) as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, PAGE):
            file.seek(offset)
            if file.read(len(magic)) == magic:
                return Found(path, offset)
    return None
