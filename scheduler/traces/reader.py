"""Reading a trace: member after member, each checked before it is used; what is wrong is named with its file and row.

A file is read from its start, by the headers of its members, and never by the directory at its end: so a file that was cut off is
read as far as it is whole (``partial=True``), and memory is that of one chunk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from afore.core.target import Phase, Target
from afore.scheduler.costs import Costs
from afore.scheduler.traces import format as form
from afore.scheduler.traces.beside import IdsBeside
from afore.scheduler.traces.checks import check_rows
from afore.scheduler.traces.files import regular
from afore.scheduler.traces.npy import array_of
from afore.scheduler.traces.records import Answer, Event, TraceError, TraceHeader, TraceTarget

_LOCAL: Final = struct.Struct("<4s5H3I2H")
"""A member's header in a zip file: signature, version, flags, method, time, date, CRC, size packed, size, then two lengths."""
_MAGIC, _DIRECTORY = b"PK\x03\x04", b"PK\x01\x02"
_ELSEWHERE: Final = 0xFFFFFFFF
"""Of a size that stands in an extra field (zip64)."""
_MOST_HEADER: Final = 16 << 20
_NO_SHARES, _NO_COPIES = np.zeros((0, 4), np.int32), np.zeros((0, 5), np.int32)
_log = logging.getLogger(__name__)
_AGAIN = "write it again, or read its whole chunks with partial=True (--partial)"


class _CutOffError(Exception):
    """The file ends in the middle of a member."""


class TraceReader:
    """The header at once, rows as they are asked for. Raises ``TraceError``.

    Experts by token that attention workers wrote beside a recording are joined to its targets (``beside``). ``partial``: a file
    that was cut off ends where its whole chunks end (``cut_off`` says so), instead of being refused there.
    """

    def __init__(self, path: str | Path, *, partial: bool = False, ids: bool = True) -> None:
        """``ids``: whether experts by token are looked for beside it."""
        self.path = Path(path)
        self._ids = ids
        self.partial = partial
        self.cut_off = False
        """Whether the file lacked its end, known once its rows have been read."""
        self.rows = 0
        """Read so far."""
        self.notes: list[str] = []
        """What was missing beside it; each is logged once."""
        try:
            regular(self.path)
            with open(self.path, "rb") as file:
                self.header = self._header(file)
        except OSError as error:
            raise TraceError(path, f"cannot be read: {error.strerror}", "name a file that can") from error
        self._dtype = form.row_dtype(self.header)

    def __iter__(self) -> Iterator[TraceTarget]:
        """Targets: the DEMAND rows."""
        return (row for row in self.events() if row.event is Event.DEMAND)

    def events(self) -> Iterator[TraceTarget]:
        """All rows, in order; each call begins anew."""
        self.rows, self.cut_off = 0, False
        beside = None
        if self._ids and self.header.ids_files:
            beside = IdsBeside(self.path, self.header, partial=self.partial, open_one=_as_far_as_whole, say=self._note)
        with open(self.path, "rb") as file:
            members = self._members(file)
            digest = hashlib.blake2b(next(members)[1], digest_size=form.DIGEST_BYTES)
            try:
                for rows, parts in self._chunks(members, digest):
                    for row in self._unpack(rows, parts):
                        wanted = beside is not None and row.event is Event.DEMAND
                        yield beside.joined(row, self.rows) if beside is not None and wanted else row
            except _CutOffError:
                self.cut_off = True
                if not self.partial:
                    raise TraceError(self.path, f"it is cut off after {self.rows:,} rows", _AGAIN) from None

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.warning("%s", note)

    # Members

    def _header(self, file: IO[bytes]) -> TraceHeader:
        try:
            name, data = next(self._members(file))
            if name != form.HEADER:
                raise ValueError(f"its first member is {name[:40]!r}, not {form.HEADER}")
            if len(data) > _MOST_HEADER:
                raise ValueError("its header is too large")
            return TraceHeader.from_json(json.loads(data))
        except (_CutOffError, StopIteration):
            raise TraceError(self.path, "it is no trace, or cut off within its header", "see docs/traces.md") from None
        except TraceError:
            raise
        except (ValueError, RecursionError) as error:
            raise TraceError(
                self.path, str(error), "python -m afore.tools.traces import reads other formats"
            ) from error

    def _members(self, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
        """(name, bytes unpacked), up to the directory. Raises ``_CutOffError`` where the file ends before that."""
        while True:
            raw = file.read(_LOCAL.size)
            if raw[:4] == _DIRECTORY:
                return
            if len(raw) < _LOCAL.size:
                raise _CutOffError
            magic, _, flags, method, _, _, crc, packed, size, name_len, extra_len = _LOCAL.unpack(raw)
            if magic != _MAGIC:
                if not any(raw):
                    raise _CutOffError  # room that was reserved and never written
                raise TraceError(self.path, "it is no zip file, or damaged", "see docs/traces.md")
            if flags & 0x8 or method not in (0, 8):
                raise TraceError(self.path, "a member is packed in another way", "store or deflate it, sizes first")
            if _ELSEWHERE in (packed, size):
                raise TraceError(
                    self.path,
                    "it is no trace: its sizes stand where no trace has them, as numpy.savez writes them",
                    "python -m afore.tools.traces import reads other formats",
                )
            if max(packed, size) > form.MOST_MEMBER:
                raise TraceError(
                    self.path, f"a member of {max(packed, size):,} bytes", "this reads at most 256 MiB of one"
                )
            name = file.read(name_len).decode("utf-8", "replace")
            file.read(extra_len)
            data = file.read(packed)
            if len(data) < packed or (not crc and not size and packed == 0 and not name):
                raise _CutOffError
            yield name, self._inflated(data, method, size, crc, name)

    def _inflated(self, data: bytes, method: int, size: int, crc: int, name: str) -> bytes:
        if method == 8:
            stream = zlib.decompressobj(-15)
            try:
                data = stream.decompress(data, size + 1)
            except zlib.error as error:
                raise TraceError(self.path, f"{name[:40]} is damaged: {error}", _AGAIN) from error
        if len(data) != size or zlib.crc32(data) != crc:
            if not size and not crc:
                raise _CutOffError  # its header was written before its bytes, and nothing after
            raise TraceError(self.path, f"{name[:40]} is damaged: its checksum differs", _AGAIN)
        return data

    def _chunks(
        self, members: Iterator[tuple[str, bytes]], digest: hashlib.blake2b
    ) -> Iterator[tuple[NDArray[Any], dict[str, NDArray[Any]]]]:
        """Rows and parts of each chunk, which is whole once the next one, or the end, has begun. ``digest``: of what was before."""
        number, rows = 0, None
        parts: dict[str, NDArray[Any]] = {}
        for name, data in members:
            if name == form.END:
                if rows is not None:
                    yield rows, parts
                self._check_end(data, number, digest.hexdigest())
                return
            digest.update(data)
            prefix, _, part = name.removesuffix(".npy").partition(".")
            wanted = number - 1 if part != "rows" else number
            if prefix != f"{wanted:06}" or part not in ("rows", *form.PARTS) or part in parts:
                raise TraceError(self.path, f"{name[:60]!r} does not belong after chunk {number - 1}", "write it again")
            array = self._array(name, data, part)
            if part != "rows":
                parts[part] = array
                continue
            if rows is not None:
                yield rows, parts
            rows, parts, number = array, {}, number + 1
        raise TraceError(self.path, f"it has no {form.END}", _AGAIN)

    def _array(self, name: str, data: bytes, part: str) -> NDArray[Any]:
        width = {"rows": 0, "shares": 4, "copies": 5, "ids": self.header.top_k}[part]
        dtype = {"rows": self._dtype, "ids": form.ids_dtype(self.header)}.get(part, np.dtype("<i4"))
        try:
            array = array_of(data)
        except ValueError as error:
            raise TraceError(self.path, f"{name}: {error}", "write it again") from error
        shape = array.shape[1:] == ((width,) if width else ())
        if array.dtype != dtype or array.ndim != (2 if width else 1) or not shape:
            raise TraceError(
                self.path,
                f"{name}: {str(array.dtype)[:80]} of shape {array.shape}, which the header does not announce",
                "write it again",
            )
        if part == "rows" and len(array) > form.MOST_ROWS:
            raise TraceError(self.path, f"{name}: {len(array):,} rows are over {form.MOST_ROWS:,}", "write it again")
        return array

    def _check_end(self, data: bytes, chunks: int, digest: str) -> None:
        try:
            end = json.loads(data)
            told = end["rows"], end["chunks"]
            written = end["digest"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError(self.path, f"{form.END} is damaged", "write it again") from error
        if told != (self.rows, chunks):
            raise TraceError(self.path, f"it ends after {self.rows:,} rows; {told[0]!r} were written", "write it again")
        if written != digest:
            raise TraceError(
                self.path, f"its digest is {digest}, not that of {form.END}", "it was changed: write it again"
            )

    # Rows

    def _unpack(self, rows: NDArray[Any], parts: dict[str, NDArray[Any]]) -> Iterator[TraceTarget]:
        check_rows(self.header, rows, parts, self._refuse)
        header = self.header
        columns = _Columns(*(rows[name].tolist() for name in _Columns._fields))
        at = dict.fromkeys(form.PARTS, 0)
        counts_XE, bits_X, costs_X = rows["counts"], rows["protected"], rows["costs"]
        for x, (step, layer, microbatch, flags) in enumerate(
            zip(columns.step, columns.layer, columns.microbatch, columns.flags, strict=True)
        ):
            cut = {}
            for name in form.PARTS:
                count = getattr(columns, name)[x]
                if count:
                    cut[name] = parts[name][at[name] : at[name] + count]
                    at[name] += count
            answer = None
            if flags & form.HAS_ANSWER:
                answer = Answer(
                    assigned=bool(flags & form.ASSIGNED),
                    shares_X4=cut.get("shares", _NO_SHARES),
                    copies_X5=cut.get("copies", _NO_COPIES),
                )
            ids_TK = None
            if flags & form.HAS_IDS:
                ids_TK = cut.get("ids", np.zeros((0, header.top_k), np.int32)).astype(np.int32)
            yield TraceTarget(
                target=Target(layer, microbatch, step),
                demand_E=counts_XE[x].astype(np.int32) if flags & form.HAS_DEMAND else None,
                event=Event(columns.event[x]),
                phase=Phase(columns.phase[x]),
                source=columns.source[x],
                tokens=columns.tokens[x],
                now_ns=columns.now_ns[x],
                ids_TK=ids_TK,
                answer=answer,
                protected_NR=form.unpacked(bits_X[x], header) if flags & form.HAS_PROTECTED else None,
                costs=_costs(costs_X[x]) if flags & form.HAS_COSTS else None,
            )
            self.rows += 1

    def _refuse(self, at: int, problem: str) -> TraceError:
        return TraceError(self.path, problem, "nothing of this chunk is used", row=self.rows + at)


def _as_far_as_whole(path: Path) -> TraceReader:
    return TraceReader(path, partial=True)


class _Columns(NamedTuple):
    step: list[int]
    now_ns: list[int]
    tokens: list[int]
    shares: list[int]
    copies: list[int]
    ids: list[int]
    layer: list[int]
    microbatch: list[int]
    source: list[int]
    event: list[int]
    phase: list[int]
    flags: list[int]


def _costs(values: NDArray[np.float64]) -> Costs:
    tile_us, copy_us, window_us = values.tolist()
    return Costs(tile_us=tile_us, copy_us=copy_us, window_us=window_us)


def read(path: str | Path, *, partial: bool = False) -> tuple[TraceHeader, Iterator[TraceTarget]]:
    """(header, targets). Raises ``TraceError``, at once or where a row is wrong; ``partial`` as ``TraceReader``."""
    reader = TraceReader(path, partial=partial)
    return reader.header, iter(reader)
