"""A policy that decides only once a target's inputs have reached the FFN workers, as reactive systems do."""

from __future__ import annotations

import dataclasses

import pytest

from afore.core.target import Target
from afore.scheduler.policies.base import Action, Assign, Demand, PolicyContext, Quiet
from afore.serving.virtual import EmulatedRun, run_emulated
from tests.serving.virtual_cases import EMULATION, SMOKE, asks, prescribed


class Patient(Quiet):
    """Says nothing on demand; on inputs, primaries."""

    name = "patient"
    wants_inputs = True

    def __init__(self, context: PolicyContext) -> None:
        self._demanded: set[Target] = set()

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        self._demanded.add(target)
        return []

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        # Both must have come, and each target is asked for once.
        self._demanded.remove(target)
        return [Assign(target, (), skipped="patience")]


def run(seed: int | None = None) -> EmulatedRun:
    config = dataclasses.replace(SMOKE, policy=f"{__name__}:Patient")
    return run_emulated(config, asks(), EMULATION, seed=seed)


@pytest.mark.slow
def test_a_target_is_assigned_when_all_its_inputs_have_come() -> None:
    outcome = run()
    assert outcome.tokens == prescribed(asks())
    targets = outcome.stats["counters"]["targets"]
    assert outcome.stats["counters"]["no_copies: patience"] == targets > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_of_simultaneous_events(seed: int) -> None:
    assert run(seed).tokens == prescribed(asks())
