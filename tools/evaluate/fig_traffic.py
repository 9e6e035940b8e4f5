"""Beyond the paper: traffic that moves on, and what plans made from history are worth then."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import COPIES, Figure, Results, Row, Setting, copies_of, vary

POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "static": "static",
        "afore-reactive": "Approach 1 (the step before)",
        "eplb": "eplb",
        "eplb-redistribute": "eplb-redistribute",
        "lina": "lina",
        "libra": "libra",
        "harmoeny": "harmoeny",
        "afore": "afore",
    }
)
QUICK_POLICIES = ("static", "eplb-redistribute", "afore")
MOTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "as counted": {},
        "64 times as fast": {"pace": 64.0},
        "4 times the jitter": {"jitter": 4.0},
        "both": {"pace": 64.0, "jitter": 4.0},
        "turned": {"turns": True},
    }
)
QUICK_MOTIONS = ("as counted", "turned")
_PAPER = {"over static": 0.045, "token imbalance": 1.42}
"""Of Approach 1 (§3)."""


def _points(setting: Setting) -> list[tuple[str, str, Cell]]:
    """(traffic, policy, its cell)"""
    return [
        (motion, policy, setting.sweep(workload=setting.workloads[0], policy=policy, **MOTIONS[motion]))
        for motion in setting.few(tuple(MOTIONS), QUICK_MOTIONS)
        for policy in setting.few(tuple(POLICIES), QUICK_POLICIES)
    ]


def _cells(setting: Setting) -> list[Cell]:
    return [cell for _, _, cell in _points(setting)]


def _rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for motion, policy, cell in _points(setting):
        found, base = results[cell], results[vary(cell, policy="static")]
        ours = {
            "tokens/s": found["tokens_per_s"],
            "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
            "token imbalance": found["imbalance"]["token"]["after"],
            "tile imbalance": found["imbalance"]["tile"]["after"],
            **copies_of(found),
        }
        paper = _PAPER if policy == "afore-reactive" else {}
        rows.append(Row(label=f"{motion}: {POLICIES[policy]}", ours=ours, paper=paper))
    return rows


TRAFFIC = Figure(
    name="traffic",
    title="Beyond the paper: traffic that moves on",
    cells=_cells,
    rows=_rows,
    unit={"tokens/s": "tokens/s", "over static": "%", "token imbalance": "x", "tile imbalance": "x", **COPIES},
    note="As counted: half of a microbatch's mixture of topics is gone after 34 steps, and targets differ as much as published "
    "chunks of text do. Faster, a mixture lasts a step. Jitter is the variance of a target's shares around its mixture's. "
    "Turned: with the first measured step all requests are of topics that were not there before, and whoever counted has counted "
    "others. Redistribution costs nothing on the path here.",
)
