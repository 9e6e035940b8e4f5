"""Slot safety: no weight is read while it is written, no token is computed with another expert's weights.

Tiny R, many layers and microbatches, random delays everywhere, thousands of interleavings; and each rule that keeps it so is
taken away once, to see that the storm would notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from afore.core.errors import SlotError
from afore.core.plan import CopyStart, PlanEntry, Verdict
from afore.workers.migrator import Migrator, Readiness
from afore.workers.reader import Reader
from afore.workers.sequencer import Sequencer
from afore.workers.slot_table import SlotTable
from tests.workers.ffn_parts import Plans, Shape
from tests.workers.random_plans import PlannerPlans, RandomPlans
from tests.workers.storms import Weather, storm

SHAPES = (
    Shape(),
    Shape(attention=1, ffn=2, microbatches=4, slots=1, layers=2, steps=3, experts=5),
    Shape(attention=3, ffn=4, microbatches=2, slots=(2, 0, 1, 1), layers=2, experts=9),
    Shape(attention=2, ffn=5, microbatches=3, slots=1, layers=1, steps=4, experts=4),
)
"""N that does not divide E, E < N, a worker without slots, one attention worker and several."""
SMALL = (
    Shape(attention=1, ffn=2, microbatches=4, slots=1, layers=3, steps=1, experts=5),
    Shape(attention=2, ffn=2, microbatches=3, slots=1, layers=2, steps=2, experts=4),
    Shape(attention=1, ffn=3, microbatches=3, slots=1, layers=2, steps=1, experts=4),
)
"""Little work each, for many interleavings."""


def planner(shape: Shape, seed: int) -> Plans:
    return PlannerPlans(shape, CopyStart.ARRIVAL if seed % 5 == 4 else CopyStart.NOW)


@pytest.mark.slow
def test_random_plans_never_touch_weights_in_use(storm_seeds: int) -> None:
    weather = Weather()
    for seed in range(storm_seeds):
        shapes = SMALL if seed % 16 else SHAPES
        storm(seed, shapes[seed // 16 % len(shapes)], RandomPlans, weather)
    assert weather.seeds == storm_seeds
    assert weather.copies > weather.targets / 2
    assert weather.replica_reads > weather.targets / 2
    assert weather.exposed > weather.targets / 10


@pytest.mark.slow
def test_the_planner_s_plans_never_touch_weights_in_use(storm_seeds: int) -> None:
    weather = Weather()
    for seed in range(storm_seeds // 8):
        storm(seed, (SMALL + SHAPES)[seed % 7], planner, weather)
    assert weather.copies > weather.targets / 4
    assert weather.replica_reads > weather.targets / 2
    assert weather.exposed > 0


@pytest.mark.slow
def test_refusals_and_aborts_leave_nothing_unsafe(storm_seeds: int) -> None:
    weather = Weather()
    for seed in range(storm_seeds // 8):
        storm(seed, (SMALL + SHAPES)[seed % 7], RandomPlans, weather, aborts=0.15, damage=0.4)
    assert weather.refused > weather.targets / 40
    assert weather.skipped > weather.targets / 20
    assert weather.run > weather.targets
    assert weather.replica_reads > weather.targets / 4


def deferred(original: Callable[..., None]) -> Callable[..., None]:
    """A migrator that submits a little later than it could, as one in a coroutine of its own would."""

    def start(self: Migrator, *args: Any) -> None:
        asyncio.get_running_loop().call_later(40e-6, original, self, *args)

    return start


async def unawaited(self: Sequencer, entry: PlanEntry) -> list[Readiness]:
    """Waits only for copies that happen to be submitted: the others' events are not recorded yet."""
    submitted = (self._migrator._ready.get((entry.target.layer, share.slot)) for share in mine(self, entry))
    return [copy for copy in submitted if copy is not None]


def mine(sequencer: Sequencer, entry: PlanEntry) -> list[Any]:
    return [share for share in entry.shares if share.worker == sequencer._rank]


ORIGINAL_SUBMISSIONS = Sequencer._submissions


async def own_copies_only(self: Sequencer, entry: PlanEntry) -> list[Readiness]:
    """Forgets that an earlier plan may still be filling a slot."""
    return [copy for copy in await ORIGINAL_SUBMISSIONS(self, entry) if copy.generation == entry.sequence]


async def ready_once_ready_for_ever(self: Sequencer, entry: PlanEntry) -> list[Readiness]:
    """Readiness of the slot, whatever generation it holds."""
    found = await ORIGINAL_SUBMISSIONS(self, entry)
    seen = self.__dict__.setdefault("seen", {})
    return [seen.setdefault((copy.layer, copy.slot), copy) for copy in found]


MUTANTS: dict[str, list[tuple[Any, str, Any]]] = {
    "copies do not wait for earlier targets to enqueue": [(SlotTable, "may_start", lambda self, held: True)],
    "copies do not wait on the stream for the last use": [(Migrator, "_uses_ahead", lambda self, key: [])],
    "submission is not awaited": [
        (Migrator, "_start", deferred(Migrator._start)),
        (Sequencer, "_submissions", unawaited),
    ],
    "only the plan's own copies are waited for": [(Sequencer, "_submissions", own_copies_only)],
    "readiness per slot": [(Sequencer, "_submissions", ready_once_ready_for_ever)],
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_a_rule_the_storm_notices(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, replacement in MUTANTS[mutant]:
        monkeypatch.setattr(owner, name, replacement)
    convicted = 0
    for seed in range(100):
        try:
            storm(seed, SHAPES[0], RandomPlans)
        except SlotError:
            convicted += 1
            break
    assert convicted, f"{mutant}: 100 storms saw nothing"


@pytest.mark.slow
def test_a_migrator_that_submits_late_is_safe_because_submission_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Migrator, "_start", deferred(Migrator._start))
    for seed in range(20):
        storm(seed, SHAPES[seed % len(SHAPES)], RandomPlans)


async def own_verdict_only(self: Reader, entry: PlanEntry, verdict: Verdict) -> bool:
    """Acts on its own verdict without asking the others."""
    if self._ring.store_verdict(entry.sequence, verdict):
        await self._ring_neighbours(entry.sequence)
    return verdict is Verdict.ACCEPTED


@pytest.mark.slow
def test_without_agreement_tokens_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_agree", own_verdict_only)

    def storms() -> None:
        for seed in range(100):
            storm(seed, SHAPES[0], RandomPlans, damage=0.4)

    with pytest.raises(AssertionError, match="a reply is"):
        storms()
