"""``python -m afore.tools.plan``: explanations from files and traces, their picture, the pinned workload and its table."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from afore.core.clock import WallClock
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner
from afore.tools.plan import main
from afore.tools.plan_workload import FILES, LAYERS, SKEW, TOP_PART, pinned

DEMAND = [520, 480, 60, 40, 130, 64, 0, 20, 70, 64, 10, 128, 64, 0, 30, 90]
COSTS = Costs(tile_us=20.0, copy_us=70.0, window_us=50.0)


def planned() -> Planner:
    return Planner(PlannerConfig(num_experts=16, num_workers=4, slots_per_worker=2), contiguous_primaries(16, 4))


def test_speeds_are_explained_in_units_of_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demand.json"
    path.write_text(json.dumps(DEMAND))
    arguments = ["explain", str(path), "--workers", "4", "--slots", "2", "--speeds", "1,1,0.5,1"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "units: a tile counts 1 on ffn-0, 1 on ffn-1, 2 on ffn-2, 1 on ffn-3" in lines
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tile_costs"], told["load_unit"]) == ([1, 1, 2, 1], 1)
    assert told["max_tiles"] == max(told["loads"]["final"])
    assert f"result: most loaded worker {told['max_tiles']} units (bound {told['bound_tiles']})" in lines[-2]
    assert main([*arguments[:-1], "1,1,0.5"]) == 2
    assert "planner.worker_speed: 3 numbers for 4 workers" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".json", ".csv", ".npy"])
def test_a_demand_file_is_explained(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table, picture = tmp_path / f"demand{suffix}", tmp_path / "table.json", tmp_path / "plan.svg"
    if suffix == ".json":
        path.write_text(json.dumps({"demand": DEMAND}))
    elif suffix == ".csv":
        path.write_text(",".join(map(str, DEMAND)) + "\n")
    else:
        np.save(path, np.array(DEMAND, np.int32))
    table.write_text("[[-1, -1], [0, 9], [-1, -1], [2, -1]]")
    arguments = ["explain", str(path), "--workers", "4", "--slots", "2", "--table", str(table), "--copy-us", "60"]
    assert main([*arguments, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    planner = planned()
    planner.adopt(np.array([[-1, -1], [0, 9], [-1, -1], [2, -1]]))
    plan = planner.plan(np.array(DEMAND), costs=Costs(tile_us=20.0, copy_us=60.0, window_us=1000.0))
    assert plan.copies
    assert f"most loaded worker {plan.max_tiles} tiles (bound {plan.bound_tiles}), {len(plan.copies)} copies" in text
    for e, w, r in plan.copies:
        assert any(f"expert {e}:" in line and f"→ ffn-{w}, copied to slot {r}" in line for line in text.splitlines())
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["max_tiles"] == plan.max_tiles == max(told["loads"]["final"])
    assert [[c["expert"], c["destination"], c["slot"]] for c in told["copies"] if c["kept"]] == [
        list(copy) for copy in plan.copies
    ]
    assert told["afore_plus"]["max_tiles"] <= plan.max_tiles
    bars = ElementTree.parse(picture).getroot().findall(".//{*}rect/{*}title")
    heights = told["loads"]["primaries"] + told["loads"]["final"]
    assert [bar.text for bar in bars] == [f"ffn-{i % 4}: {load} tiles" for i, load in enumerate(heights)]


def record(directory: Path, damaged: bool = False) -> list[int]:
    """A trace as the scheduler writes it: six targets of two microbatches. Returns their maxima."""
    directory.mkdir()
    tracer = Tracer("scheduler-0", WallClock(), directory)
    planner, window, maxima = planned(), ProtectedWindow(1), []
    rng = np.random.default_rng(4)
    for number in range(6):
        demand_E = rng.permutation(DEMAND) if number % 2 else np.array(DEMAND)
        plan = planner.plan(demand_E, window.protected(), COSTS)
        window.push(plan.used_NR)
        maxima.append(plan.max_tiles)
        target = Target(0, number % 2, number // 2)
        tracer.instant(
            "planned",
            number,
            target,
            sequence=number,
            policy="afore",
            workers=4,
            demand=demand_E.tolist(),
            costs=[COSTS.tile_us, COSTS.copy_us, COSTS.window_us],
        )
        shares = [] if damaged else [(*share, 1) for share in plan.shares()]
        tracer.instant("entry", number, target, sequence=number, shares=shares, copies=[])
    tracer.close()
    return maxima


def test_a_recorded_target_is_planned_again_from_its_layers_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maxima = record(tmp_path / "spans")
    for sequence, tiles in enumerate(maxima):
        arguments = ["explain", "--trace", str(tmp_path / "spans"), "--sequence", str(sequence), "--slots", "2"]
        assert main([*arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["max_tiles"] == tiles
        assert told["target"].endswith("afore: as it was published")
    record(tmp_path / "others", damaged=True)
    assert main(["explain", "--trace", str(tmp_path / "others"), "--sequence", "5", "--slots", "2"]) == 0
    assert "not as it was published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain"], "give DEMAND, or --trace"),
        (["explain", "missing.json"], "missing.json"),
        (["explain", "words.json"], "give E counts"),
        (["explain", "negative.json", "--workers", "2"], "-3 pairs for expert 1"),
        (["explain", "good.json", "--workers", "2", "--slots", "1", "--table", "good.json"], "give N rows"),
        (["explain", "good.json", "--workers", "2", "--slots", "1", "--table", "wide.json"], "of shape (2, 1)"),
        (["explain", "--trace", "spans"], "--sequence"),
        (["explain", "--trace", "spans", "--sequence", "99"], "0 to 5"),
        (["explain", "good.json", "--plot", "no/such/place.svg"], "cannot be written"),
        (["table2", "--traces", "."], "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("spans"))
    for name, value in (
        ("words", '["a"]'),
        ("negative", "[5, -3]"),
        ("good", "[5, 3]"),
        ("wide", "[[-1, -1], [-1, -1]]"),
    ):
        Path(f"{name}.json").write_text(value)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_pinned_workload_has_the_papers_skew() -> None:
    workload, again = pinned(None), pinned(None)
    assert np.array_equal(workload.demands_XE, again.demands_XE)
    assert workload.demands_XE.shape == (200, 128)
    assert (workload.demands_XE.sum(axis=1) == 2048 * 8).all()
    assert workload.skew(8) == pytest.approx(SKEW, abs=0.05)
    assert workload.top_part() == pytest.approx(TOP_PART, abs=0.005)
    assert not np.array_equal(workload.demands_XE, pinned(None, seed=1).demands_XE)


def test_real_routing_is_taken_from_its_files(tmp_path: Path) -> None:
    """Two small files in the form of the real ones: the workload follows their experts' heat."""
    rng = np.random.default_rng(0)
    for name in FILES:
        ids = np.zeros((600, max(LAYERS) + 1, 6), np.uint8)
        shares = rng.dirichlet(np.full(64, 0.5))
        ids[:] = rng.choice(64, size=ids.shape, p=shares)
        np.savez(tmp_path / name, ids=ids)
    workload = pinned(tmp_path, targets=20)
    assert workload.demands_XE.shape == (20, 128)
    assert workload.top_part() == pytest.approx(TOP_PART, abs=0.005)
    assert FILES[0] in workload.source


@pytest.mark.slow
def test_table_2_counts_what_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    """Three targets at EP 64, R = 2: ``afore-plus`` has at least as many at the optimum."""
    arguments = ["table2", "--ep", "64", "--slots", "2", "--targets", "3", "--time-limit-s", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    afore, plus = found["rows"]
    assert (afore["policy"], plus["policy"]) == ("afore", "afore-plus")
    for row in (afore, plus):
        assert row["at_bound"] <= row["optimal"] <= row["targets"] == 3
        assert 0 <= row["mean_gap_percent"] <= row["bound_gap_percent"]
    assert plus["optimal"] >= afore["optimal"]
    assert main([*arguments, "--policies", "afore-plus"]) == 0
    assert "afore-plus" in capsys.readouterr().out
