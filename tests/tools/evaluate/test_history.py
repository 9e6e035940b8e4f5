"""EPLB rebalances before what is measured and never within it: by the commands' own defaults, and what would not is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.command import check, main
from afore.tools.evaluate.history import check_rebalancing, least_warm, warm_for
from afore.tools.evaluate.mechanisms import FEWER
from afore.tools.evaluate.mechanisms import main as mechanisms
from afore.tools.evaluate.options import parser, template_of
from afore.tools.evaluate.world import config_of
from afore.workers.device.hardware import read_profile

PROFILE = read_profile("a100-glm45air")


def test_the_fewest_warm_steps_are_the_fewest() -> None:
    for steps in (1, 2, 7, 8, 10, 30):
        for microbatches in (1, 2, 3, 4):
            for options in ((), (FEWER,)) if microbatches > 2 else ((),):
                cell = Cell(
                    policy="eplb", steps=steps, warm=least_warm(steps), microbatches=microbatches, options=options
                )
                check(cell, PROFILE)
                check(replace(cell, warm=warm_for(steps)), PROFILE)
                check(replace(cell, warm=warm_for(steps) + 20), PROFILE)
                with pytest.raises(ConfigError, match="--warm: after"):
                    check(replace(cell, warm=least_warm(steps) - 1), PROFILE)


def test_only_eplb_is_held_to_it() -> None:
    short = Cell(policy="afore", steps=8, warm=1)
    check(short, PROFILE)
    check(replace(short, policy="eplb", arrivals="azure-conv"), PROFILE)
    # An interval of the caller's own, as long as published ones, never comes.
    late = replace(short, policy="eplb", warm=20, options=(("policy_options.eplb.interval_steps", 3000),))
    with pytest.raises(ConfigError, match="--warm"):
        check(late, PROFILE)


@pytest.mark.parametrize("given", [[], ["--quick"], ["--steps", "30"], ["--quick", "--steps", "1"]])
def test_the_evaluations_template_has_warm_steps_enough(given: list[str]) -> None:
    cell = replace(template_of(parser().parse_args(given)), policy="eplb-redistribute")
    check_rebalancing(cell, config_of(cell, PROFILE))
    assert cell.warm >= warm_for(cell.steps)


def rebalanced_before_and_not_within(cell: Cell) -> None:
    found = run_cell(cell)
    copies = found["copies"]["copies"], found["counters"].get("copies_ahead", 0)
    assert copies == (0, 0), "copies of a rebalancing within what is measured"
    token = found["imbalance"]["token"]
    assert token["after"] < token["before"] - 0.2, "replicas are there, and take work"


@pytest.mark.slow
def test_plan_by_its_own_defaults_measures_eplb_between_rebalancings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--gpus", "3", "--profile", "h200", "--requests", "6", "--layers", "1", "--out", str(tmp_path)]
    assert main(["plan", *few, "--json"]) == 0
    capsys.readouterr()
    [kept] = (tmp_path / "cells").glob("eplb-redistribute-*.json")
    planned = json.loads(kept.read_text())["cell"]
    # The same steps at a size at which replicas matter.
    rebalanced_before_and_not_within(
        Cell(
            policy="eplb-redistribute",
            profile="h200",
            prefill=1,
            layers=3,
            attention=2,
            ffn=6,
            microbatches=2,
            slots=2,
            rows=128,
            warm=planned["warm"],
            steps=planned["steps"],
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [3, 4])
@pytest.mark.parametrize("options", [(), (FEWER,)], ids=["all", "fewer"])
def test_however_many_microbatches_run(microbatches: int, options: tuple[tuple[str, int], ...]) -> None:
    rebalanced_before_and_not_within(
        Cell(
            policy="eplb-redistribute",
            layers=3,
            rows=160,
            microbatches=microbatches,
            warm=warm_for(7),
            steps=7,
            options=options,
        )
    )


def test_mechanisms_refuses_steps_that_eplb_would_rebalance_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mechanisms(["--warm", "4", "--steps", "8", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--warm: after 4 steps eplb-redistribute would rebalance within the 8 that are measured" in said
    assert "give 13 or more" in said
