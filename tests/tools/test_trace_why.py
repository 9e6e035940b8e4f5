"""``trace why``: of a target whose spans are known it says who was last, what was exposed, and who never came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.tools.trace import main
from afore.tools.trace_why import parse_target

TARGET = Target(2, 0, 17)


def write(directory: Path, *, reply_of_1: bool = True, usual: int = 3) -> None:
    """A target after ``usual`` ones of the same shape, but its second worker is late and waits for a copy."""
    clock = WallClock()
    names = ("attention-0", "attention-1", "scheduler-0", "ffn-0", "ffn-1")
    a0, a1, scheduler, f0, f1 = (Tracer(name, clock, directory) for name in names)
    base = clock.now_ns()
    for index in range(usual + 1):
        target = TARGET if index == usual else Target(2, 1, index)
        late = 400 if index == usual else 0

        def us(at: float, base: int = base + index * 10_000_000) -> int:
            return base + int(at * 1000)

        for tracer, behind in ((a0, 0), (a1, 30)):
            tracer.span("attention", target, us(0), us(100 + behind))
            tracer.span("demand_write", target, us(100 + behind), us(110 + behind))
            tracer.span("a2f", target, us(110 + behind), us(150 - behind))
            tracer.span("reduce", target, us(900 + late), us(950 + late))
        scheduler.span("plan", target, us(150), us(160), sequence=40 + index)
        scheduler.instant("planned", us(161), target, sequence=40 + index, policy="afore")
        scheduler.instant("entry", us(162), target, sequence=40 + index, kind="PLAN", tokens=[3, 2])
        for tracer, slow in ((f0, 0), (f1, late)):
            tracer.span("read", target, us(170), us(180 + slow / 100), sequence=40 + index)
            tracer.span("wait", target, us(300), us(301 + slow), slots=[0], generations=[40 + index])
            tracer.span("experts", target, us(310 + slow), us(500 + slow))
            if reply_of_1 or tracer is f0:
                tracer.span("reply", target, us(500 + slow), us(520 + slow))
        if late:
            f1.span("copy", target, us(200), us(700), submitted_ns=us(190), slot=0, generation=40 + index, expert=9)
            f1.instant("refused", us(181), target, sequence=40 + index)
    for tracer in (a0, a1, scheduler, f0, f1):
        tracer.close()


def explained(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["why", str(TARGET), str(directory), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_who_was_last_and_what_was_exposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    why = explained(tmp_path, capsys)
    assert (why["target"], why["sequence"], why["policy"], why["tokens_A"]) == ("l2/m0/s17", 43, "afore", [3, 2])
    assert why["wall_us"] == pytest.approx(1350)
    races = {race["step"]: race for race in why["races"]}
    assert (races["demand"]["last"], races["demand"]["behind_first_us"]) == ("attention-1", pytest.approx(30))
    assert (races["inputs"]["last"], races["verdicts"]["last"], races["replies"]["last"]) == (
        "attention-0",
        "ffn-1",
        "ffn-1",
    )
    assert races["replies"]["behind_first_us"] == pytest.approx(400)
    assert races["replies"]["at_us"] == pytest.approx(920)
    assert not [race for race in why["races"] if race["missing"]]
    assert (why["exposed_on"], why["exposed_us"]) == ("ffn-1", pytest.approx(401))
    (copy,) = [copy for copy in why["copies"] if copy["took_us"] is not None]
    assert (copy["worker"], copy["expert"], copy["took_us"], copy["exposed_us"]) == (
        "ffn-1",
        9,
        pytest.approx(510),
        pytest.approx(400),
    )
    assert why["events"] == ["refused by ffn-1"]
    assert sum(part["share"] for part in why["parts"]) == pytest.approx(1)


def test_what_was_beyond_the_usual_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["why", str(TARGET), str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "most beyond the usual: ffn wait, 400 µs more than its median" in out
    assert "copy of expert 9 into ffn-1 slot 0 (generation 43): took 510.0 µs, exposed 400.0 µs" in out


def test_a_peer_that_never_came_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, reply_of_1=False)
    races = {race["step"]: race for race in explained(tmp_path, capsys)["races"]}
    assert races["replies"]["missing"] == ["ffn-1"]
    assert main(["why", str(TARGET), str(tmp_path)]) == 0
    assert "reply written; never: ffn-1" in capsys.readouterr().out


def cut(path: Path, keep: int) -> None:
    """As a kill leaves it: the header, ``keep`` records, and half of the next."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: keep + 1]) + lines[keep + 1][:20])


@pytest.mark.parametrize(
    ("keep", "reach"),
    [(0, "ffn-1: its file has no records"), (4, "ffn-1: its last record begins 29,500 µs before the target's begin")],
)
def test_of_a_file_that_does_not_reach_the_target_nothing_is_said_to_have_never_come(
    keep: int, reach: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    cut(tmp_path / "ffn-1.jsonl", keep)
    races = {race["step"]: race for race in explained(tmp_path, capsys)["races"]}
    assert all(not race["missing"] for race in races.values())
    assert {step for step, race in races.items() if race["unknown"] == ["ffn-1"]} == {"verdicts", "experts", "replies"}
    assert main(["why", str(TARGET), str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "never" not in shown.out
    assert "reply written; no record of it from ffn-1" in shown.out
    assert f"  {reach}" in shown.out
    assert "ffn-1.jsonl: the last line is torn" in shown.err


def test_a_file_cut_off_behind_the_target_knows_what_never_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, reply_of_1=False)
    path = tmp_path / "ffn-1.jsonl"
    *lines, _end = path.read_bytes().splitlines(keepends=True)
    later = json.loads(lines[-2]) | {"step": 99}
    later |= {"start_ns": later["start_ns"] + 10**9, "end_ns": later["end_ns"] + 10**9}
    path.write_bytes(b"".join(lines))
    assert {race["step"]: race for race in explained(tmp_path, capsys)["races"]}["replies"]["unknown"] == ["ffn-1"]
    path.write_bytes(b"".join([*lines, json.dumps(later).encode() + b"\n"]))
    assert {race["step"]: race for race in explained(tmp_path, capsys)["races"]}["replies"]["missing"] == ["ffn-1"]


def test_where_records_were_lost_or_made_room_nobody_never_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, reply_of_1=False)
    path = tmp_path / "ffn-1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"dropped": 0', b'"dropped": 3').replace(b'"dropped":0', b'"dropped":3'))
    why = explained(tmp_path, capsys)
    assert {race["step"]: race for race in why["races"]}["replies"]["unknown"] == ["ffn-1"]
    assert why["reach"] == ["ffn-1: 3 records of it are lost"]
    header, *lines = whole.splitlines(keepends=True)
    bounded = json.dumps(json.loads(header) | {"segment": 2, "before": 14}).encode() + b"\n"
    path.unlink()
    # What is left begins within the target.
    (tmp_path / "ffn-1.2.jsonl").write_bytes(b"".join([bounded, *lines[-4:]]))
    why = explained(tmp_path, capsys)
    assert {race["step"]: race for race in why["races"]}["replies"]["unknown"] == ["ffn-1"]
    assert why["reach"][0].startswith("ffn-1: its oldest records made room; its file begins ")
    assert any("ffn-1.2.jsonl: the oldest 14 records made room" in problem for problem in why["problems"])


def test_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["why", "l2/m1/s9", str(tmp_path)]) == 2
    assert "nothing of l2/m1/s9 is in the trace; near it: l2/m1/s0, l2/m1/s1, l2/m1/s2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "l2", "l2/m0", "17", "l9999/m0/s1", "l1/m99999/s1", f"l1/m0/s{1 << 50}", "l-1/m0/s1"]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ConfigError, match="l2/m0/s17"):
        parse_target(text)
    assert parse_target("l2/m0/s17") == TARGET
