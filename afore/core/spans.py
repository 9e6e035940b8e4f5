"""What a span is, and the lines of a span file.

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
from typing import Any, Final, Literal, NamedTuple, get_args

from afore.core.target import LAYER_BITS, MICROBATCH_BITS, STEP_BITS, Target
from afore.core.version import VERSION

TRACE_FORMAT: Final = 1
MOST_NS: Final = 1 << 62
"""Of a time in a file: what is beyond is none, and differences stay within 64 bits."""

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
    segment: int = 0
    """Which of the process's segments this is; see ``afore.core.span_file``."""
    before: int = 0
    """Records in the segments before it: those that a reader lacks where these are gone."""


def split_member(process: str) -> tuple[str, int]:
    """``ffn-2`` → ("ffn", 2); a name without a rank has rank 0."""
    role, dash, rank = process.rpartition("-")
    return (role, int(rank)) if dash and rank.isdecimal() else (process, 0)


def format_record(
    kind: Kind, name: str, target: Target | None, start_ns: int, end_ns: int, args: dict[str, Any]
) -> str:
    """One record as the line that ``parse_line`` reads."""
    where = "" if target is None else f',"layer":{target.layer},"microbatch":{target.microbatch},"step":{target.step}'
    if kind == "span":
        assert name in SPANS, f"{name!r} is no span; SPANS has {', '.join(SPANS)}"
        line = f'{{"name":"{name}"{where},"start_ns":{start_ns},"end_ns":{end_ns}'
    elif kind == "counter":
        return f'{{"counter":{json.dumps(name)},"at_ns":{start_ns},"value":{_encode(args["value"])}}}\n'
    else:
        line = f'{{"instant":{json.dumps(name)}{where},"at_ns":{start_ns}'
    return f'{line},"args":{_encode(args)}}}\n' if args else f"{line}}}\n"


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as JSON; anything else as text, so that an argument never costs a trace."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_encode: Final = json.JSONEncoder(default=_plain).encode
"""``json.dumps`` would build an encoder for every record."""


def parse_header(line: bytes) -> Header:
    """The first line of a span file. Raises ``ValueError`` where it is none, or of a format that this version does not read."""
    fields = _json(line)
    if not isinstance(fields, dict) or "afore_trace" not in fields:
        raise ValueError("the first line is no header of a span file")
    if fields["afore_trace"] != TRACE_FORMAT:
        theirs = f"format {str(fields['afore_trace'])[:40]} of AFORE {str(fields.get('version'))[:40]}"
        raise ValueError(f"written in {theirs}; this is AFORE {VERSION}, which reads format {TRACE_FORMAT}")
    try:
        header = Header(**{name: fields[name] for name in Header._fields if name in fields or name not in _SEGMENTED})
    except KeyError as error:
        raise ValueError(f"the header lacks {error.args[0]!r}") from error
    if not _whole(header.segment, 0, MOST_NS) or not _whole(header.before, 0, MOST_NS):
        raise ValueError("a field of the header has the wrong type")
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


_SEGMENTED: Final = frozenset({"segment", "before"})
"""Fields of the header that the first segment does without."""
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
