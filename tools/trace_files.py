"""Reading a directory of span files: every record once, what is wrong with them in words, never more than a line in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from afore.core.errors import ConfigError
from afore.core.trace import Header, Span, parse_header, parse_line


@dataclass(slots=True)
class SpanFile:
    """One process's file. Counts are complete once ``records`` has run to its end."""

    path: Path
    header: Header
    first_offset: int
    """Where the first line after the header begins."""
    shift_ns: int = 0
    """What to add to its clock so that all files agree."""
    dropped: int = 0
    closed: bool = False
    torn: bool = False
    bad_lines: list[int] = field(default_factory=list)
    """Numbers of the first few lines that are no records."""
    bad_count: int = 0

    def records(self) -> Iterator[tuple[int, Span]]:
        """(byte offset, record) in file order. Bad lines are counted and skipped; a last line without its end is torn."""
        self.dropped, self.closed, self.torn, self.bad_count = 0, False, False, 0
        self.bad_lines.clear()
        offset = self.first_offset
        with open(self.path, "rb") as file:
            file.seek(offset)
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    self.torn = True
                    return
                try:
                    record = parse_line(line)
                except ValueError:
                    self.bad_count += 1
                    if len(self.bad_lines) < 3:
                        self.bad_lines.append(number)
                else:
                    if isinstance(record, Span):
                        yield offset, record
                    else:
                        self.dropped = record["dropped"]
                        self.closed = self.closed or "end" in record
                offset += len(line)

    def problems(self) -> list[str]:
        """What a reader of the result must know, one line each."""
        name = self.path.name
        found = []
        if self.torn:
            found.append(f"{name}: the last line is torn (its process ended while writing) and was left out")
        elif not self.closed:
            found.append(
                f"{name}: not closed (its process still runs or was killed); what it had not flushed is missing"
            )
        if self.bad_count:
            first = ", ".join(map(str, self.bad_lines))
            found.append(f"{name}: {self.bad_count} lines are no records and were left out (first: line {first})")
        if self.dropped:
            found.append(f"{name}: {self.dropped} records were dropped by a full buffer; arrows may be missing")
        return found


def open_directory(directory: Path) -> tuple[list[SpanFile], list[str]]:
    """The span files of ``directory``, aligned to one clock, and what was wrong with others.

    Raises ``ConfigError`` where the directory is missing, holds no span file, or mixes virtual and real time.
    """
    if not directory.is_dir():
        problem = "is a file, not a directory" if directory.exists() else "does not exist"
        raise ConfigError(str(directory), problem, "name the directory that was given to --trace")
    paths = sorted(directory.glob("*.jsonl"))
    files: list[SpanFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            if not path.is_file():
                raise ValueError("it is no file")  # a pipe would never end
            with open(path, "rb") as file:
                line = file.readline()
            files.append(SpanFile(path=path, header=parse_header(line), first_offset=len(line)))
        except (ValueError, OSError) as error:
            problems.append(f"{path.name}: left out: {error if line_is_whole(error) else 'its first line is torn'}")
    if not files:
        detail = f" ({'; '.join(problems)})" if problems else ""
        remedy = "run with --trace DIR first; each process writes DIR/<process>.jsonl"
        raise ConfigError(str(directory), f"holds no span file{detail}", remedy)
    if len({file.header.clock for file in files}) > 1:
        raise ConfigError(str(directory), "mixes files of virtual and of real time", "give each run its own directory")
    _align(files)
    return files, problems


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
