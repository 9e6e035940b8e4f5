"""``python -m afore.tools.plan``: explanations from files and traces, their picture, the pinned workload and its table."""

from __future__ import annotations

import json
import pickle
import re
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
from afore.scheduler.traces.calibrate import HOT_PART, SKEW
from afore.tools.plan import main
from afore.tools.plan_workload import FILES, LAYERS, pinned

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


NPY_OF_8_TIB = b"\x93NUMPY\x01\x00\x76\x00" + (
    b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n"
)


@pytest.mark.parametrize("option", ["DEMAND", "--table"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("deep.json", b"[" * 100_000, "nested too deep"),
        ("long.csv", b"1" * 200_000, "field limit"),
        ("words.csv", b"1,x", "'x'"),
        ("encoded.json", b"\xff\xfe[1]", "utf-8"),
        ("nothing.json", b"", "cannot be read"),
        ("nothing.npy", b"", "cannot be read"),
        ("torn.npy", NPY_OF_8_TIB[:40], "cannot be read"),
        ("vast.npy", NPY_OF_8_TIB, "cannot be read"),
        ("pickled.npy", pickle.dumps([1, 2]), "magic string"),
        ("directory.json", None, "Is a directory"),
        ("scalar.json", b"5", "holds int64 of shape ()"),
        ("ragged.json", b"[[1, 2], [3]]", "holds"),
        ("wide.json", b"[[18446744073709551615]]", "holds 18446744073709551615"),
    ],
)
def test_a_file_that_holds_no_counts_is_refused(
    option: str, name: str, content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, good = tmp_path / name, tmp_path / "good.json"
    good.write_text("[5, 3]")
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    arguments = [str(path)] if option == "DEMAND" else [str(good), option, str(path)]
    assert main(["explain", *arguments, "--workers", "2", "--slots", "1"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert words in error


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("afore.tools.plan_input.MOST_BYTES", 1000)
    assert main(["explain", "/dev/zero"]) == 2
    assert "more than 1,000 bytes" in capsys.readouterr().err


def test_an_expert_beyond_32_bits_is_none_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demand.json").write_text("[5, 3]")
    (tmp_path / "table.json").write_text("[[-1], [4294967296]]")
    arguments = [str(tmp_path / "demand.json"), "--table", str(tmp_path / "table.json")]
    assert main(["explain", *arguments, "--workers", "2", "--slots", "1"]) == 2
    assert "holds 4294967296" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"demand": [1, -5] * 8}, "no vector of counts"),
        ({"demand": [1, [2]]}, "sequence 2 is damaged"),
        ({"demand": 5}, "no vector of counts"),
        ({"demand": []}, "no vector of counts"),
        ({"demand": ["a"]}, "no vector of counts"),
        ({"demand": [1, 2]}, "2 experts, 16 before"),
        ({"demand": [2**31] * 16}, "at most 2,147,483,647"),
        ({"demand": [2**64] * 16}, "no vector of counts"),
        ({"costs": [1, 2]}, "sequence 2 is damaged"),
        ({"costs": [1, 2, "x"]}, "sequence 2 is damaged"),
        ({"costs": [1, 2, -3]}, "is not a time"),
        ({"costs": 3}, "sequence 2 is damaged"),
        ({"workers": 0}, "num_workers"),
        ({"workers": "four"}, "'four' workers"),
        ({"shares": [1]}, "sequence 2 is damaged"),
        ({"shares": None}, "sequence 2 is damaged"),
    ],
)
@pytest.mark.parametrize("lacks", [False, True])
def test_a_damaged_record_of_a_trace_is_named(
    damage: dict[str, object], words: str, lacks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "spans")
    (path,) = (tmp_path / "spans").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ((name, value),) = damage.items()
    for line in lines:
        args = line.get("args", {})
        if args.get("sequence") == 2 and name in args:
            if lacks:
                del args[name]
            else:
                args[name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["explain", "--trace", str(tmp_path / "spans"), "--sequence", "2", "--slots", "2"]) == 2
    error = capsys.readouterr().err
    assert ("None workers" if name == "workers" else f"lacks '{name}'") in error if lacks else words in error


def test_a_torn_trace_is_explained_and_said_to_be_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "spans")
    (path,) = (tmp_path / "spans").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["explain", "--trace", str(tmp_path / "spans"), "--sequence", "5", "--slots", "2"]) == 0
    told = capsys.readouterr()
    assert "as it was published" in told.out
    assert "the last line is torn" in told.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--targets", "0"],
        ["--targets", "-1"],
        ["--targets", "99999999999"],
        ["--seed", "-1"],
        ["--in-flight", "-1"],
        ["--time-limit-s", "-1"],
        ["--time-limit-s", "nan"],
        ["--time-limit-s", "inf"],
        ["--ep", ","],
        ["--slots", "two"],
        ["--policies", "static"],
    ],
)
def test_numbers_out_of_range_are_refused_by_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["table2", *arguments])
    assert ended.value.code == 2
    assert f"argument {arguments[0]}: {arguments[1]!r}" in capsys.readouterr().err


def test_the_documented_explanation_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/policies.md").read_text()
    command = re.findall(r"^\$ python -m afore\.tools\.plan (explain demand.*)$", page, re.MULTILINE)[0]
    demand, table, printed = re.findall(
        r"^For `(\[.*\])` and the slot table\n`(\[.*\])` it prints:\n\n```text\n(.*?)```",
        page,
        re.MULTILINE | re.DOTALL,
    )[0]
    monkeypatch.chdir(tmp_path)
    Path("demand.json").write_text(demand)
    Path("slots.json").write_text(table)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed


def test_the_pinned_workload_has_the_papers_skew() -> None:
    workload, again = pinned(None), pinned(None)
    assert np.array_equal(workload.demands_XE, again.demands_XE)
    assert workload.demands_XE.shape == (200, 128)
    assert (workload.demands_XE.sum(axis=1) == 2048 * 8).all()
    assert workload.skew(8) == pytest.approx(SKEW, abs=0.05)
    assert workload.top_part() == pytest.approx(HOT_PART, abs=0.005)
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
    assert workload.top_part() == pytest.approx(HOT_PART, abs=0.005)
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
