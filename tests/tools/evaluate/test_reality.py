"""``evaluate reality``: ways and the host's part from spans, what is compared, plans made again, and the whole once, for real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.tools.calibrate.fit import Fit, Line
from afore.tools.calibrate.spans import Recorded, Sample
from afore.tools.evaluate.command import main
from afore.tools.evaluate.reality_command import compare, full
from afore.tools.evaluate.reality_fit import host_alone, host_of, hosted
from afore.tools.evaluate.reality_plans import plans_again
from afore.tools.evaluate.reality_runs import REAL, WIRE
from afore.tools.evaluate.reality_usage import Usage
from afore.tools.evaluate.reality_ways import Way, ways
from afore.transport.wire_file import WireFile
from afore.workers.device.base import Work
from afore.workers.device.profile import LAPTOP_EMULATED

COSTS = dataclasses.replace(
    LAPTOP_EMULATED,
    launch_us=0.0,
    attention_us=50.0,
    attention_token_us=2.0,
    gather_us=10.0,
    gather_gb_per_s=0.0,
    partition_us=5.0,
    partition_pair_ns=0.0,
    reduce_us=5.0,
    reduce_gb_per_s=0.0,
)
EXPERTS = {"experts": Fit(Line(20.0, 2.0), 1, 1, 0.0)}


def way(step: int, took: float, tokens: int = 8) -> Way:
    return Way(
        target=Target(0, 0, step),
        tokens=tokens,
        attention_A={0: 70.0},
        rows_A={0: tokens},
        gate=30.0,
        plan=20.0 + step,
        gather_N={0: 40.0, 1: 45.0},
        kernels_N={0: 61.0, 1: 62.0},
        reply_N={0: 11.0, 1: 12.0},
        turn=25.0 if step else None,
        took=took,
    )


def test_full_targets_are_compared_on_the_half_that_was_not_fitted() -> None:
    measured = [way(step, took) for step, took in enumerate([90.0, 100.0] * 5)] + [way(20, 7.0, 3)]
    assert full(measured) == 8
    found = compare(measured, [*(way(step, 110.0) for step in range(4)), way(9, 1.0, 1)], 8)
    assert found["targets"] == 4
    assert found["odd_mean_error"] == pytest.approx(0.1)
    assert found["odd_median_error"] == pytest.approx(0.1)
    assert found["even_mean_error"] == pytest.approx(110 / 90 - 1)


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ConfigError, match="a half"):
        full([way(0, 1.0), way(2, 1.0)])
    with pytest.raises(ConfigError, match="8 rows"):
        compare([way(0, 1.0), way(1, 1.0)], [way(0, 1.0, 7)], 8)


def record(directory: Path, *, plans: bool = True) -> None:
    """Two steps of one layer, with the second attention worker behind; in odd ones everything takes a millisecond longer."""
    names = ("attention-0", "attention-1", "scheduler-0", "ffn-0")
    roles = {name: Tracer(name, WallClock(), directory) for name in names}
    for step in range(2):
        target, at, late = Target(0, 0, step), step * 10_000_000_000, 1000 * (step % 2)

        def span(role: str, name: str, start: int, end: int, at: int = at, target: Target = target) -> None:
            roles[role].span(name, target, at + start * 1000, at + end * 1000, tokens=5)  # type: ignore[arg-type]

        span("attention-0", "attention", 0, 100)
        span("attention-1", "attention", 40, 130)
        if plans:
            span("scheduler-0", "plan", 150 + late, 160 + late)
        span("ffn-0", "gather", 220 + 2 * late, 230 + 2 * late)
        span("ffn-0", "wait", 230 + 2 * late, 237 + 2 * late)
        span("ffn-0", "reduce", 300 + 2 * late, 310 + 2 * late)
        span("ffn-0", "reply", 320 + 2 * late, 350 + 3 * late)
    for tracer in roles.values():
        tracer.close()


def test_parts_of_a_way_leave_no_gap(tmp_path: Path) -> None:
    record(tmp_path)
    even, odd = ways(tmp_path)
    assert (even.tokens, dict(even.rows_A)) == (10, {0: 5, 1: 5})
    assert dict(even.attention_A) == pytest.approx({0: 100, 1: 130})
    assert (even.gate, even.plan, even.gather_N[0]) == pytest.approx((20, 10, 60))
    assert (even.kernels_N[0], even.reply_N[0]) == pytest.approx((83, 40))
    assert even.took == pytest.approx(130 + 20 + 10 + 60 + 83 + 7 + 40) == pytest.approx(350)
    assert odd.took == pytest.approx(350 + 3000)


def test_a_worker_that_was_busy_with_the_target_before_has_no_gap_from_the_plan(tmp_path: Path) -> None:
    tracers = {name: Tracer(name, WallClock(), tmp_path) for name in ("attention-0", "scheduler-0", "ffn-0")}
    for microbatch in range(2):
        target, at = Target(0, microbatch, 0), microbatch * 50_000
        tracers["attention-0"].span("attention", target, at, at + 20_000, tokens=5)
        tracers["scheduler-0"].span("plan", target, at + 20_000, at + 30_000)
        begins = 40_000 if microbatch == 0 else 260_000
        for name, start, end in (("gather", 0, 1), ("wait", 1, 1), ("reduce", 180, 200), ("reply", 201, 202)):
            tracers["ffn-0"].span(name, target, begins + start * 1000, begins + end * 1000)  # type: ignore[arg-type]
    for tracer in tracers.values():
        tracer.close()
    # Its first reply is there at 242: by then it was free for the second target, whose plan came at 80.
    assert [one.gather_N[0] for one in ways(tmp_path)] == pytest.approx([10, 18])


def test_a_turn_ends_with_the_next_layers_attention(tmp_path: Path) -> None:
    tracers = {name: Tracer(name, WallClock(), tmp_path) for name in ("attention-0", "scheduler-0", "ffn-0")}
    for layer in range(2):
        target, at = Target(layer, 0, 0), layer * 100_000
        tracers["attention-0"].span("attention", target, at, at + 20_000, tokens=5)
        tracers["scheduler-0"].span("plan", target, at + 20_000, at + 30_000)
        for name, end in (("gather", 40), ("wait", 40), ("reduce", 60), ("reply", 85)):
            tracers["ffn-0"].span(name, target, at + end * 1000, at + end * 1000)  # type: ignore[arg-type]
    for tracer in tracers.values():
        tracer.close()
    assert [one.turn for one in ways(tmp_path)] == [pytest.approx(15), None]


def test_a_run_without_plans_is_refused(tmp_path: Path) -> None:
    record(tmp_path, plans=False)
    with pytest.raises(ConfigError, match="no target went"):
        ways(tmp_path)


def recorded(found: list[Way]) -> Recorded:
    """Ten tiles of each target on each worker."""
    result = Recorded(workers=2)
    for one in found:
        result.samples["experts"] += [Sample(10.0, 40.0, one.target.step, one.target, rank) for rank in range(2)]
    return result


def test_kernels_and_the_hosts_part_add_up_to_what_was_measured() -> None:
    found = [way(step, 0.0) for step in (0, 2)]
    host = host_of(found, recorded(found), COSTS, EXPERTS)
    assert host.plan_us == pytest.approx(21)
    totals = set()
    for step in range(2):
        target = Target(0, 0, step)
        costs = hosted(COSTS, host, rank=1, layers=1, microbatches=1)
        parts = [costs.work_ns(Work(name, target, tokens=8)) for name in ("gather", "partition", "reduce")]
        totals.add(round(sum(parts) / 1e3 + EXPERTS["experts"].line.at(10) + host.plan_us, 3))
        # One attention worker was recorded: a second one meets what it met.
        assert costs.work_ns(Work("attention", target, tokens=8)) == pytest.approx(70_000, abs=1)
        assert costs.work_ns(Work("gate", target)) == 30_000
        # The last layer of a step is taken to turn as others do.
        assert costs.work_ns(Work("combine", target)) == 25_000
    # Worker 1: gather, kernels, reply and the plan of each recorded target; every one of them is met.
    assert totals == {45 + 62 + 12 + 20.0, 45 + 62 + 12 + 22.0}
    assert hosted(COSTS, host, rank=0, layers=1, microbatches=1).work_ns(Work("dense", None)) == 50_000
    assert costs.beside_ns(Work("gate", target)) == ()


def test_alone_is_the_shortest_tenth_and_the_rest_of_the_cpu_is_beside() -> None:
    found = [dataclasses.replace(way(step, 0.0), gate=30.0 + step) for step in range(20)]
    cpu_us = {"attention": 300.0, "scheduler": 100.0, "ffn": 50.0, "door": 40.0}
    host = host_alone(found, cpu_us)
    assert (host.parts[0].gate, host.plan_us) == (31.0, 21.0)
    assert dict(host.beside) == {"attention": 300.0 - 70 - 31, "scheduler": 79.0, "ffn": 0.0, "door": 40.0}
    first, second = (hosted(COSTS, host, rank=rank, layers=1, microbatches=1) for rank in range(2))
    assert first.beside_ns(Work("gate", Target(0, 0, 0))) == (199_000, 79_000)
    assert second.beside_ns(Work("gate", Target(0, 0, 0))) == (199_000,)
    assert first.beside_ns(Work("combine", Target(0, 0, 0))) == (40_000,)
    assert first.beside_ns(Work("reduce", Target(0, 0, 0))) == (0,)


def test_a_run_in_which_the_batch_was_never_full_says_nothing_of_cpu() -> None:
    usage = Usage(2, 12)
    for _ in range(12):
        usage.token(0)
    assert usage.cpu_us(3, 1) == {}
    assert usage.share() == 1.0


@pytest.mark.slow
@pytest.mark.processes
def test_real_processes_are_predicted_and_plans_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reality", "--shapes", "1+2", "--requests", "6", "--tokens", "40", "--microbatches", "2", "--json"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    (shape,) = report["shapes"]
    assert shape["predicted"]["fitted"]["mean_us"] > 0
    assert shape["measured"]["odd"]["mean_us"] > 0
    assert set(shape["plans"]) == {"virtual time", "plain reference", "recorded rows", "rows of the virtual run"}
    for one in shape["plans"].values():
        assert one["identical"] == one["plans"] > 100
        assert one["same"]
    assert shape["plans"]["recorded rows"]["copies"] > 0
    assert json.loads((tmp_path / "reality.json").read_text()) == report
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err

    # Were the plans not those of the recording, it would be said: another policy makes others of the same demand.
    other = plans_again(tmp_path / "1+2" / REAL / WIRE, tmp_path / "other", "static")["virtual time"]
    assert not other["same"]
    assert other["plans"] == sum(
        record[0] == "entry" for record in WireFile(tmp_path / "1+2" / REAL / WIRE / "scheduler-0.wire").records()
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--cores", "100000"], "--cores"),
        (["--shapes", "1+0"], "--shapes"),
        (["--shapes", "two"], "--shapes"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reality", *arguments]) == 2
    assert names in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--shapes", "1+1,1+1"], "--shapes: 1 + 1 stands there twice"),
        (["--shapes", "1+0"], "--shapes: '1+0' is none"),
        (["--shapes", "9999+1"], "topology.attention: 9999"),
        (["--cores", "99999"], "--cores: 99999 of"),
        (["--limit-s", "nan"], "--limit-s: nan is no time"),
        (["--limit-s", "-1"], "--limit-s: -1 is no time"),
        (["--tokens", "3"], "--tokens: 3 make no even and odd steps"),
        (["--policy", "nobody"], "policy: there is no policy 'nobody'"),
        (["--slots", "many"], "slots: 'many' is no whole number"),
        (["--out", ""], "out: it is empty; give a directory"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reality", "--out", str(tmp_path / "out"), *arguments]) == 2
    errors = capsys.readouterr().err
    assert names in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()
