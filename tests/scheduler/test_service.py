"""From demand to entries: aborts, refusals, room in the ring, and the one order of a policy's answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from afore.core import control
from afore.core.errors import PeerLost
from afore.core.plan import CopyStart, EntryKind, Verdict
from afore.core.target import Target
from afore.scheduler.policies.base import Action, Assign, Copies
from afore.testing import virtual_test
from afore.transport.feedback import FeedbackFlags
from tests.scheduler.planning_rig import SLOTS, WORKERS, Rig

PLAN, COPIES, ABORT = EntryKind.PLAN, EntryKind.COPIES, EntryKind.ABORT
REFUSED = Verdict.BINDING_DISAGREES


def copy_and_use(target: Target) -> list[Action]:
    """Expert 0 gets a replica on worker 1, which takes one pair."""
    return [Copies(target.layer, ((0, 1, 0),)), Assign(target, ((0, 1, 0, 1),))]


def use(target: Target) -> list[Action]:
    """One pair on the replica that should be there."""
    return [Assign(target, ((0, 1, 0, 1),))]


async def counters(rig: Rig) -> dict[str, int]:
    return dict(json.loads(await rig.planning.statistics())["counters"])


@virtual_test
async def test_layers_of_a_step_are_published_in_order_with_their_copies() -> None:
    rig = Rig()
    rig.policy.answer = copy_and_use
    await rig.announce(0, 0)
    for layer in range(3):
        await rig.demand(layer, 0, 0)
    entries = [rig.read() for _ in range(3)]
    assert [entry.target for entry in entries] == [Target(layer, 0, 0) for layer in range(3)]
    assert rig.rung == [0, 1, 2]
    assert all(entry.start is CopyStart.NOW and len(entry.copies) == 1 for entry in entries)
    assert [share.generation for entry in entries for share in entry.shares] == [0, 1, 2]


@virtual_test
async def test_a_vector_before_its_announcement_is_found_with_it() -> None:
    rig = Rig()
    await rig.demand(0, 1, 0)
    assert rig.read_all() == []
    await rig.announce(1, 0)
    assert rig.read_all() == [(PLAN, Target(0, 1, 0))]


# Aborts


@virtual_test
async def test_nothing_of_a_step_is_published_after_one_of_its_targets_was_aborted() -> None:
    rig = Rig()
    await rig.announce(0, 0)
    await rig.demand(0, 0, 0)
    target = Target(0, 0, 0)
    await rig.record(1, 0, target, FeedbackFlags.MISSING)
    await rig.record(0, 0, target, FeedbackFlags.MISSING)
    await rig.demand(1, 0, 0)
    assert rig.read_all() == [(PLAN, target), (ABORT, target)]
    assert rig.policy.asked == [target]
    await rig.record(0, 0, target)
    assert rig.reports == []
    await rig.record(1, 0, target)
    assert rig.reports == [control.StepAborted(0, 0, 0)]
    # Announced anew, everything goes on; another microbatch never stopped.
    await rig.announce(0, 1)
    await rig.announce(1, 0)
    await rig.demand(0, 1, 0)
    await rig.demand(0, 0, 1)
    assert rig.read_all() == [(PLAN, Target(0, 1, 0)), (PLAN, Target(0, 0, 1))]
    assert (await counters(rig))["aborts"] == 1


@virtual_test
async def test_a_target_is_skipped_whose_step_turns_out_to_be_aborted_while_it_is_planned() -> None:
    rig = Rig()
    await rig.announce(0, 0)
    await rig.demand(0, 0, 0)
    # Late inputs came after all, so the next layer's demand is there; that they were missing is found only now.
    rig.write_record(1, 0, Target(0, 0, 0), FeedbackFlags.MISSING)
    await rig.demand(1, 0, 0)
    assert rig.read_all() == [(PLAN, Target(0, 0, 0)), (ABORT, Target(0, 0, 0))]
    assert rig.policy.asked == [Target(0, 0, 0)]


@virtual_test
async def test_inputs_that_were_missing_of_a_finished_target_abort_nothing() -> None:
    rig = Rig()
    await rig.announce(0, 0)
    await rig.demand(0, 0, 0)
    for worker in range(WORKERS):
        await rig.record(worker, 0, Target(0, 0, 0))
    await rig.record(0, 0, Target(0, 0, 0), FeedbackFlags.MISSING)
    await rig.demand(1, 0, 0)
    assert rig.read_all() == [(PLAN, Target(0, 0, 0)), (PLAN, Target(1, 0, 0))]


@virtual_test
async def test_a_target_that_waits_for_room_is_dropped_when_its_step_is_aborted() -> None:
    rig = Rig()
    await rig.announce(0, 0)
    await rig.announce(1, 0)
    await rig.demand(0, 0, 0)
    rig.policy.answer = lambda target: [
        *[Copies(2, ((0, 1, 0),)) for _ in range(SLOTS - 1)],
        *copy_and_use(target),
    ]
    planning = asyncio.create_task(rig.demand(1, 0, 0))
    await asyncio.sleep(0.001)
    assert not planning.done(), "the ring has no room for it"
    rig.write_record(0, 0, Target(0, 0, 0), FeedbackFlags.MISSING)
    aborting = asyncio.create_task(rig.planning.feedback_arrived())
    await asyncio.sleep(0.001)
    for _ in range(3):
        rig.read()
    await planning
    await aborting
    kinds = rig.read_all()
    assert kinds.count((ABORT, Target(0, 0, 0))) == 1
    assert not [target for kind, target in kinds if kind is PLAN]
    assert rig.policy.reset == [1], "its copies were never published"


# Refusals


@virtual_test
async def test_a_refused_plan_resets_its_layer_and_voids_its_bindings() -> None:
    rig = Rig()
    rig.policy.answer = copy_and_use
    await rig.announce(0, 0)
    await rig.demand(0, 0, 0)
    rig.read((Verdict.ACCEPTED, REFUSED))
    await rig.demand(1, 0, 0)
    assert rig.policy.reset == [0]
    # A policy that goes on counting on the replica is put right: the target runs on primaries.
    rig.read()
    rig.policy.answer = use
    await rig.announce(1, 0)
    await rig.demand(0, 1, 0)
    entry = rig.read()
    assert entry.shares == ()
    assert rig.policy.reset == [0, 0]
    seen = await counters(rig)
    assert (seen["refusals"], seen["plan_errors"]) == (1, 1)


@virtual_test
async def test_more_entries_at_once_than_the_ring_holds_are_all_judged() -> None:
    rig = Rig()
    burst = 3 * SLOTS
    rig.policy.answer = lambda target: [
        *[Copies(2, ((0, 1, number % 2),)) for number in range(burst)],
        Assign(target, ()),
    ]
    await rig.announce(0, 0)
    planning = asyncio.create_task(rig.demand(0, 0, 0))
    for number in range(burst):
        verdict = REFUSED if number == 1 else Verdict.ACCEPTED
        assert (await rig.read_next((Verdict.ACCEPTED, verdict))).kind is COPIES
    await planning
    rig.policy.answer = lambda target: [Assign(target, ())]
    await rig.demand(1, 0, 0)
    assert rig.policy.reset == [2]
    assert (await counters(rig))["refusals"] == 1


@virtual_test
async def test_a_reader_that_stands_still_past_its_lease_is_named() -> None:
    rig = Rig()
    rig.policy.answer = lambda target: [Copies(2, ((0, 1, 0),)) for _ in range(2 * SLOTS)]
    await asyncio.sleep(10)  # an idle hour is nobody's standstill: leases count from the entries
    await rig.announce(0, 0)
    began = asyncio.get_running_loop().time()
    with pytest.raises(PeerLost, match="ffn-0"):
        await rig.demand(0, 0, 0)
    assert asyncio.get_running_loop().time() - began > 1.0


# The order of a policy's answers


@virtual_test
async def test_what_a_policy_answers_is_published_in_the_order_in_which_it_was_asked() -> None:
    rig = Rig()
    first, second = Target(0, 0, 0), Target(0, 1, 0)
    await rig.announce(0, 0)
    await rig.announce(1, 0)
    rig.policy.answer = lambda target: (
        [] if target == second else [*[Copies(2, ((0, 1, 0),)) for _ in range(SLOTS + 1)], Assign(target, ())]
    )
    await rig.demand(0, 1, 0)
    planning = asyncio.create_task(rig.demand(0, 0, 0))
    await asyncio.sleep(0.001)
    assert not planning.done()
    # The inputs of the target that waited for them come while the other one waits for room.
    await rig.record(0, 0, second, FeedbackFlags.INPUTS)
    assert rig.policy.asked == [second, first]
    seen = []
    while not planning.done():
        seen += [target for kind, target in rig.read_all() if kind is PLAN]
        await asyncio.sleep(0.001)
    seen += [target for kind, target in rig.read_all() if kind is PLAN]
    assert rig.policy.asked == [second, first, second]
    assert seen == [first, second]
