"""EPLB rebalances once, before what is measured and never within it: whatever the steps, and however many microbatches run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.command import check, main
from afore.tools.evaluate.mechanisms import FEWER
from afore.tools.evaluate.mechanisms import main as mechanisms
from afore.workers.device.hardware import read_profile

PROFILE = read_profile("a100-glm45air")


def rebalanced_before_and_not_within(cell: Cell) -> None:
    copies = (found := run_cell(cell))["copies"]
    assert (copies["copies"], copies["ahead"]) == (0, 0), "copies of a rebalancing within what is measured"
    token = found["imbalance"]["token"]
    assert token["after"] < token["before"] - 0.2, "replicas are there, and take work"


@pytest.mark.slow
def test_plan_by_its_own_defaults_measures_eplb_after_it_has_rebalanced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--gpus", "3", "--profile", "h200", "--requests", "6", "--layers", "1", "--out", str(tmp_path)]
    assert main(["plan", *few, "--json"]) == 0
    capsys.readouterr()
    [kept] = (tmp_path / "cells").glob("eplb-redistribute-*.json")
    planned = json.loads(kept.read_text())["cell"]
    # The same steps at a size at which replicas matter.
    shape: dict[str, Any] = {
        "prefill": 1,
        "layers": 3,
        "attention": 2,
        "ffn": 6,
        "microbatches": 2,
        "slots": 2,
        "rows": 128,
    }
    steps = {name: planned[name] for name in ("warm", "steps", "profile")}
    rebalanced_before_and_not_within(Cell(policy="eplb-redistribute", **shape, **steps))


@pytest.mark.slow
@pytest.mark.parametrize("warm", [6, 12])
@pytest.mark.parametrize("microbatches", [3, 4])
@pytest.mark.parametrize("options", [(), (FEWER,)], ids=["all", "fewer"])
def test_however_many_microbatches_run(warm: int, microbatches: int, options: tuple[tuple[str, int], ...]) -> None:
    rebalanced_before_and_not_within(
        Cell(
            policy="eplb-redistribute",
            layers=3,
            rows=160,
            microbatches=microbatches,
            warm=warm,
            steps=7,
            options=options,
        )
    )


def test_too_few_warm_steps_are_refused_where_eplb_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = Cell(policy="afore", steps=8, warm=1)
    check(short, PROFILE)
    check(replace(short, policy="eplb", arrivals="azure-conv"), PROFILE)
    with pytest.raises(ConfigError, match="--warm: in 5 steps eplb cannot count"):
        check(replace(short, policy="eplb", warm=5), PROFILE)
    assert mechanisms(["--warm", "5", "--steps", "8", "--out", str(tmp_path)]) == 2
    assert "--warm: in 5 steps eplb-redistribute cannot count, rebalance and settle" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), (FEWER,)], ids=["all", "fewer"])
def test_the_stop_of_a_rebalancing_is_over_when_measuring_begins(options: tuple[tuple[str, int], ...]) -> None:
    """As fast after plan's and a quick look's twelve warm steps as after the evaluation's twenty."""
    cell = Cell(policy="eplb-redistribute", layers=6, options=options)
    short, long = (run_cell(replace(cell, warm=warm, steps=8))["tokens_per_s"] for warm in (12, 20))
    assert short == pytest.approx(long, rel=0.01)
