"""Reading a directory of span files: every record once, what is wrong with them in words, never more than a line in memory.

What is read is what was there when the directory was opened: a run may go on writing.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from afore.core.errors import ConfigError
from afore.core.span_file import segment_of
from afore.core.spans import Header, Span, parse_header, parse_line


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a process, mapped as long as it was when it was opened; it may be gone since."""

    path: Path
    header: Header
    data: mmap.mmap
    first: int
    """Where the first line after the header begins."""


@dataclass(slots=True)
class SpanFile:
    """One process's spans, in one segment or several. Counts are complete once ``records`` has run to its end."""

    segments: list[Segment]
    """In order."""
    shift_ns: int = 0
    """What to add to its clock so that all files agree."""
    dropped: int = 0
    closed: bool = False
    torn: bool = False
    bad_lines: list[int] = field(default_factory=list)
    """Numbers of the first few lines that are no records."""
    bad_count: int = 0
    first_ns: int | None = None
    """Where the earliest record of it begins, on its own clock; none: there is no record."""
    last_ns: int | None = None
    """Where the latest one begins."""
    _bases: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._bases = [0, *accumulate(len(segment.data) for segment in self.segments)]

    @property
    def path(self) -> Path:
        """The file, or the oldest of its segments."""
        return self.segments[0].path

    @property
    def header(self) -> Header:
        """Of the oldest segment."""
        return self.segments[0].header

    @property
    def bounded(self) -> int:
        """Records that are missing in front, since the oldest segments made room for later ones."""
        return self.header.before

    def records(self) -> Iterator[tuple[int, Span]]:
        """(offset, record) in file order. Bad lines are counted and skipped; a last line without its end is torn."""
        self.dropped, self.closed, self.torn, self.bad_count = 0, False, False, 0
        self.first_ns = self.last_ns = None
        self.bad_lines.clear()
        for base, segment in zip(self._bases, self.segments, strict=False):
            offset = segment.first
            for number, line in enumerate(_lines(segment), 2):
                if not line.endswith(b"\n"):
                    self.torn = True
                    break
                try:
                    record = parse_line(line)
                except ValueError:
                    self.bad_count += 1
                    if len(self.bad_lines) < 3:
                        self.bad_lines.append(number)
                else:
                    if isinstance(record, Span):
                        self._reaches(record.start_ns)
                        yield base + offset, record
                    else:
                        self.dropped = record["dropped"]
                        self.closed = self.closed or "end" in record
                offset += len(line)

    def line_at(self, offset: int) -> bytes:
        """The line of a record, by the offset that ``records`` gave."""
        number = bisect_right(self._bases, offset) - 1
        data, at = self.segments[number].data, offset - self._bases[number]
        return data[at : data.find(b"\n", at) + 1]

    def covers(self, begin_ns: int, end_ns: int) -> bool:
        """Whether what its process did from ``begin_ns`` to ``end_ns`` (its own clock) must be in the file, once that is read.

        Not where the file was cut off before, where it begins later because of its bound, and where anything was lost on the way.
        """
        if self.dropped or self.bad_count or (self.bounded and (self.first_ns is None or self.first_ns > begin_ns)):
            return False
        # A span is written when it ends: one that began after the end is behind everything before.
        return self.closed or (self.last_ns is not None and self.last_ns > end_ns)

    def problems(self) -> list[str]:
        """What a reader of the result must know, one line each."""
        name = self.path.name
        found = []
        if self.torn:
            found.append(
                f"{name}: the last line is torn (its process was writing it, or ended while writing) and was left out"
            )
        elif not self.closed:
            found.append(
                f"{name}: not closed (its process still runs or was killed); what it had not written yet is missing"
            )
        if self.bad_count:
            first = ", ".join(map(str, self.bad_lines))
            found.append(f"{name}: {self.bad_count} lines are no records and were left out (first: line {first})")
        if self.dropped:
            found.append(f"{name}: {self.dropped} records were dropped by a full buffer; arrows may be missing")
        if self.bounded:
            found.append(
                f"{name}: the oldest {self.bounded} records made room for later ones (raise trace_mib to keep more)"
            )
        numbers = [segment.header.segment for segment in self.segments]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            found.append(f"{name}: of its segments only {', '.join(map(str, numbers))} are here")
        return found

    def _reaches(self, start_ns: int) -> None:
        self.first_ns = start_ns if self.first_ns is None else min(self.first_ns, start_ns)
        self.last_ns = start_ns if self.last_ns is None else max(self.last_ns, start_ns)


def open_directory(directory: Path) -> tuple[list[SpanFile], list[str]]:
    """The span files of ``directory``, aligned to one clock, and what was wrong with others.

    Raises ``ConfigError`` where the directory is missing, holds no span file, or mixes virtual and real time.
    """
    if not directory.is_dir():
        problem = "is a file, not a directory" if directory.exists() else "does not exist"
        raise ConfigError(str(directory), problem, "name the directory that was given to --trace")
    paths = sorted(directory.glob("*.jsonl"))
    by_process: defaultdict[tuple[str, Header], list[Segment]] = defaultdict(list)
    problems: list[str] = []
    for path in paths:
        try:
            segment = _open(path)
        except FileNotFoundError:
            continue  # the oldest segment of a run that goes on
        except (ValueError, OSError) as error:
            problems.append(f"{path.name}: left out: {error if line_is_whole(error) else 'its first line is torn'}")
            continue
        named = segment_of(path)
        # A file by another name is a process of its own.
        name = named[0] if named is not None and named[1] == segment.header.segment else path.name
        by_process[name, segment.header._replace(segment=0, before=0)].append(segment)
    files = [SpanFile(sorted(found, key=lambda segment: segment.header.segment)) for found in by_process.values()]
    if not files:
        detail = f" ({'; '.join(problems)})" if problems else ""
        remedy = "run with --trace DIR first; each process writes DIR/<process>.jsonl"
        raise ConfigError(str(directory), f"holds no span file{detail}", remedy)
    if len({file.header.clock for file in files}) > 1:
        raise ConfigError(str(directory), "mixes files of virtual and of real time", "give each run its own directory")
    _align(files)
    return files, problems


def _open(path: Path) -> Segment:
    if not path.is_file() and path.exists():
        raise ValueError("it is no file")  # a pipe would never end
    with open(path, "rb") as file:
        line = file.readline()
        header = parse_header(line)
        return Segment(path, header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), len(line))


def _lines(segment: Segment) -> Iterator[bytes]:
    data, at = segment.data, segment.first
    while at < len(data):
        end = data.find(b"\n", at) + 1 or len(data)
        yield data[at:end]
        at = end


def line_is_whole(error: Exception) -> bool:
    """False for an error of JSON's parser, which a torn line causes."""
    return type(error) is ValueError or isinstance(error, OSError)


def _align(files: list[SpanFile]) -> None:
    """Processes of one host share its monotonic clock; hosts are aligned by their wall clocks at one file each."""
    base_of_host: dict[str, int] = {}
    for file in files:
        if file.header.unix_base_ns is not None:
            base_of_host.setdefault(file.header.host, file.header.unix_base_ns - file.header.clock_base_ns)
    for file in files:
        # Files of virtual time have none.
        if file.header.host in base_of_host:
            file.shift_ns = base_of_host[file.header.host] - next(iter(base_of_host.values()))
