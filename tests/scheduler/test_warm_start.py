"""Replicas before the first target: where a trace's demand puts them, used by the first plans, and never seen in an answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from afore.core.config import CostOptions, RunConfig
from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.repeat import repeat
from afore.scheduler.traces import Event, TraceError, TraceHeader, TraceReader, TraceTarget, TraceWriter
from afore.scheduler.warm_start import filled, warm_copies
from afore.serving.virtual import run_emulated
from tests.serving.virtual_cases import QUIET, SMALL, SPEC, asks, prescribed

CONFIG = PlannerConfig(num_experts=4, num_workers=2, slots_per_worker=(1, 2))
PRIMARIES = contiguous_primaries(4, 2)


def trace(path: Path, counts_LE: np.ndarray) -> str:
    header = TraceHeader(experts=counts_LE.shape[1], layers=len(counts_LE))
    with TraceWriter(path, header) as out:
        for layer, counts_E in enumerate(counts_LE):
            for step in range(2):
                out.add(TraceTarget(target=Target(layer, 0, step), demand_E=counts_E.astype(np.int32)))
    return str(path)


def test_the_hottest_experts_get_replicas_elsewhere(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.npz", np.array([[90, 1, 1, 40], [0, 0, 0, 0], [1, 80, 60, 1]]))
    found = warm_copies(file, CONFIG, PRIMARIES, 3)
    assert [layer for layer, _ in found] == [0, 2], "what demanded nothing gets nothing"
    first = dict(found)[0]
    assert {(e, w) for e, w, _ in first} == {(0, 1), (1, 1), (3, 0)}
    table_NR = filled(CONFIG, first)
    assert table_NR[0].tolist() == [3, -2]
    assert sorted(table_NR[1].tolist()) == [0, 1]


def test_a_trace_of_another_model(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.npz", np.ones((2, 4)))
    with pytest.raises(
        ConfigError, match=r"warm_start: .*t\.npz has 2 layers of 4 experts, the model 3 of 4; give a trace"
    ):
        warm_copies(file, CONFIG, PRIMARIES, 3)
    with pytest.raises(TraceError, match=r"none\.npz: cannot be read"):
        warm_copies(str(tmp_path / "none.npz"), CONFIG, PRIMARIES, 3)


def warm(tmp_path: Path, policy: str, config: RunConfig = SMALL) -> RunConfig:
    """The configuration, with a trace of which a few experts are hot."""
    rng = np.random.default_rng(1)
    file = trace(tmp_path / "warm.npz", rng.permuted(np.tile(2 ** np.arange(64) % 1009, (3, 1)), axis=1))
    costs = CostOptions(tile_us=30, copy_us=1e6, window_us=0, adapt=False)
    return dataclasses.replace(
        config, policy=policy, warm_start=file, record=str(tmp_path / f"{policy}.npz"), costs=costs
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["afore", "afore-plus", "afore-no-prefetch", "eplb", "eplb-redistribute"])
def test_answers_are_the_same_and_the_first_plans_use_them(tmp_path: Path, policy: str) -> None:
    config = warm(tmp_path, policy)
    run = run_emulated(config, asks(), QUIET)
    assert run.tokens == prescribed(asks(), config)
    reader = TraceReader(tmp_path / f"{policy}.npz")
    rows = list(reader.events())
    assert [row.event for row in rows[:4]] == [Event.ADOPT] * SPEC.num_moe_layers + [Event.DEMAND]
    shares = sum(len(row.answer.shares_X4) for row in rows if row.answer is not None)
    assert shares > 3, "no copy pays at this price: what is used was there before"
    found = repeat(reader)
    assert found.different == 0, found.first


@pytest.mark.slow
def test_a_policy_without_use_for_them(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="policy static uses no replicas that it has not copied"):
        run_emulated(warm(tmp_path, "static"), asks(), QUIET)
