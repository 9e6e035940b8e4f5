"""How much the host's time decides: each number's cells are held against the same number's."""

from __future__ import annotations

import pytest

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import check
from afore.tools.evaluate.fig_host import HOST_PART, bars
from afore.tools.evaluate.figure import Setting, vary
from afore.tools.evaluate.profiles import with_overrides
from afore.workers.device.hardware import read_profile

PROFILE = read_profile("a100-glm45air")
SETTING = Setting(template=Cell(policy="static"), workloads=("chat",), profile=PROFILE)
SPEEDS = {"eplb-redistribute": 100.0, "afore": 110.0, "afore-ahead": 121.0}


def test_the_hosts_time_is_what_the_label_says() -> None:
    for times in (0.0, 0.5):
        for cell in bars(SETTING, times).values():
            check(cell, PROFILE)
            chip = with_overrides(PROFILE, cell.overrides).chip
            assert chip.layer_host_us.value == times * PROFILE.chip.layer_host_us.value
            assert chip.attention_host_us == PROFILE.chip.attention_host_us
    assert bars(SETTING, 1.0)["afore"] == SETTING.sweep(workload="chat", policy="afore")


def test_each_number_is_held_against_its_own() -> None:
    assert HOST_PART.cells is not None
    assert HOST_PART.rows is not None
    cells = HOST_PART.cells(SETTING)
    assert len(set(cells)) == 12
    results = {
        cell: {
            "tokens_per_s": SPEEDS[cell.policy] * (2.0 if cell.overrides else 1.0),
            "imbalance": {"tile": {"after": 1.0}},
        }
        for cell in cells
    }
    rows = {row.label: row.ours for row in HOST_PART.rows(SETTING, results)}
    for times in ("0", "0.5", "1"):
        ahead = rows[f"{times} times the host's time: afore-ahead + both"]
        assert ahead["over afore"] == pytest.approx(0.1)
        assert ahead["over eplb-redistribute"] == pytest.approx(0.21)


def test_without_fewer_microbatches_only_the_plain_ones_are_left() -> None:
    template = vary(SETTING.template, microbatches=2)
    two = Setting(template=template, workloads=("chat",), profile=PROFILE)
    assert list(bars(two, 0.5)) == ["eplb-redistribute", "afore"]
