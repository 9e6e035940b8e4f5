"""Writes with notification, measured: counts and figures as laws, what is refused, and small runs of real processes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from afore.core.errors import ConfigError
from afore.tools.bench import main
from afore.tools.bench.transport_child import measure
from afore.tools.bench.transport_ends import FOLLOW, LEAD, Setting, fabric_ends
from afore.tools.bench.transport_figures import LEAST, ROUND_BYTES, against_peers, count_of, spread_us, warmup_of, wins
from afore.tools.bench.transport_options import LARGEST, parse, size_text
from afore.tools.bench.transport_peers import PEERS, installed
from afore.tools.bench.transport_report import draw, show

QUICK = ["--rounds", "2", "--count", "20", "--seconds", "0"]


@given(st.integers(0, LARGEST), st.integers(1, 1_000_000), st.floats(1e-7, 10), st.floats(0, 600))
def test_counts_keep_their_limits(nbytes: int, most: int, each_s: float, seconds: float) -> None:
    count = count_of(nbytes, most, each_s=each_s, seconds=seconds)
    assert 1 <= count <= most
    if count > LEAST:
        assert count * nbytes <= ROUND_BYTES
        assert not seconds or count * each_s <= seconds * (1 + 1e-9)
    assert 1 <= warmup_of(count) <= count


def test_percentiles_are_over_all_rounds_and_medians_of_each() -> None:
    found = spread_us([np.arange(1000, 4000, 1000), np.array([10_000, 30_000, 20_000])])
    assert (found["n"], found["min_us"], found["max_us"], found["p50_us"]) == (6, 1.0, 30.0, 6.5)
    assert found["rounds_p50_us"] == [2.0, 20.0]
    assert found["p50_us"] <= found["p99_us"] <= found["p99.9_us"] <= found["max_us"]


def test_a_way_is_compared_with_the_best_peer_of_each_round() -> None:
    rounds = {"shm": [10.0, 30.0, 8.0], "tcp": [20.0, 20.0, 20.0], "a": [5.0, 10.0, 8.0], "b": [10.0, 5.0, 16.0]}
    rounds["spins"] = [1.0, 1.0, 1.0]
    found = against_peers(rounds, ["a", "b", "spins", "absent"], ["a", "b", "absent"])
    assert found["shm"] == {"median": 2.0, "min": 1.0, "max": 6.0, "best": "a"}
    assert set(found) == {"shm", "tcp"}
    assert against_peers({"shm": [1.0]}, ["a"], ["a"]) == {}


def test_rounds_are_won_by_the_smallest_value_and_only_whole_ones_count() -> None:
    assert wins({"a": [1.0, 5.0, 0.0], "b": [2.0, 3.0]}) == {"a": 1, "b": 1}
    assert wins({}) == {}


@given(st.integers(0, LARGEST))
def test_sizes_read_as_they_are_written(nbytes: int) -> None:
    assert parse(["--sizes", size_text(nbytes)]).sizes == (nbytes,)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--sizes", "512,65M"], "65M"),
        (["--sizes", "-1"], "sizes"),
        (["--sizes", ""], "sizes"),
        (["--fabrics", "shm,ether"], "ether"),
        (["--peers", "uvlop"], "uvlop"),
        (["--idle", "spin"], "spin"),
        (["--rounds", "0"], "rounds"),
        (["--count", "10000000"], "count"),
        (["--seconds", "-1"], "seconds"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_by_name(given: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(given)
    assert named in str(refused.value)


def test_no_peers_is_a_choice() -> None:
    assert parse(["--peers", "none"]).peers == ()
    assert parse([]).peers is None


def test_a_peer_that_is_not_installed_is_refused_when_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    absent = next((name for name in PEERS if not installed(name)), None)
    if absent is None:
        pytest.skip("every public peer is installed here")
    assert main(["transport", "--peers", absent]) == 2
    assert f"pip install {PEERS[absent].package}" in capsys.readouterr().err


async def test_both_measurements_over_one_process() -> None:
    setting = Setting(way="loopback", largest=64, run="test", secret="00" * 16, folder="")
    ends = fabric_ends(setting, (FOLLOW, LEAD))
    offers = {side: await end.open() for side, end in ends.items()}
    await asyncio.gather(ends[LEAD].meet(offers[FOLLOW]), ends[FOLLOW].meet(offers[LEAD]))
    pings = await measure(ends, "ping", nbytes=64, count=7, warmup=2)
    stream = await measure(ends, "stream", nbytes=0, count=5000, warmup=0)
    assert set(pings["times"]) == {"sent", "got", "back"}
    assert set(stream["times"]) == {"began", "ended"}, "more messages than the link has credits"
    for end in ends.values():
        await end.close()


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_of_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--fabrics", "loopback,shm,tcp", "--peers", "uvloop-unix", "--sizes", "0,100K", *QUICK]
    given += ["--idle", "fd,spin-then-fd"]
    assert main(["transport", *given, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rounds"] == 2
    assert not report["interrupted"]
    assert list(report["ways"]) == ["loopback", "shm", "shm spin-then-fd", "tcp", "tcp spin-then-fd", "uvloop-unix"]
    for name, way in report["ways"].items():
        assert list(way["sizes"]) == (["512"] if way["peer"] else ["0", "512", "102400"])
        for found in way["sizes"].values():
            one_way, round_trip = found["one_way"], found["round_trip"]
            assert one_way["n"] == round_trip["n"] == 40
            # The one clock of the machine: a message is there after it was sent, and before its answer.
            assert 0 < one_way["min_us"] <= round_trip["min_us"], name
            assert found["stream"]["n"] == 40
            assert found["stream"]["messages_per_second"] > 0
    assert set(report["against_peers"]) == {"shm", "shm spin-then-fd", "tcp", "tcp spin-then-fd"}
    assert not list(Path("/dev/shm").glob("afore-bench*")), "nothing is left behind"

    console = Console(record=True, width=120, highlight=False)
    show(report, console)
    text = console.export_text()
    for part in (
        "100K",
        "× best peer",
        "spin-then-fd: turns of the event loop",
        "shm spin-then-fd takes",
        "CPU s/M: user and system",
    ):
        assert part in text
    if importlib.util.find_spec("matplotlib") is not None:
        draw(report, str(tmp_path / "picture.svg"))
        assert "</svg>" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.processes
def test_four_pairs_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--fabrics", "shm", "--peers", "none", "--sizes", "512", *QUICK, "--oversubscribed", "--json", "-"]
    assert main(["transport", *given]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["against_peers"] == {}
    crowd = report["oversubscribed"]
    assert (crowd["processes"], crowd["rounds"]) == (8, 2)
    assert crowd["ways"]["shm"]["one_way"]["n"] == 4 * 5 * 2
    assert crowd["ways"]["shm"]["best_tail_rounds"] == crowd["ways"]["shm"]["least_cpu_rounds"] == 2
    console = Console(record=True, width=120, highlight=False)
    show(report, console)
    assert "8 processes on" in console.export_text()


@pytest.mark.slow
@pytest.mark.processes
def test_a_fabric_that_is_named_and_not_there_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine may have an RDMA device")
    assert main(["transport", "--fabrics", "verbs", "--peers", "none", *QUICK]) == 2
    said = capsys.readouterr().err
    assert "verbs" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not installed("iceoryx2"), reason="iceoryx2 is not installed")
def test_iceoryx2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transport", "--fabrics", "shm", "--peers", "iceoryx2", "--sizes", "512", *QUICK, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"]["iceoryx2"]["sizes"]["512"]["stream"] is None


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not installed("ucxx"), reason="ucxx is not installed")
def test_ucxx(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--fabrics", "shm", "--peers", "ucxx,ucxx-blocking", "--sizes", "512", *QUICK, "--json", "-"]
    assert main(["transport", *given]) == 0
    assert set(json.loads(capsys.readouterr().out)["ways"]) == {"shm", "ucxx", "ucxx-blocking"}
