"""Span files while a run goes on: what is there after a kill, what of a long run is kept, what is read meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afore.core.clock import LoopClock, WallClock
from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.span_file import SEGMENTS, segment_of
from afore.core.spans import Span, parse_line
from afore.core.target import Target
from afore.core.trace import PIECE, WRITE_PERIOD_US, Tracer, write_spans
from afore.testing import run_virtual
from afore.tools.trace import main
from afore.tools.trace_files import open_directory
from afore.transport.crew import crew


def steps(directory: Path) -> list[int]:
    (file,), _ = open_directory(directory)
    return [span.target.step for _, span in file.records() if span.target is not None]


def record(tracer: Tracer, begin: int, end: int) -> None:
    for step in range(begin, end):
        tracer.span("experts", Target(0, 0, step), step * 10, step * 10 + 5)


def test_spans_are_written_once_a_period_and_piece_by_piece(tmp_path: Path) -> None:
    async def run() -> None:
        clock = LoopClock()
        tracer = Tracer("ffn-0", clock, tmp_path)
        async with crew() as group:
            writing = group.create_task(write_spans(tracer, clock))
            record(tracer, 0, 3 * PIECE)
            await clock.sleep_us(WRITE_PERIOD_US - 1)
            assert steps(tmp_path) == []
            await clock.sleep_us(2)
            assert steps(tmp_path) == list(range(PIECE))
            # Of the next batch, as it comes after this one's begin.
            record(tracer, 3 * PIECE, 4 * PIECE)
            await clock.sleep_us(WRITE_PERIOD_US / 2)
            assert steps(tmp_path) == list(range(3 * PIECE))
            await clock.sleep_us(WRITE_PERIOD_US)
            assert steps(tmp_path) == list(range(4 * PIECE))
            assert tracer.waiting == 0
            writing.cancel()
        tracer.close()

    run_virtual(run)


VICTIM = """
import asyncio, os, signal, sys
from pathlib import Path
from afore.core import trace
from afore.core.clock import WallClock
from afore.core.target import Target
trace.WRITE_PERIOD_US = 1e3
async def run():
    clock = WallClock()
    tracer = trace.Tracer("ffn-0", clock, Path(sys.argv[1]))
    writing = asyncio.create_task(trace.write_spans(tracer, clock))
    for step in range(100):
        tracer.span("experts", Target(0, 0, step), step, step + 1)
    async with asyncio.timeout(60):
        while tracer.waiting:
            await clock.sleep_us(1e3)
    tracer.span("experts", Target(0, 0, 100), 100, 101)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run())
"""


@pytest.mark.slow
def test_a_killed_process_has_written_all_but_its_last_batch(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", VICTIM, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert steps(tmp_path) == list(range(100))


def test_a_run_that_goes_on_has_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path)
    record(tracer, 0, 7)
    tracer.flush()
    with open(tmp_path / "ffn-0.jsonl", "ab") as half:
        half.write(b'{"name":"experts","layer":0,')
    assert main(["summary", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["spans"]["experts"]["count"] == 7
    (problem,) = shown["problems"]
    assert problem.startswith("ffn-0.jsonl: the last line is torn")
    tracer.close()


def test_the_bound_drops_the_oldest_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    most_bytes = 40_000
    tracer = Tracer("ffn-0", WallClock(), tmp_path, most_bytes=most_bytes)
    for batch in range(100):
        record(tracer, batch * 20, batch * 20 + 20)
        tracer.flush()
        paths = list(tmp_path.iterdir())
        assert len(paths) <= SEGMENTS
        assert sum(path.stat().st_size for path in paths) <= most_bytes
    tracer.close()
    assert tracer.dropped == 0
    (file,), _ = open_directory(tmp_path)
    kept = [(offset, span) for offset, span in file.records()]
    assert [span.target.step for _, span in kept if span.target] == list(range(file.bounded, 2000))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > most_bytes * (SEGMENTS - 2) / SEGMENTS
    assert all(parse_line(file.line_at(offset)) == span for offset, span in kept)
    assert file.closed
    assert any(f"the oldest {file.bounded} records made room" in problem for problem in file.problems())
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "merged.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spans"] == 2000 - file.bounded


def test_what_was_opened_stays_readable_while_segments_go_and_a_new_run_begins(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path, most_bytes=4_000)
    record(tracer, 0, 5)
    tracer.flush()
    (file,), _ = open_directory(tmp_path)
    for step in range(5, 200):
        record(tracer, step, step + 1)
        tracer.flush()
    tracer.close()
    assert not (tmp_path / "ffn-0.jsonl").exists()
    again = Tracer("ffn-0", WallClock(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ffn-0.jsonl"]
    again.close()
    assert [span.target.step for _, span in file.records() if span.target] == list(range(5))


def test_what_was_dropped_is_said_in_every_later_segment(tmp_path: Path) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path, 2, most_bytes=4_000)
    record(tracer, 0, 9)
    tracer.flush()
    for step in range(9, 100):
        record(tracer, step, step + 1)
        tracer.flush()
    (file,), _ = open_directory(tmp_path)
    assert all(isinstance(span, Span) for _, span in file.records())
    assert file.bounded
    assert (file.dropped, file.closed) == (7, False)
    tracer.close()


def test_segments_by_name() -> None:
    assert segment_of(Path("ffn-2.jsonl")) == ("ffn-2", 0)
    assert segment_of(Path("ffn-2.17.jsonl")) == ("ffn-2", 17)
    assert segment_of(Path("ffn-2.json")) is None


@pytest.mark.parametrize("mib", [0, -1, 1 << 21])
def test_a_bound_that_is_none_is_refused(mib: int) -> None:
    with pytest.raises(ConfigError, match=r"trace_mib: .*; give 1 to 1048576"):
        RunConfig(trace_mib=mib)
