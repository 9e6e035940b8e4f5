"""Policies as a user would write them, and some that are none; named by path in the registry's tests."""

from __future__ import annotations

from afore.core.target import Target
from afore.scheduler.policies.afore_plus import AforePlus
from afore.scheduler.policies.base import Action, Assign, Demand, PolicyContext, Quiet


class Mine(Quiet):
    """Sends nothing anywhere, under its own name."""

    name = "mine"

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return [Assign(target, ())]


class MinePlus(AforePlus):
    """A policy of ours with another name."""

    name = "mine-plus"


class Nameless(Quiet):
    """Forgets its name."""

    def __init__(self, context: PolicyContext) -> None:
        del context

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return []


class Deaf:
    """Hears no event."""


NOT_A_CLASS = 7
