"""Merging span files: valid Chrome trace JSON with Figure 7's lanes and whole arrows, from files written by ``Tracer``."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from afore.core.clock import WallClock
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.tools.trace import main

Event = dict[str, Any]
ATTENTION_WORKERS, FFN_WORKERS, LAYERS, MICROBATCHES, STEPS = 2, 3, 2, 2, 4


def write_run(directory: Path, seed: int = 0) -> int:
    """The span files of a small run in which copies land, outlast their window, and are used by a later target; copies made."""
    jitter = random.Random(seed).randrange
    clock = WallClock()
    attention = [Tracer(f"attention-{rank}", clock, directory) for rank in range(ATTENTION_WORKERS)]
    ffn = [Tracer(f"ffn-{rank}", clock, directory) for rank in range(FFN_WORKERS)]
    scheduler = Tracer("scheduler-0", clock, directory)
    prefill = Tracer("prefill-0", clock, directory)
    begin_ns = clock.now_ns()
    prefill.span("prefill", None, begin_ns - 900_000, begin_ns, tokens=12)
    copies = 0
    targets = [Target(l, m, s) for s in range(STEPS) for l in range(LAYERS) for m in range(MICROBATCHES)]
    for sequence, target in enumerate(targets, 1):
        at_ns = begin_ns + sequence * 100_000
        for tracer in attention:
            begin = at_ns + jitter(5_000)
            tracer.span("attention", target, begin, begin + 30_000, tokens=4)
            tracer.span("gate", target, begin + 30_000, begin + 35_000)
            tracer.span("demand_write", target, begin + 35_000, begin + 36_000)
            tracer.span("a2f", target, begin + 35_500, begin + 41_000)
        scheduler.span("plan", target, at_ns + 50_000, at_ns + 60_000, sequence=sequence)
        scheduler.span("publish", target, at_ns + 60_000, at_ns + 60_000, sequence=sequence)
        for rank, tracer in enumerate(ffn):
            read = at_ns + 61_000 + jitter(3_000)
            tracer.span("read", target, read, read + 1_000, sequence=sequence)
            generations, slots = [], []
            if sequence % 3 == rank:
                copies += 1
                tracer.span("submit", target, read + 1_000, read + 2_000, sequence=sequence, copies=1)
                # Recorded when it lands, long after the spans that come behind it in the file.
                tracer.span(
                    "copy",
                    target,
                    read + 2_000,
                    read + 90_000,
                    layer=target.layer,
                    slot=0,
                    expert=7,
                    generation=sequence,
                )
                generations, slots = [sequence], [0]
            elif rank == 0:
                generations, slots = [max(1, sequence - sequence % 3)], [0]
            execute = at_ns + 140_000
            tracer.span("wait", target, execute, execute + 2_000, generations=generations, slots=slots)
            tracer.span("gather", target, execute + 2_000, execute + 4_000)
            tracer.span("partition", target, execute + 4_000, execute + 6_000)
            tracer.span("experts", target, execute + 10_000, execute + 90_000, pairs=32)
            tracer.span("reduce", target, execute + 90_000, execute + 95_000)
            tracer.span("reply", target, execute + 95_000, execute + 99_000)
            tracer.counter("held_copies", execute, sequence % 2)
    scheduler.instant("epoch", begin_ns, epoch=1)
    for tracer in (*attention, *ffn, scheduler, prefill):
        tracer.close()
    return copies


def merged(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[Event], dict[str, Any]]:
    out = tmp_path / "trace.json"
    assert main(["merge", str(directory), "-o", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    trace = json.loads(out.read_text())
    check_chrome_trace(trace)
    return trace["traceEvents"], summary


def check_chrome_trace(trace: dict[str, Any]) -> None:
    """The rules of the Chrome trace event format that viewers rely on."""
    assert trace["displayTimeUnit"] == "ns"
    events: list[Event] = trace["traceEvents"]
    named_processes, named_threads = set(), set()
    lanes: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    flows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in {"M", "X", "i", "C", "s", "f"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in named_processes
                named_processes.add(event["pid"])
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in named_threads
                named_threads.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["cat"]
        lanes[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    for (pid, tid), lane in lanes.items():
        assert pid in named_processes
        assert (pid, tid) in named_threads
        check_lane(lane)
    for ends in flows.values():
        assert sorted(end["ph"] for end in ends) == ["f", "s"], "an arrow without its other end"
        assert len({(end["name"], end["cat"]) for end in ends}) == 1
        assert [end["bp"] for end in ends if end["ph"] == "f"] == ["e"]


def check_lane(lane: list[Event]) -> None:
    """Times never go back, spans are apart or nested, and each end of an arrow lies on a span that begins there."""
    open_ends: list[int] = []
    last_ns, last_span = -1, None
    for event in lane:
        ns = round(event["ts"] * 1000)
        assert ns >= last_ns
        last_ns = ns
        if event["ph"] == "X":
            end_ns = ns + round(event["dur"] * 1000)
            while open_ends and open_ends[-1] <= ns:
                open_ends.pop()
            assert not open_ends or end_ns <= open_ends[-1], "spans of one lane overlap"
            open_ends.append(end_ns)
            last_span = event
        elif event["ph"] in "sf":
            assert last_span is not None
            assert last_span["ts"] == event["ts"]


def spans(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def arrows(events: list[Event], kind: str) -> list[tuple[Event, Event]]:
    """(source span, sink span) of each arrow of a kind: an end belongs to the span written just before it."""
    ends: defaultdict[int, dict[str, Event]] = defaultdict(dict)
    last: dict[tuple[int, int], Event] = {}
    for event in events:
        if event["ph"] == "X":
            last[event["pid"], event["tid"]] = event
        elif event["ph"] in "sf" and event["name"] == kind:
            ends[event["id"]][event["ph"]] = last[event["pid"], event["tid"]]
    return [(pair["s"], pair["f"]) for pair in ends.values()]


def same_target(one: Event, other: Event) -> bool:
    return all(one["args"][key] == other["args"][key] for key in ("layer", "microbatch", "step"))


def test_a_run_becomes_a_valid_trace_with_whole_arrows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = write_run(tmp_path / "spans")
    events, summary = merged(tmp_path / "spans", tmp_path, capsys)
    targets = LAYERS * MICROBATCHES * STEPS
    assert summary["problems"] == []
    assert summary["files"] == ATTENTION_WORKERS + FFN_WORKERS + 2
    assert summary["spans"] == len([event for event in events if event["ph"] == "X"])
    assert summary["counters"] == targets * FFN_WORKERS
    assert summary["instants"] == 1
    assert min(event["ts"] for event in events if "ts" in event) == 0

    demand = arrows(events, "demand")
    assert len(demand) == summary["flows"]["demand"] == targets * ATTENTION_WORKERS
    assert all(source["name"] == "demand_write" and sink["name"] == "plan" for source, sink in demand)
    assert all(same_target(source, sink) for source, sink in demand)

    copy = arrows(events, "copy")
    assert len(copy) == summary["flows"]["copy"] == copies
    assert all(source["name"] == "plan" and sink["name"] == "copy" for source, sink in copy)
    assert all(source["args"]["sequence"] == sink["args"]["generation"] for source, sink in copy)

    use = arrows(events, "use")
    assert len(use) == summary["flows"]["use"] == copies - summary["unused_copies"]
    assert len(use) == copies
    assert all(source["name"] == "copy" and sink["name"] == "experts" for source, sink in use)
    assert all(source["pid"] == sink["pid"] and same_target(source, sink) for source, sink in use)


def test_lanes_are_those_of_figure_7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "spans")
    events, _ = merged(tmp_path / "spans", tmp_path, capsys)
    process = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rank = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [process[pid] for pid in sorted(rank, key=lambda pid: rank[pid])] == [
        *(f"attention-{a}" for a in range(ATTENTION_WORKERS)),
        "scheduler-0",
        *(f"ffn-{w}" for w in range(FFN_WORKERS)),
        "prefill-0",
    ]
    lane = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = {
        (process[event["pid"]].rsplit("-", 1)[0], lane[event["pid"], event["tid"]].split(" (2")[0], event["name"])
        for event in events
        if event["ph"] == "X"
    }
    assert shown == {
        ("attention", "compute", "attention"),
        ("attention", "compute", "gate"),
        ("attention", "transfer (demand, A2F)", "demand_write"),
        ("attention", "transfer (demand, A2F)", "a2f"),
        ("scheduler", "plan and publish", "plan"),
        ("scheduler", "plan and publish", "publish"),
        ("ffn", "FFN CPU (read, submit, check)", "read"),
        ("ffn", "FFN CPU (read, submit, check)", "submit"),
        ("ffn", "model stream", "wait"),
        ("ffn", "migration stream", "copy"),
        ("ffn", "model stream", "gather"),
        ("ffn", "model stream", "partition"),
        ("ffn", "model stream", "experts"),
        ("ffn", "model stream", "reduce"),
        ("ffn", "transfer (F2A)", "reply"),
        ("prefill", "prefill", "prefill"),
    }


def test_nanoseconds_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path / "spans")
    start = 1_234_567_890_123_456_789
    tracer.span("experts", Target(0, 0, 0), start, start + 1)
    tracer.span("experts", Target(0, 0, 1), start + 10**15 + 3, start + 10**15 + 10)
    tracer.close()
    events, _ = merged(tmp_path / "spans", tmp_path, capsys)
    first, second = spans(events, "experts")
    assert (first["ts"], first["dur"]) == (0.0, 0.001)
    assert (round(second["ts"] * 1000), second["dur"]) == (10**15 + 3, 0.007)


def test_a_copy_is_first_used_by_the_earliest_target_that_waits_for_its_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path / "spans")
    copied, other, later = Target(1, 0, 0), Target(1, 1, 0), Target(1, 0, 1)
    tracer.span("copy", copied, 10, 20, layer=1, slot=3, expert=5, generation=8)
    tracer.span("copy", copied, 10, 25, layer=1, slot=4, expert=6, generation=8)
    tracer.span("copy", copied, 10, 30, layer=1, slot=5, expert=7, generation=8)
    tracer.span("wait", later, 300, 301, generations=[8, 8], slots=[3, 4])
    tracer.span("experts", later, 310, 320)
    tracer.span("wait", other, 100, 101, generations=[8, 7], slots=[4, 3])
    tracer.span("experts", other, 110, 120)
    tracer.close()
    events, summary = merged(tmp_path / "spans", tmp_path, capsys)
    used = {source["args"]["slot"]: sink["args"] for source, sink in arrows(events, "use")}
    assert {slot: (args["microbatch"], args["step"]) for slot, args in used.items()} == {3: (0, 1), 4: (1, 0)}
    assert summary["unused_copies"] == 1


def test_epochs_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Tracer("scheduler-0", WallClock(), tmp_path / "spans")
    ffn = Tracer("ffn-0", WallClock(), tmp_path / "spans")
    for epoch in (1, 2):
        target = Target(0, 0, epoch)
        scheduler.span("plan", target, epoch * 100, epoch * 100 + 1, sequence=5, epoch=epoch)
        ffn.span("copy", target, epoch * 100 + 2, epoch * 100 + 9, layer=0, slot=0, expert=1, generation=5, epoch=epoch)
    scheduler.close()
    ffn.close()
    events, _ = merged(tmp_path / "spans", tmp_path, capsys)
    assert [(source["args"]["epoch"], sink["args"]["epoch"]) for source, sink in arrows(events, "copy")] == [
        (1, 1),
        (2, 2),
    ]


def test_overlapping_spans_get_lanes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer("attention-0", WallClock(), tmp_path / "spans")
    for index in range(250):
        tracer.span("attention", Target(0, index, 0), index * 10, index * 10 + 25)
    tracer.span("attention", Target(0, 0, 1), 10_000, 20_000)
    tracer.span("attention", Target(0, 0, 2), 11_000, 12_000)
    tracer.close()
    events, _ = merged(tmp_path / "spans", tmp_path, capsys)
    titles = sorted(event["args"]["name"] for event in events if event["name"] == "thread_name")
    assert titles == ["compute", "compute (2)", "compute (3)"]
    nested = spans(events, "attention")[-2:]
    assert nested[0]["tid"] == nested[1]["tid"]


def test_hosts_are_aligned_by_their_wall_clocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for process, host, monotonic, unix in (
        ("ffn-0", "a", 1_000, 50_000),
        ("ffn-1", "b", 9_000, 50_100),
        ("ffn-2", "b", 9_500, 9),
    ):
        header = {"afore_trace": 1, "process": process, "role": "ffn", "rank": int(process[-1]), "clock": "monotonic"}
        header |= {"clock_base_ns": monotonic, "unix_base_ns": unix, "host": host, "version": "0"}
        record = {
            "name": "experts",
            "start_ns": monotonic,
            "end_ns": monotonic + 5,
            "layer": 0,
            "microbatch": 0,
            "step": 0,
        }
        lines = [json.dumps(line) for line in (header, record, {"end": True, "records": 1, "dropped": 0})]
        (tmp_path / f"{process}.jsonl").write_text("\n".join(lines) + "\n")
    events, _ = merged(tmp_path, tmp_path, capsys)
    assert [span["ts"] for span in spans(events, "experts")] == [0.0, 0.1, 0.6]


def test_torn_and_broken_files_are_merged_as_far_as_they_go_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "spans"
    write_run(directory)
    torn, broken, killed, full = (directory / f"{name}.jsonl" for name in ("ffn-0", "ffn-1", "ffn-2", "attention-0"))
    torn.write_bytes(torn.read_bytes()[:-60])
    lines = broken.read_bytes().splitlines(keepends=True)
    broken.write_bytes(b"".join([*lines[:5], b"garbage\n", b"\xff\xfe\n", b"[" * 99_999 + b"\n", *lines[5:]]))
    killed.write_bytes(b"".join(killed.read_bytes().splitlines(keepends=True)[:-1]))
    full.write_bytes(full.read_bytes().replace(b'"dropped":0', b'"dropped":17'))
    (directory / "ffn-8.jsonl").write_bytes(b'{"afore_tr')
    (directory / "ffn-9.jsonl").write_bytes(b'{"afore_trace": 7, "version": "9.0"}\n')
    _, summary = merged(directory, tmp_path, capsys)
    problems = "\n".join(summary["problems"])
    assert len(summary["problems"]) == 6, problems
    assert "ffn-0.jsonl: the last line is torn" in problems
    assert "ffn-1.jsonl: 3 lines are no records and were left out (first: line 6, 7, 8)" in problems
    assert "ffn-2.jsonl: not closed" in problems
    assert "attention-0.jsonl: 17 records were dropped" in problems
    assert "ffn-8.jsonl: left out: its first line is torn" in problems
    assert "ffn-9.jsonl: left out: written in format 7 of AFORE 9.0" in problems


@pytest.mark.parametrize("command", [["merge"], ["summary"], ["summary", "--targets"]])
def test_whatever_a_file_holds_the_others_are_read(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "spans[/x]"
    write_run(directory)
    broken = directory / "ffn-1.jsonl"
    lines = broken.read_bytes().splitlines(keepends=True)
    strange = [
        b"[" * 100_000 + b"\n",
        b'{"name":"wait","start_ns":1,"end_ns":%d}\n' % 2**70,
        b'{"name":"wait","layer":9999,"microbatch":0,"step":0,"start_ns":1,"end_ns":2}\n',
        b'{"dropped":"zzz"}\n',
    ]
    backwards = b'{"name":"wait","start_ns":90,"end_ns":40}\n'
    typed = b'{"name":"plan","start_ns":90,"end_ns":99,"args":{"sequence":[1],"load":NaN}}\n'
    broken.write_bytes(b"".join([lines[0], *strange, backwards, typed, *lines[1:]]))
    head = json.loads(lines[0])
    changes: list[dict[str, Any]] = [
        {"host": "other", "unix_base_ns": None}, {"host": ["h"]}, {"unix_base_ns": "x"}, {"role": 7}
    ]  # fmt: skip
    for rank, change in enumerate(changes, start=10):
        (directory / f"ffn-{rank}.jsonl").write_text(json.dumps({**head, **change}) + "\n")
    (directory / "ffn-14.jsonl").write_bytes(b"[" * 100_000 + b"\n")
    (directory / "ffn-15.jsonl").mkdir()
    output = tmp_path / "t.json"
    more = ["-o", str(output)] if command == ["merge"] else []
    assert main([*command, str(directory), *more, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    problems = "\n".join(summary["problems"])
    assert "ffn-1.jsonl: 4 lines are no records and were left out (first: line 2, 3, 4)" in problems
    assert "ffn-1.jsonl: 1 spans end before they start" in problems
    for rank in range(10, 16):
        assert f"ffn-{rank}.jsonl: left out: " in problems
    if command == ["merge"]:
        assert "ffn-1.jsonl: 1 spans have arguments of a wrong type" in problems
        json.loads(output.read_text(), parse_constant=pytest.fail)
    else:
        assert all(row["p50_us"] >= 0 for row in summary["spans"].values())
    assert main([*command, str(directory), *more]) == 0
    if command != ["merge"]:
        # A long title is wrapped.
        assert "spans[/x]" in "".join(line.strip() for line in capsys.readouterr().out.splitlines())


def test_problems_go_to_stderr_beside_the_line_that_says_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = write_run(tmp_path / "spans")
    (tmp_path / "spans" / "ffn-8.jsonl").write_bytes(b"")
    assert main(["merge", str(tmp_path / "spans"), "-o", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr()
    assert f"{copies} plan → copy" in shown.out
    assert "https://ui.perfetto.dev" in shown.out
    assert shown.err.splitlines() == ["trace: ffn-8.jsonl: left out: its first line is torn"]


@pytest.mark.parametrize("command", ["merge", "summary"])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "does not exist; name the directory that was given to --trace"),
        (lambda path: path.write_text(""), "is a file, not a directory"),
        (lambda path: path.mkdir(), "holds no span file; run with --trace DIR first"),
        (
            lambda path: (path.mkdir(), (path / "x.jsonl").write_text("{}\n")),
            "holds no span file (x.jsonl: left out: the first",
        ),
    ],
)
def test_an_unusable_directory_is_one_line_and_status_2(
    command: str, make: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "spans")
    assert main([command, str(tmp_path / "spans")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"trace: {tmp_path / 'spans'}: ")
    assert problem in line


def test_an_output_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "spans")
    assert main(["merge", str(tmp_path / "spans"), "-o", str(tmp_path / "missing" / "trace.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written: No such file or directory; give -o" in line
    assert [path.name for path in tmp_path.iterdir()] == ["spans"]


def test_virtual_and_real_time_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "spans")
    path = tmp_path / "spans" / "ffn-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"monotonic"', b'"virtual"', 1))
    assert main(["merge", str(tmp_path / "spans"), "-o", str(tmp_path / "t.json")]) == 2
    assert "mixes files of virtual and of real time" in capsys.readouterr().err


def test_an_empty_run_is_a_valid_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tracer("ffn-0", WallClock(), tmp_path / "spans").close()
    events, summary = merged(tmp_path / "spans", tmp_path, capsys)
    assert summary["spans"] == 0
    assert {event["ph"] for event in events} == {"M"}
    assert main(["summary", str(tmp_path / "spans")]) == 0
    assert "no spans" in capsys.readouterr().out


def test_summary_counts_and_times_each_span(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer("ffn-0", WallClock(), tmp_path)
    for index in range(101):
        tracer.span("experts", Target(0, 0, index), 1_000, 1_000 + index * 1_000)
    tracer.span("read", Target(0, 0, 0), 5, 1_505)
    tracer.instant("epoch", 1)
    tracer.close()
    assert main(["summary", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["spans"] == {
        "read": {"count": 1, "p50_us": 1.5, "p99_us": 1.5, "total_ms": 0.0015},
        "experts": {"count": 101, "p50_us": 50.0, "p99_us": 99.0, "total_ms": 5.05},
    }
    assert list(shown["spans"]) == ["read", "experts"]
    assert main(["summary", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    for text in ("span", "p50 µs", "experts", "101", "50.0", "99.0", "5.05"):
        assert text in table


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["merge", "--help"], ["summary", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert "python -m afore.tools.trace" in capsys.readouterr().out
