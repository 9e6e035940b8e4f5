"""A user's policy that misbehaves costs balance, never an answer: its targets run on primaries and the mistake is counted."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from afore.core.errors import AforeError, ConfigError
from afore.core.target import Target
from afore.scheduler.policies.base import Action, Assign, Copies, Demand, PolicyContext, Quiet
from afore.scheduler.policies.registry import check_policy
from afore.serving.virtual import run_emulated
from tests.serving.virtual_cases import EMULATION, SMOKE, asks, prescribed


class Raises(Quiet):
    name = "mistaken"

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        demand_E[:] = 0
        raise IndexError("off by one")


class SaysNothing(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return []


class SaysNone(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return None  # type: ignore[return-value]  # the mistake under test


class AnotherTarget(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return [Assign(dataclasses.replace(target, step=target.step + 1), ())]


class NoSuchLayer(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return [Copies(-1, ((0, 1, 0),)), Assign(target, ())]


class NoAction(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return ["primaries"]  # type: ignore[list-item]  # the mistake under test


class SaysGoodbye(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        raise SystemExit(0)


class NeverEnds(Raises):
    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return itertools.repeat(Copies(0, ()))  # type: ignore[return-value]  # the mistake under test


class CannotBeMade(Raises):
    def __init__(self, context: PolicyContext) -> None:
        raise SystemExit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [Raises, SaysNothing, SaysNone, AnotherTarget, NoSuchLayer, NoAction, SaysGoodbye, NeverEnds]
)
def test_the_tokens_stay_the_same_and_the_mistakes_are_counted(mistake: type[Raises]) -> None:
    run = run_emulated(dataclasses.replace(SMOKE, policy=f"{__name__}:{mistake.__name__}"), asks(), EMULATION)
    assert run.tokens == prescribed(asks())
    counters = run.stats["counters"]
    assert counters["policy_errors"] == counters["targets"] > 0


@pytest.mark.slow
def test_a_constructor_that_ends_the_process_is_named() -> None:
    with pytest.raises(AforeError, match="its constructor raised SystemExit: 0"):
        run_emulated(dataclasses.replace(SMOKE, policy=f"{__name__}:CannotBeMade"), asks(), EMULATION)


def test_a_module_that_ends_the_process_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script_of_mine.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"a_script_of_mine cannot be imported \(SystemExit: 0\); mend that module"):
        check_policy("a_script_of_mine:Policy")
