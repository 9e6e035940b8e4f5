"""Other hardware in one evaluation: each cell is run, and named, by the profile that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.fig_profiles import OTHER_PROFILES, PROFILES, bars, profiles_tried
from afore.tools.evaluate.figure import Setting, vary
from afore.tools.evaluate.profiles import profiles_of, with_overrides
from afore.tools.evaluate.store import results_of, to_bytes
from afore.workers.device.hardware import HardwareProfile, read_profile

OWN = read_profile("a100-glm45air")
TINY = Cell(policy="static", attention=1, ffn=2, prefill=1, slots=1, layers=1, rows=4, warm=1, steps=1)


def setting(template: Cell = TINY, profile: HardwareProfile = OWN, *, quick: bool = False) -> Setting:
    return Setting(template=template, workloads=("chat",), profile=profile, quick=quick)


def test_numbers_that_were_set_are_of_the_evaluations_own_profile() -> None:
    overrides = (("chip.gemm_efficiency", 0.3),)
    one = setting(vary(TINY, overrides=overrides), with_overrides(OWN, overrides))
    assert profiles_tried(one) == list(PROFILES)
    assert bars(one, "a100-glm45air")["afore"].overrides == overrides
    assert bars(one, "h200")["afore"].overrides == ()
    assert bars(one, "h200")["afore"].profile == "h200"
    both = bars(one, "h200")["afore-ahead + both"]
    assert (both.collectives, both.options) == ("own-stream", (("batch.least_microbatches", 2),))
    assert "afore-ahead + both" not in bars(setting(vary(TINY, microbatches=2)), "h200")
    assert OTHER_PROFILES.cells is not None
    assert len(OTHER_PROFILES.cells(one)) == 21
    assert len(OTHER_PROFILES.cells(setting(quick=True))) == 6


def test_another_model_is_held_against_nothing() -> None:
    overrides = (("shape.experts", 64.0),)
    assert profiles_tried(setting(TINY, with_overrides(OWN, overrides))) == ["a100-glm45air"]
    mine = vary(TINY, profile="mine.yaml")
    assert profiles_tried(setting(mine)) == ["mine.yaml", *PROFILES]
    assert profiles_tried(setting(mine, quick=True)) == ["mine.yaml", "a100-glm45air"]


def test_a_name_stands_for_what_is_given_for_it_alone() -> None:
    mine = replace(OWN, name="mine")
    assert profiles_of(["cpu", "h200", "cpu"], {"cpu": mine}) == {"cpu": mine, "h200": read_profile("h200")}
    assert profiles_of(["h200"], mine) == {"h200": mine}
    assert profiles_of(["h200"], None) == {"h200": read_profile("h200")}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_runs_on_the_profile_that_it_names(tmp_path: Path, jobs: int) -> None:
    measured = with_overrides(OWN, [("chip.gemm_efficiency", 0.5)])
    mine, other = vary(TINY, profile="mine"), vary(TINY, profile="h200")
    given: Mapping[str, HardwareProfile] = {"mine": measured}
    found = results_of([mine, other], tmp_path, lambda *_: None, profile=given, jobs=jobs)
    assert found[mine] == json.loads(to_bytes(run_cell(mine, measured)))
    assert found[other] == json.loads(to_bytes(run_cell(other)))
    assert found[mine]["content"] != found[other]["content"]
    # Where they are looked for again.
    run: list[Cell] = []
    assert results_of([mine, other], tmp_path, lambda cell, *_: run.append(cell), profile=given) == found
    assert not run
