"""Recording: what policies were told and answered, on both ways; replayed, the same plans bit for bit; and a disk that refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from afore.core.config import CostOptions, RunConfig
from afore.core.policy_options import AforeAheadOptions, EplbOptions, HarmoenyOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.recorder import Recorder, WatchedCosts
from afore.scheduler.repeat import repeat
from afore.scheduler.traces import Event, TraceError, TraceHeader, TraceReader, TraceWriter
from afore.serving.virtual import run_emulated
from tests.serving.virtual_cases import EMULATION, QUIET, SMALL, SMOKE, asks


def recorded(path: Path, policy: str, config: RunConfig = SMALL, *, adapt: bool = True) -> TraceReader:
    """A run in virtual time, with aborts where the configuration is one that has them."""
    options = PolicyOptions(
        eplb=EplbOptions(window_steps=4, interval_steps=2),
        harmoeny=HarmoenyOptions(min_tokens=1),
        afore_ahead=AforeAheadOptions(window_copies=1e9),
    )
    config = dataclasses.replace(
        config,
        policy=policy,
        policy_options=options,
        record=str(path),
        costs=CostOptions(tile_us=30, copy_us=1, window_us=50, adapt=adapt),
    )
    run_emulated(config, asks(), QUIET)
    return TraceReader(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "static",
        "afore",
        "afore-plus",
        "afore-ahead",
        "afore-no-overlap",
        "afore-no-prefetch",
        "afore-reactive",
        "eplb",
        "eplb-redistribute",
        "harmoeny",
        "lina",
        "libra",
    ],
)
def test_a_recorded_run_replayed_gives_the_recorded_plans(tmp_path: Path, policy: str) -> None:
    reader = recorded(tmp_path / "run.trace.npz", policy)
    header = reader.header
    assert (header.policy, header.experts, header.workers, header.slots, header.microbatches) == (policy, 64, 3, 2, 3)
    found = repeat(reader)
    assert found.different == 0, found.first
    assert found.targets > 50
    rows = list(reader)
    told = [row for row in reader.events() if row.answer is not None and row.answer.assigned]
    assert len(told) == len(rows)
    assert all(row.tokens * header.top_k == row.demand_E.sum() for row in rows if row.demand_E is not None)
    if policy.startswith("afore"):
        assert len({row.costs for row in rows}) > 5, "estimates followed what was measured"
    if policy not in ("static", "lina", "libra"):
        assert found.copies > 5
        assert any(row.protected_NR is not None and row.protected_NR.any() for row in rows)


@pytest.mark.slow
def test_another_answer_is_seen(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "run.npz", "afore")
    other = tmp_path / "other.npz"
    with TraceWriter(other, reader.header) as out:
        for number, row in enumerate(reader.events()):
            if number == 40:
                assert row.demand_E is not None
                demand_E = row.demand_E.copy()
                demand_E[:8] += 9
                row = dataclasses.replace(row, demand_E=demand_E)
            out.add(row)
    found = repeat(TraceReader(other))
    assert found.different > 0
    assert found.first.startswith("row 40 (DEMAND of l")


@pytest.mark.slow
def test_recording_changes_nothing_in_virtual_time(tmp_path: Path) -> None:
    plain = run_emulated(SMOKE, asks(), EMULATION)
    config = dataclasses.replace(SMOKE, record=str(tmp_path / "run.npz"))
    run = run_emulated(config, asks(), EMULATION)
    assert run.tokens == plain.tokens
    assert run.log.to_bytes() == plain.log.to_bytes()
    assert repeat(TraceReader(tmp_path / "run.npz")).different == 0


@pytest.mark.slow
def test_a_disk_that_refuses_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.npz"
    (tmp_path / "run.npz.partial").mkdir()
    plain = run_emulated(SMALL, asks(), QUIET)
    run = run_emulated(dataclasses.replace(SMALL, record=str(file)), asks(), QUIET)
    assert run.tokens == plain.tokens
    assert not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: the trace cannot be written: Is a directory; name a file where there is room and you may write; "
        "recording ends here; what is there: python -m afore.tools.traces info --partial"
    ]


def test_a_disk_that_is_full_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counters: Counter[str] = Counter()
    watched = WatchedCosts(lambda layer: Costs(tile_us=layer, copy_us=1, window_us=1))
    header = TraceHeader(experts=64, layers=2, workers=2, slots=2)
    file = tmp_path / "run.npz"
    recorder = Recorder(str(file), header, costs=watched, counters=counters, now_ns=lambda: 5)
    recorder.reset(1)
    assert recorder._writer is not None
    assert recorder._writer._zip is not None
    with open("/dev/full", "wb", buffering=0) as full:
        recorder._writer._zip.fp = full  # a disk without room
        for number in range(20_000):
            recorder.reset(number % 2)
        recorder.close()
    assert counters["record_failed"] == 1
    assert 0 < counters["recorded"] < 20_000
    assert len(caplog.records) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz.partial"]


def test_rows_say_what_was_read_of_other_layers(tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    times = [1.0, 1.0, 1.0]
    watched = WatchedCosts(lambda layer: Costs(tile_us=times[layer], copy_us=1, window_us=1))
    header = TraceHeader(experts=2, layers=3, workers=2, slots=2)
    recorder = Recorder(str(file), header, costs=watched, counters=Counter(), now_ns=lambda: 5)
    for step in range(3):
        recorder.begin()
        watched(1), watched(2)
        recorder.asked(Event.DEMAND, Target(1, 0, step), np.ones(2, np.int32), None, None, 7)
        times[step] += 1
    recorder.close()
    found = [(row.event.name, row.target.layer, row.costs.tile_us) for row in TraceReader(file).events() if row.costs]
    assert found == [
        ("COSTS", 2, 1.0),
        ("DEMAND", 1, 1.0),
        ("DEMAND", 1, 1.0),
        ("DEMAND", 1, 2.0),
    ]


@pytest.mark.slow
def test_a_trace_that_is_no_recording(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "run.npz", "afore")
    header = dataclasses.replace(reader.header, planner={}, policy="")
    with TraceWriter(tmp_path / "t.npz", header):
        pass
    with pytest.raises(TraceError, match=r"t\.npz: it is no recording of a run; record one"):
        repeat(TraceReader(tmp_path / "t.npz"))
    for planner, why in (({"num_experts": 3}, "its planner cannot be"), ({"rm": "-rf"}, "its planner cannot be")):
        with TraceWriter(tmp_path / "t.npz", dataclasses.replace(reader.header, planner=planner)):
            pass
        with pytest.raises(TraceError, match=why):
            repeat(TraceReader(tmp_path / "t.npz"))
    with TraceWriter(tmp_path / "t.npz", dataclasses.replace(reader.header, policy="aford")):
        pass
    with pytest.raises(TraceError, match="'aford' is none of AFORE's"):
        repeat(TraceReader(tmp_path / "t.npz"))


def test_a_layer_that_cannot_start_as_a_row_says_is_refused_by_row(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "run.npz", "afore")
    wrong = [
        dataclasses.replace(row, event=Event.ADOPT) if row.event is Event.DEMAND else row for row in reader.events()
    ]
    with TraceWriter(tmp_path / "t.npz", reader.header) as out:
        for row in wrong:
            out.add(row)
    with pytest.raises(TraceError, match=r"row \d+: no layer starts so"):
        repeat(TraceReader(tmp_path / "t.npz"))
