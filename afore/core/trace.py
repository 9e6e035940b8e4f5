"""Spans: plain tuples while running, written late as JSON lines, one file per process, merged by ``afore.tools.trace``.

Formatting a span costs ten times what keeping it costs, so a role keeps tuples in a bounded buffer and calls ``flush`` when it
is idle. A full buffer drops the newest and counts them; nothing ever waits for a trace.

A file's first line is its header; then one JSON object a line:

    {"name":"copy","layer":3,"microbatch":0,"step":17,"start_ns":1200,"end_ns":5400,"args":{"slot":2,"expert":9,"generation":41}}
    {"instant":"epoch","at_ns":7000}
    {"counter":"kv_blocks","at_ns":7100,"value":12}
    {"dropped":3}                                    so far, in this process
    {"end":true,"records":5120,"dropped":3}          the last line of a file that was closed

What ties spans together (the flow arrows of the merged trace) is in their arguments:
``plan``, ``publish``, ``read`` carry ``sequence``; ``copy`` carries ``expert``, ``slot`` and ``generation`` (the sequence of the
entry that copies); ``wait`` carries ``generations``, those of the slots its target names, and optionally ``slots`` beside them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, get_args

from afore.core.clock import Clock, WallClock
from afore.core.errors import HostError
from afore.core.target import LAYER_BITS, MICROBATCH_BITS, STEP_BITS, Target
from afore.core.version import VERSION

TRACE_FORMAT: Final = 1
MOST_NS: Final = 1 << 62
"""Of a time in a file: what is beyond is none, and differences stay within 64 bits."""
DEFAULT_CAPACITY: Final = 1 << 17
"""Records a process keeps between two flushes: about 30 MB."""

SpanName = Literal[
    "attention",
    "gate",
    "demand_write",
    "a2f",
    "plan",
    "publish",
    "read",
    "submit",
    "copy",
    "ready",
    "wait",
    "gather",
    "partition",
    "experts",
    "reduce",
    "reply",
    "sample",
    "prefill",
]
SPANS: Final[tuple[str, ...]] = get_args(SpanName)
"""Every span there is, in the order of a microbatch's life."""

Kind = Literal["span", "instant", "counter"]
Listener = Callable[[str, "list[Span]"], None]
"""Called with the process's name and what was recorded since the last call."""

_log = logging.getLogger(__name__)


class Span(NamedTuple):
    """One record. An instant ends where it starts; a counter keeps its value in ``args``."""

    kind: Kind
    name: str
    target: Target | None
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Header(NamedTuple):
    """The first line of a span file: whose it is, and by which clock."""

    process: str
    role: str
    rank: int
    clock: str
    """``monotonic`` (one clock for all processes of a host) or ``virtual``."""
    clock_base_ns: int
    """The clock when the file was opened."""
    unix_base_ns: int | None
    """The wall clock at that moment: aligns the files of different hosts; none in virtual time."""
    host: str
    version: str


class Tracer:
    """Records the spans of one process.

    ``process`` is the member's name (``ffn-2``); ``directory`` gets ``<process>.jsonl``, replacing that of an earlier run; none
    writes no file; ``capacity`` bounds what is kept between flushes. Without directory and listener it is disabled.
    Appending is safe from the device's threads; ``flush`` and ``close`` belong to one thread.
    Raises ``HostError`` where the file cannot be made.
    """

    def __init__(
        self,
        process: str,
        clock: Clock,
        directory: Path | None,
        capacity: int = DEFAULT_CAPACITY,
        *,
        listener: Listener | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(
                f"capacity {capacity} would keep nothing; give 1 or more, or no directory to disable tracing"
            )
        self.process = process
        self.capacity = capacity
        self.dropped = 0
        """Records lost so far: to a full buffer, or to a disk that failed."""
        self.written = 0
        """Records in the file so far."""
        self._clock = clock
        self._buffer: deque[tuple[Kind, str, Target | None, int, int, dict[str, Any]]] = deque()
        self._append = self._buffer.append
        self._told_dropped = 0
        self._file: IO[bytes] | None = None
        self.path: Path | None = None
        if directory is not None:
            self.path = directory / f"{process}.jsonl"
            self._open(self.path)
        self._listener = listener
        self.enabled = self._file is not None or listener is not None
        """Whether anything is recorded: look here before computing costly arguments."""
        self.only: frozenset[str] | None = None
        """The spans that whoever listens wants; none: all. A hint: others may be kept as well."""

    @property
    def listener(self) -> Listener | None:
        """Who gets each batch at ``flush``, beside the file. It must not raise, nor keep the loop long."""
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = listener
        self.enabled = self._file is not None or listener is not None

    def now_ns(self) -> int:
        """The clock that spans are stamped with."""
        return self._clock.now_ns()

    def span(self, name: SpanName, target: Target | None, start_ns: int, end_ns: int, **args: Any) -> None:
        """Keeps one span: ``name`` of ``SPANS``, its target, and when it ran. One append; nothing is checked or formatted here."""
        if self.enabled:
            if len(self._buffer) < self.capacity:
                self._append(("span", name, target, start_ns, end_ns, args))
            else:
                self.dropped += 1

    def instant(self, name: str, at_ns: int, target: Target | None = None, **args: Any) -> None:
        """Keeps one moment (an epoch, an abort, a refusal)."""
        if self.enabled:
            if len(self._buffer) < self.capacity:
                self._append(("instant", name, target, at_ns, at_ns, args))
            else:
                self.dropped += 1

    def counter(self, name: str, at_ns: int, value: float) -> None:
        """Keeps one value of a quantity that goes up and down."""
        if self.enabled:
            if len(self._buffer) < self.capacity:
                self._append(("counter", name, None, at_ns, at_ns, {"value": value}))
            else:
                self.dropped += 1

    def flush(self, most: int | None = None) -> int:
        """Writes and hands out at most ``most`` of the oldest records (all without it); returns how many. About 2 us each."""
        count = len(self._buffer) if most is None else min(most, len(self._buffer))
        if count:
            # popleft, not a swap of buffers: a device thread may be appending.
            batch = [self._buffer.popleft() for _ in range(count)]
            if self._file is not None:
                lines = [_format(*record) for record in batch]
                if self.dropped > self._told_dropped:
                    self._told_dropped = self.dropped
                    lines.append(f'{{"dropped":{self.dropped}}}\n')
                self._write("".join(lines), count)
            if self._listener is not None:
                self._listener(self.process, [Span._make(record) for record in batch])
        return count

    def close(self) -> None:
        """Writes what is left and closes the file; idempotent. What is recorded afterwards is ignored."""
        self.flush()
        self.enabled = False
        if self._file is not None:
            self._write(f'{{"end":true,"records":{self.written},"dropped":{self.dropped}}}\n', 0)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> None:
        wall = isinstance(self._clock, WallClock)
        role, rank = split_member(self.process)
        header = {
            "afore_trace": TRACE_FORMAT,
            "process": self.process,
            "role": role,
            "rank": rank,
            "clock": "monotonic" if wall else "virtual",
            "clock_base_ns": self._clock.now_ns() if wall else 0,
            "unix_base_ns": time.time_ns() if wall else None,
            "host": os.uname().nodename if wall else "",
            "version": VERSION,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by close(); unbuffered: one write a flush
            self._file.write(json.dumps(header).encode() + b"\n")
        except OSError as error:
            if self._file is not None:
                self._file.close()
            raise HostError(
                f"trace file {path}",
                f"cannot be written: {error.strerror}",
                "give --trace a directory with room that you may write to",
            ) from error

    def _write(self, text: str, count: int) -> None:
        assert self._file is not None
        try:
            data = memoryview(text.encode())
            while data:
                data = data[self._file.write(data) :]
            self.written += count
        except OSError as error:
            # A full disk must not end a role that serves: the trace ends, and says so.
            _log.warning("%s: trace file %s failed (%s); spans are no longer written", self.process, self.path, error)
            self.dropped += count
            self._file.close()
            self._file = None
            self.enabled = self._listener is not None


def split_member(process: str) -> tuple[str, int]:
    """``ffn-2`` → ("ffn", 2); a name without a rank has rank 0."""
    role, dash, rank = process.rpartition("-")
    return (role, int(rank)) if dash and rank.isdecimal() else (process, 0)


def _format(kind: Kind, name: str, target: Target | None, start_ns: int, end_ns: int, args: dict[str, Any]) -> str:
    where = "" if target is None else f',"layer":{target.layer},"microbatch":{target.microbatch},"step":{target.step}'
    if kind == "span":
        assert name in SPANS, f"{name!r} is no span; SPANS has {', '.join(SPANS)}"
        line = f'{{"name":"{name}"{where},"start_ns":{start_ns},"end_ns":{end_ns}'
    elif kind == "counter":
        return (
            f'{{"counter":{json.dumps(name)},"at_ns":{start_ns},"value":{json.dumps(args["value"], default=_plain)}}}\n'
        )
    else:
        line = f'{{"instant":{json.dumps(name)}{where},"at_ns":{start_ns}'
    return f'{line},"args":{json.dumps(args, default=_plain)}}}\n' if args else f"{line}}}\n"


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as JSON; anything else as text, so that an argument never costs a trace."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def parse_header(line: bytes) -> Header:
    """The first line of a span file. Raises ``ValueError`` where it is none, or of a format that this version does not read."""
    fields = _json(line)
    if not isinstance(fields, dict) or "afore_trace" not in fields:
        raise ValueError("the first line is no header of a span file")
    if fields["afore_trace"] != TRACE_FORMAT:
        theirs = f"format {str(fields['afore_trace'])[:40]} of AFORE {str(fields.get('version'))[:40]}"
        raise ValueError(f"written in {theirs}; this is AFORE {VERSION}, which reads format {TRACE_FORMAT}")
    try:
        header = Header(**{name: fields[name] for name in Header._fields})
    except KeyError as error:
        raise ValueError(f"the header lacks {error.args[0]!r}") from error
    texts = (header.process, header.role, header.clock, header.host, header.version)
    if not all(isinstance(text, str) for text in texts) or not _whole(header.rank, 0, _MOST_RANK):
        raise ValueError("a field of the header has the wrong type")
    if header.clock not in ("monotonic", "virtual"):
        raise ValueError(f"its clock is {header.clock[:40]!r}")
    # Without the wall clock's time, its host could not be aligned with others.
    if not _time(header.clock_base_ns) or not (
        _time(header.unix_base_ns) or (header.unix_base_ns is None and header.clock == "virtual")
    ):
        raise ValueError("the header has no time of its clocks")
    return header


def parse_line(line: bytes) -> Span | dict[str, Any]:
    """One line after the header: a record, or the fields of a ``dropped`` or ``end`` line. Raises ``ValueError`` for others."""
    fields = _json(line)
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    try:
        if "name" in fields:
            return _span("span", fields["name"], fields, fields["start_ns"], fields["end_ns"], fields.get("args", {}))
        if "counter" in fields:
            at_ns = fields["at_ns"]
            return _span("counter", fields["counter"], fields, at_ns, at_ns, {"value": fields["value"]})
        if "instant" in fields:
            at_ns = fields["at_ns"]
            return _span("instant", fields["instant"], fields, at_ns, at_ns, fields.get("args", {}))
    except KeyError as error:
        raise ValueError(f"a record lacks {error.args[0]!r}") from error
    if _whole(fields.get("dropped"), 0, MOST_NS):
        return fields
    raise ValueError("neither a record nor a count")


def _span(kind: Kind, name: Any, fields: dict[str, Any], start_ns: Any, end_ns: Any, args: Any) -> Span:
    target = (fields["layer"], fields["microbatch"], fields["step"]) if "layer" in fields else ()
    if not (
        isinstance(name, str)
        and isinstance(args, dict)
        and _time(start_ns)
        and _time(end_ns)
        and all(_whole(n, 0, most) for n, most in zip(target, _MOST_OF_TARGET, strict=False))
    ):
        raise ValueError("a field of a record has the wrong type or is out of range")
    return Span(kind, name, Target(*target) if target else None, start_ns, end_ns, args)


_MOST_RANK: Final = 1 << 20
_MOST_OF_TARGET: Final = ((1 << LAYER_BITS) - 1, (1 << MICROBATCH_BITS) - 1, (1 << (STEP_BITS - 1)) - 2)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _time(value: Any) -> bool:
    return _whole(value, -MOST_NS, MOST_NS)
