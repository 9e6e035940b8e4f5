"""Writing a trace: rows are collected into chunks; the file appears under its name only when it is finished."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import zipfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import HostError
from afore.scheduler.traces import format as form
from afore.scheduler.traces.npy import bytes_of
from afore.scheduler.traces.records import TraceHeader, TraceTarget

_BEGINNING = (1980, 1, 1, 0, 0, 0)
"""No member says when it was written: the same rows are the same bytes."""


class TraceWriter:
    """``add`` rows, then ``close``; as a context manager it closes, or drops what it wrote where an exception passes.

    ``defer``: full chunks wait for ``flush`` instead of being written in ``add``. Raises ``HostError`` for what the disk refuses.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        compress: bool = True,
        defer: bool = False,
        rows: int | None = None,
    ) -> None:
        """``rows`` of a chunk; none: by size."""
        self.path = Path(path)
        self.header = header
        self.rows = 0
        """Added so far."""
        self._dtype = form.row_dtype(header)
        self._ids_dtype = form.ids_dtype(header)
        self._per_chunk = rows or form.rows_per_chunk(header)
        self._defer = defer
        self._sealed: list[dict[str, NDArray[Any]]] = []
        self._digest = hashlib.blake2b(digest_size=form.DIGEST_BYTES)
        self._chunks = 0
        self._failed = False
        """The disk refused something; what is there stays, under its partial name, until ``abandon``."""
        if not self.path.name:
            raise HostError(str(path) or "''", "it names no file", "name one")
        self._partial = self.path.with_name(self.path.name + form.PARTIAL)
        self._method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        self._file: IO[bytes] | None = None
        self._zip: zipfile.ZipFile | None = None
        self._begin()
        with self._on_disk():
            if self.path.exists() and not self.path.is_file():
                raise HostError(
                    str(self.path), "it is there and no file, so no trace can take its place", "name another"
                )
            self._file = _locked(self._partial)
            self._zip = zipfile.ZipFile(self._file, "w", allowZip64=True)
            self._member(form.HEADER, json.dumps(header.to_json()).encode())

    def _begin(self) -> None:
        self._rows = np.zeros(self._per_chunk, self._dtype)
        self._counts_XE, self._protected_X = self._rows["counts"], self._rows["protected"]
        self._scalars: list[tuple[Any, ...]] = []
        """The other columns, row by row: a list takes a row in a tenth of the time that a structured array takes."""
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in form.PARTS}

    def add(self, row: TraceTarget) -> None:
        """Takes one row; what is of the wrong shape is the caller's mistake, an ``AssertionError``."""
        header, target, at = self.header, row.target, len(self._scalars)
        flags = ids = shares = copies = 0
        if row.demand_E is not None:
            assert row.demand_E.shape == (header.experts,), row.demand_E.shape
            self._counts_XE[at] = row.demand_E
            flags |= form.HAS_DEMAND
        if row.ids_TK is not None:
            ids = len(row.ids_TK)
            assert row.ids_TK.shape == (ids, header.top_k), row.ids_TK.shape
            self._parts["ids"].append(row.ids_TK.astype(self._ids_dtype))
            flags |= form.HAS_IDS
        if row.protected_NR is not None:
            self._protected_X[at] = form.packed(row.protected_NR)
            flags |= form.HAS_PROTECTED
        costs = 0.0, 0.0, 0.0
        if row.costs is not None:
            costs = row.costs.tile_us, row.costs.copy_us, row.costs.window_us
            flags |= form.HAS_COSTS
        if (answer := row.answer) is not None:
            shares, copies = len(answer.shares_X4), len(answer.copies_X5)
            if shares:
                self._parts["shares"].append(answer.shares_X4)
            if copies:
                self._parts["copies"].append(answer.copies_X5)
            flags |= form.HAS_ANSWER | (answer.assigned * form.ASSIGNED)
        self._scalars.append(
            (
                target.step,
                row.now_ns,
                costs,
                row.tokens,
                shares,
                copies,
                ids,
                target.layer,
                target.microbatch,
                row.source,
                row.event,
                row.phase,
                flags,
            )
        )
        self.rows += 1
        if at + 1 == self._per_chunk:
            self._seal()
            if not self._defer:
                self.flush()

    @property
    def waiting(self) -> int:
        """Full chunks that wait for ``flush``."""
        return len(self._sealed)

    def flush(self, most: int | None = None) -> None:
        """Writes full chunks that wait, at most ``most``."""
        while self._sealed and (most is None or most > 0):
            chunk = self._sealed.pop(0)
            with self._on_disk():
                for name, array in chunk.items():
                    self._member(f"{self._chunks:06}.{name}.npy", bytes_of(array))
                self._chunks += 1
                # A process that is killed takes with it what it has not handed over.
                assert self._file is not None
                self._file.flush()
            most = None if most is None else most - 1

    def close(self) -> None:
        """Writes what is left and gives the file its name; idempotent."""
        if self._zip is None:
            return
        self._seal()
        self.flush()
        end = {"rows": self.rows, "chunks": self._chunks, "digest": self._digest.hexdigest()}
        with self._on_disk():
            self._member(form.END, json.dumps(end).encode())
            assert self._file is not None
            self._zip.close()
            self._zip = None
            self._file.flush()
            # Still locked: who has opened the partial file meanwhile finds that it is no longer there (``_locked``).
            os.replace(self._partial, self.path)
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Closes and removes what was written, unless it was finished; idempotent."""
        finished = self._zip is None and self._file is None and not self._failed
        if not finished:
            self._drop()
            self._failed = False
            with contextlib.suppress(OSError):
                self._partial.unlink()

    @property
    def digest(self) -> str:
        """Of what was written so far: of the whole trace once it is closed. The same rows have the same digest."""
        return self._digest.hexdigest()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _seal(self) -> None:
        if not self._scalars:
            return
        rows_X = self._rows[: len(self._scalars)]
        for name, values in zip(form.SCALARS, zip(*self._scalars, strict=True), strict=True):
            rows_X[name] = values
        chunk: dict[str, NDArray[Any]] = {"rows": rows_X}
        for name, parts in self._parts.items():
            if parts:
                chunk[name] = np.concatenate(parts)
        self._sealed.append(chunk)
        self._begin()

    def _member(self, name: str, data: bytes) -> None:
        assert self._zip is not None
        info = zipfile.ZipInfo(name, _BEGINNING)
        info.compress_type = self._method
        self._zip.writestr(info, data, compresslevel=1)
        self._digest.update(data)

    def _drop(self) -> None:
        archive, self._zip = self._zip, None
        if archive is not None:
            archive.fp = None  # its own close would write a directory, and fail again on a full disk
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _on_disk(self) -> Any:
        try:
            yield
        except OSError as error:
            self._failed = True
            self._drop()
            raise HostError(
                str(self.path),
                f"the trace cannot be written: {error.strerror or error}",
                "name a file where there is room and you may write",
            ) from error


def _locked(path: Path) -> IO[bytes]:
    """The empty file at ``path``, which nobody else writes. Raises ``HostError`` where somebody does, or it is no file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise HostError(str(path), "it is there and no file, so no trace can be written to it", "name another")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostError(
                str(path), "somebody else is writing it", "name another file, or wait for its end"
            ) from None
        if not _is_at(fd, path):
            raise HostError(str(path), "somebody else has just written it", "name another file, or run it again")
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "wb")


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
