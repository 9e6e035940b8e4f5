"""From demand to plan: a target by hand and as a law, what of a trace counts, the picture, and a run of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.tools.bench import main
from afore.tools.bench.path_options import parse
from afore.tools.bench.path_parts import PARTS, TOTALS, Way, collect, figures_us, summarise, summary
from afore.tools.bench.path_report import draw
from afore.tools.trace_files import open_directory

NAMES = [name for name, _ in PARTS]
IN_ALL = [name for name, _ in TOTALS]


def way(**changes: object) -> Way:
    """Two attention workers, of which the second is the last; two FFN workers. Times in µs."""
    found = Way(
        gate_A={0: 1000, 1: 4000},
        written_A={0: 2000, 1: 6000},
        turned=9000,
        accepted_A={0: 5000, 1: 10_000},
        began=10_000,
        published=15_000,
        read_N=[25_000, 19_000],
        judged_N=[31_000, 33_000],
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_a_target_by_hand() -> None:
    figures = {name: values.tolist() for name, values in figures_us([way()]).items()}
    assert [figures[name] for name in NAMES] == [[2.0], [3.0], [1.0], [5.0], [4.0], [6.0], [8.0]]
    accepted, readable, first, last, published, whole = (figures[name] for name in IN_ALL)
    assert accepted == [4.0, 6.0], "every vector counts"
    assert (readable, first, last, published, whole) == ([9.0], [13.0], [19.0], [10.0], [29.0])


def test_the_plain_way_accepts_before_it_plans() -> None:
    assert way(accepted_A={0: 5000, 1: 8000}, turned=9000).moments()[2] == 8000


def test_a_writer_that_was_held_up_behind_its_write_wrote_before_the_scheduler_turned_to_it() -> None:
    moments = way(written_A={0: 2000, 1: 12_000}).moments()
    assert moments[1:3] == (9000, 9000)


times = st.integers(0, 1_000_000)


@given(st.lists(times, min_size=8, max_size=8), st.lists(times, min_size=3, max_size=3), st.booleans())
def test_parts_are_never_negative_and_add_up(at: list[int], reads: list[int], one_sender: bool) -> None:
    senders = {0: at[0]} if one_sender else {0: at[0], 1: at[1]}
    found = Way(
        gate_A=dict(senders),
        written_A={a: at[2] + a for a in senders},
        turned=at[3],
        accepted_A={a: at[4] + a for a in senders},
        began=at[5],
        published=at[6],
        read_N=reads,
        judged_N=[read + at[7] for read in reads],
    )
    figures = figures_us([found])
    parts = [figures[name][0] for name in NAMES]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(figures["demand ready → verdicts in"][0])
    assert figures["demand complete → read by the last"][0] == pytest.approx(sum(parts[1:6]))


def write_trace(directory: Path, target: Target, sequence: int, base_ns: int, *, readers: int = 2) -> None:
    """Files of one attention worker, the scheduler, and ``readers`` of two FFN workers; the target takes 10 µs."""
    clock = WallClock()
    tracers = {name: Tracer(name, clock, directory) for name in ("attention-0", "scheduler-0", "ffn-0", "ffn-1")}
    tracers["attention-0"].span("gate", target, base_ns - 500, base_ns)
    tracers["attention-0"].span("demand_write", target, base_ns, base_ns + 1000)
    tracers["scheduler-0"].span("plan", target, base_ns + 2000, base_ns + 5000, sequence=sequence)
    tracers["scheduler-0"].instant(
        "planned", base_ns + 5000, target, sequence=sequence, accepted_ns=[base_ns + 3000, 0], began_ns=base_ns + 3000
    )
    for rank in range(readers):
        start_ns = base_ns + 7000 + 1000 * rank
        tracers[f"ffn-{rank}"].span("read", target, start_ns, base_ns + 10_000, sequence=sequence)
        # A cancelled target's entry is another one, with the same target.
        tracers[f"ffn-{rank}"].span("read", target, start_ns + 50_000, base_ns + 60_000, sequence=sequence + 1)
    for tracer in tracers.values():
        tracer.close()


def test_what_counts_is_whole_and_within_a_window(tmp_path: Path) -> None:
    write_trace(tmp_path / "whole", Target(1, 0, 3), 7, 1_000_000)
    files, _ = open_directory(tmp_path / "whole")
    ways, incomplete = collect(files, [(0, 2_000_000)])
    assert incomplete == 0
    figures = figures_us(ways)
    assert [figures[name].tolist() for name in NAMES] == [[1.0], [1.0], [1.0], [2.0], [2.0], [1.0], [2.0]]
    assert collect(files, [(0, 1_004_999), (1_005_001, 3_000_000)]) == ([], 0)
    write_trace(tmp_path / "half", Target(1, 0, 3), 7, 1_000_000, readers=1)
    files, _ = open_directory(tmp_path / "half")
    assert collect(files, [(0, 2_000_000)]) == ([], 1)


def test_figures_of_nothing_are_only_their_count() -> None:
    assert set(summarise([])) == {*NAMES, *IN_ALL}
    assert all(figure == {"n": 0} for figure in summarise([]).values())
    found = summary(figures_us([way(), way()])[NAMES[0]])
    assert found == {"p50_us": 2.0, "p99_us": 2.0, "p99.9_us": 2.0, "max_us": 2.0, "n": 2}


def test_options_are_refused_by_name() -> None:
    for argv, field in (
        (["--topology", "1/2"], "topology"),
        (["--topology", "1/0/2"], "topology"),
        (["--policies", "afore,"], "policies"),
        (["--rounds", "0"], "rounds"),
        (["--trace", "spans"], "trace"),
        (["--prompt", "Hello"], "prompt"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(argv)
        assert caught.value.field == field
    options, config = parse(["--topology", "2/4/2,1/2/2", "--policies", "static,static", "--planner.tile_tokens", "4"])
    assert options.topology == ((2, 4, 2), (1, 2, 2))
    assert options.policies == ("static",)
    assert config.planner.tile_tokens == 4


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_of_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "path.json"
    argv = ["path", "--policies", "afore", "--rounds", "1", "--num-prompts", "2", "--max-tokens", "4"]
    assert main([*argv, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for text in (*NAMES, *IN_ALL, "recording costs", "machine:", "µs over all targets"):
        assert text in shown
    report = json.loads(out.read_text())
    (found,) = report["topologies"]
    side = found["sides"]["afore"]
    # Three layers of the tokens after the first, which prefill gives; both prompts may share a step.
    assert side["targets"] >= 9
    assert side["targets"] % 3 == 0
    for name in (*NAMES, *IN_ALL):
        figure = side["figures"][name]
        assert figure["n"] == side["targets"]
        assert 0 <= figure["p50_us"] <= figure["p99_us"] <= figure["p99.9_us"] <= figure["max_us"]
    assert "figures" not in found["sides"]["afore without spans"]
    assert report["notes"] == []


@pytest.mark.slow
def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need afore[bench]")
    sides = {"afore": {"targets": 1, "figures": summarise([way()])}, "afore without spans": {}}
    draw({"topologies": [{"topology": "1/2/2", "sides": sides}]}, str(tmp_path / "path.svg"))
    assert (tmp_path / "path.svg").stat().st_size > 1000
