"""``evaluate reality``: what is compared, the host's part from spans, and the whole once, on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.tools.evaluate.command import main
from afore.tools.evaluate.reality_command import compare
from afore.tools.evaluate.reality_fit import handovers
from afore.tools.evaluate.reality_runs import SPANS, Passed, passed


def steps(tokens: int, times: list[float]) -> list[Passed]:
    return [Passed(step, tokens, took_us) for step, took_us in enumerate(times)]


def test_full_targets_are_compared_on_the_half_that_was_not_fitted() -> None:
    measured = [*steps(8, [90.0, 100.0] * 5), *steps(3, [7.0] * 4)]
    found = compare(measured, [*steps(8, [110.0] * 4), *steps(1, [1.0] * 50)])
    assert (found["rows"], found["tested"], found["predicted"]) == (8, 5, 4)
    assert found["measured_us"] == 100.0
    assert found["error"] == pytest.approx(0.1)
    assert found["noise"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("measured", "predicted", "names"),
    [
        (steps(8, [1.0, 2.0]), steps(7, [1.0]), "as many rows"),
        (steps(8, [1.0]), steps(8, [1.0]), "a half"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(measured: list[Passed], predicted: list[Passed], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        compare(measured, predicted)


def record(directory: Path, *, plans: bool = True) -> None:
    """Four steps of one layer; in odd ones everything takes a second longer."""
    roles = {name: Tracer(name, WallClock(), directory) for name in ("attention-0", "scheduler", "ffn-0")}
    for step in range(4):
        target, at = Target(0, 0, step), step * 10_000_000_000
        slow = 1_000_000_000 * (step % 2)

        def span(role: str, name: str, start_us: int, end_us: int, at: int = at, target: Target = target) -> None:
            roles[role].span(name, target, at + start_us * 1000, at + end_us * 1000, tokens=5)  # type: ignore[arg-type]

        late = slow // 1000
        span("attention-0", "attention", 0, 100)
        span("attention-0", "demand_write", 110 + late, 130 + late)
        if plans:
            span("scheduler", "plan", 150 + 2 * late, 160 + 2 * late)
            span("scheduler", "publish", 160 + 2 * late, 170 + 2 * late)
        span("ffn-0", "read", 180 + 3 * late, 190 + 3 * late)
        span("ffn-0", "gather", 220 + 4 * late, 230 + 4 * late)
        span("ffn-0", "reduce", 300 + 4 * late, 310 + 4 * late)
        span("ffn-0", "reply", 320 + 4 * late, 350 + 4 * late)
    for tracer in roles.values():
        tracer.close()


def test_the_hosts_part_is_read_off_even_steps(tmp_path: Path) -> None:
    record(tmp_path / SPANS)
    found = handovers(tmp_path / SPANS)
    assert found.after_attention == pytest.approx(30)
    assert found.message == pytest.approx((20 + 10) / 2)
    assert found.plan == pytest.approx(20)
    assert found.before_gather == pytest.approx(40)
    assert found.after_reduce == pytest.approx(40)
    times = {one.step: one.took_us for one in passed(tmp_path)}
    assert times[0] == times[2] == pytest.approx(350)
    assert times[1] > 1e6


def test_a_run_without_plans_is_refused(tmp_path: Path) -> None:
    record(tmp_path, plans=False)
    with pytest.raises(ConfigError, match="its plan"):
        handovers(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_real_processes_are_predicted_and_plans_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reality", "--ffn", "2", "--requests", "6", "--tokens", "16", "--microbatches", "2", "--json"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["targets"]["predicted_us"] > 0
    assert report["targets"]["measured_us"] > 0
    for world in ("real", "virtual"):
        assert report["plans"][world]["targets"] > 0
        assert report["plans"][world]["different"] == 0
    assert report["host_us"]["plan"] > 0
    assert json.loads((tmp_path / "reality.json").read_text()) == report
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_more_cores_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reality", "--cores", "100000"]) == 2
    assert "--cores" in capsys.readouterr().err
