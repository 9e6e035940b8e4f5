"""Spans: kept cheaply, written late, bounded, read back as they were."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore import __version__
from afore.core.clock import LoopClock, WallClock
from afore.core.errors import HostError
from afore.core.spans import SPANS, Span, parse_header, parse_line, split_member
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.testing import run_virtual

TARGET = Target(3, 1, 17)


def read(path: Path) -> tuple[Any, list[Span | dict[str, Any]]]:
    header, *lines = path.read_bytes().splitlines()
    return parse_header(header), [parse_line(line) for line in lines]


def test_a_file_holds_header_records_and_end(tmp_path: Path) -> None:
    tracer = Tracer("ffn-2", WallClock(), tmp_path / "new" / "traces")
    tracer.span("copy", TARGET, 1_200, 5_400, slot=2, expert=np.int32(9), generation=41, generations=np.array([1, 2]))
    tracer.span("plan", None, 10**18, 10**18 + 1)
    tracer.instant("epoch", 7, epoch=2)
    tracer.instant("abort", 8, TARGET)
    tracer.counter("kv_blocks", 9, np.float64(0.5))
    tracer.close()
    assert tracer.path == tmp_path / "new" / "traces" / "ffn-2.jsonl"
    header, lines = read(tracer.path)
    assert (header.process, header.role, header.rank, header.clock) == ("ffn-2", "ffn", 2, "monotonic")
    assert header.version == __version__
    assert header.unix_base_ns is not None
    assert lines == [
        Span("span", "copy", TARGET, 1_200, 5_400, {"slot": 2, "expert": 9, "generation": 41, "generations": [1, 2]}),
        Span("span", "plan", None, 10**18, 10**18 + 1, {}),
        Span("instant", "epoch", None, 7, 7, {"epoch": 2}),
        Span("instant", "abort", TARGET, 8, 8, {}),
        Span("counter", "kv_blocks", None, 9, 9, {"value": 0.5}),
        {"end": True, "records": 5, "dropped": 0},
    ]


json_values = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.lists(st.integers(0, 9), max_size=3)
)
targets = st.none() | st.builds(Target, st.integers(0, 2047), st.integers(0, 4095), st.integers(0, 2**38))
nanoseconds = st.integers(0, 2**62)
names = st.from_regex("[a-z_]{1,8}", fullmatch=True).filter(
    lambda name: name not in {"name", "target", "start_ns", "end_ns", "self"}
)


@settings(deadline=None, max_examples=25)
@given(
    spans=st.lists(
        st.tuples(
            st.sampled_from(SPANS), targets, nanoseconds, nanoseconds, st.dictionaries(names, json_values, max_size=3)
        )
    ),
    most=st.integers(1, 5),
)
def test_what_is_recorded_is_what_is_read_and_what_is_heard(spans: list[tuple[Any, ...]], most: int) -> None:
    heard: list[Span] = []
    with tempfile.TemporaryDirectory() as directory:
        tracer = Tracer("door-0", WallClock(), Path(directory), listener=lambda process, batch: heard.extend(batch))
        for name, target, start_ns, end_ns, args in spans:
            tracer.span(name, target, start_ns, end_ns, **args)
        while tracer.flush(most):
            pass
        tracer.close()
        assert tracer.path is not None
        _, lines = read(tracer.path)
    expected = [Span("span", *span) for span in spans]
    assert heard == expected
    assert lines[:-1] == expected


def test_nothing_is_written_before_flush_and_no_more_than_asked(tmp_path: Path) -> None:
    tracer = Tracer("scheduler-0", WallClock(), tmp_path)
    for sequence in range(10):
        tracer.span("plan", TARGET, sequence, sequence + 1, sequence=sequence)
    path = tmp_path / "scheduler-0.jsonl"
    assert len(read(path)[1]) == 0
    assert tracer.flush(4) == 4
    assert [span.args["sequence"] for span in read(path)[1] if isinstance(span, Span)] == [0, 1, 2, 3]
    assert tracer.flush() == 6
    assert tracer.flush() == 0
    tracer.close()
    tracer.close()
    assert len(read(path)[1]) == 11


def test_a_full_buffer_drops_the_oldest_and_counts(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path, 3)
    for step in range(5):
        tracer.span("experts", Target(0, 0, step), step, step)
    tracer.instant("late", 9)
    tracer.counter("late", 9, 1)
    assert tracer.dropped == 4
    assert tracer.flush() == 3
    tracer.span("experts", Target(0, 0, 9), 9, 9)
    tracer.close()
    _, lines = read(tmp_path / "ffn-0.jsonl")
    assert [line.target.step for line in lines if isinstance(line, Span) and line.target] == [4, 9]
    assert [line for line in lines if isinstance(line, dict)] == [
        {"dropped": 4},
        {"end": True, "records": 4, "dropped": 4},
    ]


def test_without_directory_and_listener_nothing_is_kept() -> None:
    tracer = Tracer("ffn-0", WallClock(), None, 1)
    for _ in range(3):
        tracer.span("wait", TARGET, 1, 2)
    assert not tracer.enabled
    assert (tracer.flush(), tracer.dropped, tracer.path) == (0, 0, None)
    tracer.close()


def test_a_listener_may_come_and_go() -> None:
    heard: list[tuple[str, list[Span]]] = []
    tracer = Tracer("attention-1", WallClock(), None)
    enabled = [tracer.enabled]
    tracer.span("gate", TARGET, 1, 2)
    tracer.listener = lambda process, batch: heard.append((process, batch))
    enabled.append(tracer.enabled)
    tracer.span("gate", TARGET, 3, 4)
    tracer.flush()
    tracer.flush()
    tracer.listener = None
    enabled.append(tracer.enabled)
    tracer.span("gate", TARGET, 5, 6)
    assert enabled == [False, True, False]
    tracer.close()
    assert heard == [("attention-1", [Span("span", "gate", TARGET, 3, 4, {})])]


def test_after_close_records_are_ignored(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path)
    tracer.close()
    tracer.span("wait", TARGET, 1, 2)
    assert tracer.flush() == 0


def test_device_threads_may_append_while_the_loop_flushes(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path)
    each = 2_000

    def record(name: str) -> None:
        for index in range(each):
            tracer.span("copy" if name == "migration" else "experts", TARGET, index, index)

    threads = [threading.Thread(target=record, args=(name,)) for name in ("migration", "model")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tracer.flush(50)
    for thread in threads:
        thread.join()
    tracer.close()
    _, lines = read(tmp_path / "ffn-0.jsonl")
    for name in ("copy", "experts"):
        assert [line.start_ns for line in lines if isinstance(line, Span) and line.name == name] == list(range(each))


def test_virtual_runs_write_identical_files(tmp_path: Path) -> None:
    async def main() -> bytes:
        clock = LoopClock()
        tracer = Tracer("ffn-0", clock, tmp_path)
        start_ns = tracer.now_ns()
        await clock.sleep_us(3)
        tracer.span("experts", TARGET, start_ns, tracer.now_ns())
        tracer.close()
        assert tracer.path is not None
        return tracer.path.read_bytes()

    first = run_virtual(main)
    assert first == run_virtual(main)
    header = parse_header(first.splitlines()[0])
    assert (header.clock, header.clock_base_ns, header.unix_base_ns, header.host) == ("virtual", 0, None, "")
    assert b'"start_ns":0,"end_ns":3000' in first


def test_a_span_that_is_none_is_refused_when_written(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path)
    tracer.span("expert", TARGET, 1, 2)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(AssertionError, match="'expert' is no span; SPANS has attention, gate, "):
        tracer.flush()
    tracer.close()


def test_a_directory_that_cannot_be_written_is_a_host_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"trace file .*ffn-0.jsonl: cannot be written: .*; give --trace a directory"):
        Tracer("ffn-0", WallClock(), tmp_path / "file")


def test_a_disk_that_fills_ends_the_trace_and_not_the_role(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Span] = []
    tracer = Tracer("ffn-0", WallClock(), tmp_path, listener=lambda process, batch: heard.extend(batch))
    assert tracer._file is not None
    tracer._file.close()
    tracer._file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  # a disk without room
    tracer.span("wait", TARGET, 1, 2)
    with caplog.at_level(logging.WARNING):
        tracer.flush()
    assert "No space left on device" in caplog.text
    assert "spans are no longer written" in caplog.text
    tracer.span("wait", TARGET, 3, 4)
    tracer.close()
    assert tracer.dropped == 1
    assert len(heard) == 2


def test_a_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 0 would keep nothing"):
        Tracer("ffn-0", WallClock(), None, 0)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"name":"wait","layer":0,"microb', "Unterminated string"),
        (b"[]", "no JSON object"),
        (b'{"name":"wait","start_ns":1}', "a record lacks 'end_ns'"),
        (b'{"name":"wait","layer":1,"start_ns":1,"end_ns":1}', "a record lacks 'microbatch'"),
        (b'{"name":"wait","start_ns":"1","end_ns":1}', "a field of a record has the wrong type"),
        (b'{"instant":1,"at_ns":1}', "a field of a record has the wrong type"),
        (b'{"other":1}', "neither a record nor a count"),
        (b'{"dropped":"zzz"}', "neither a record nor a count"),
        (b'{"dropped":-1}', "neither a record nor a count"),
        (b'{"end":true}', "neither a record nor a count"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"name":"wait","start_ns":1,"end_ns":%d}' % 2**63, "out of range"),
        (b'{"name":"wait","start_ns":-%d,"end_ns":1}' % 2**63, "out of range"),
        (b'{"counter":"c","at_ns":%d,"value":1}' % 10**400, "out of range"),
        (b'{"instant":"c","at_ns":%s}' % (b"9" * 5000), "digits"),
        (b'{"name":"wait","layer":2048,"microbatch":0,"step":0,"start_ns":1,"end_ns":1}', "out of range"),
        (b'{"name":"wait","layer":0,"microbatch":-1,"step":0,"start_ns":1,"end_ns":1}', "out of range"),
        (b'{"name":"wait","layer":0,"microbatch":0,"step":%d,"start_ns":1,"end_ns":1}' % 2**39, "out of range"),
    ],
)
def test_a_line_that_is_no_record_is_refused(line: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_line(line)


HEADER = {
    "afore_trace": 1, "process": "ffn-0", "role": "ffn", "rank": 0, "clock": "monotonic", "clock_base_ns": 5,
    "unix_base_ns": 7, "host": "h", "version": "0",
}  # fmt: skip


def test_a_header_is_read_as_it_is() -> None:
    assert parse_header(json.dumps(HEADER).encode())._asdict() == {
        name: value for name, value in HEADER.items() if name != "afore_trace"
    } | {"segment": 0, "before": 0}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_header(b"[" * 100_000)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "wait"}, "no header of a span file"),
        (
            {"afore_trace": 99, "version": "9.9"},
            "written in format 99 of AFORE 9.9; this is AFORE .*, which reads format 1",
        ),
        ({"afore_trace": 1}, "the header lacks 'process'"),
        ({**HEADER, "host": ["h"]}, "a field of the header has the wrong type"),
        ({**HEADER, "rank": "0"}, "a field of the header has the wrong type"),
        ({**HEADER, "rank": -1}, "a field of the header has the wrong type"),
        ({**HEADER, "segment": -1}, "a field of the header has the wrong type"),
        ({**HEADER, "before": "2"}, "a field of the header has the wrong type"),
        ({**HEADER, "clock": "sun"}, "its clock is 'sun'"),
        ({**HEADER, "unix_base_ns": "x"}, "no time of its clocks"),
        ({**HEADER, "unix_base_ns": None}, "no time of its clocks"),
        ({**HEADER, "unix_base_ns": 2**63}, "no time of its clocks"),
        ({**HEADER, "clock": "virtual", "clock_base_ns": 0.5}, "no time of its clocks"),
    ],
)
def test_a_header_that_is_none_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_header(json.dumps(fields).encode())


def test_member_names() -> None:
    assert split_member("ffn-2") == ("ffn", 2)
    assert split_member("scheduler") == ("scheduler", 0)
    assert split_member("door-x") == ("door-x", 0)
