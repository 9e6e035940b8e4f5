"""The slot table: what it refuses, and when it lets a copy start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import SlotError
from afore.core.plan import CopyStart, EntryKind, PlanEntry, Verdict
from afore.core.slots import EMPTY, contiguous_primaries
from afore.workers.slot_table import SlotState, SlotTable
from tests.workers.entries import entry

EXPERTS, WORKERS, LAYERS, SLOTS = 8, 4, 2, 2
ME = 1
"""Owns experts 2 and 3."""


def table(rank: int = ME) -> SlotTable:
    return SlotTable(
        rank=rank,
        num_slots=SLOTS,
        num_layers=LAYERS,
        num_workers=WORKERS,
        primaries_E=contiguous_primaries(EXPERTS, WORKERS),
    )


def accept(slots: SlotTable, *entries: PlanEntry) -> None:
    for one in entries:
        assert slots.judge(one) is Verdict.ACCEPTED
        slots.apply(one)


def test_a_copy_binds_and_later_plans_may_name_it() -> None:
    slots = table()
    accept(slots, entry(5, copies=[(0, ME, 1)], shares=[(0, ME, 1, 3, 5)]))
    assert slots.state(0, 1) == (0, 5, SlotState.HELD)
    assert slots.judge(entry(6, shares=[(0, ME, 1, 3, 5)])) is Verdict.ACCEPTED


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(entry(6, shares=[(0, ME, 0, 3, 5)]), id="slot that is empty"),
        pytest.param(entry(6, shares=[(0, ME, 1, 3, 4)]), id="another generation"),
        pytest.param(entry(6, shares=[(1, ME, 1, 3, 5)]), id="another expert"),
        pytest.param(entry(6, layer=1, shares=[(0, ME, 1, 3, 5)]), id="another layer"),
        pytest.param(entry(6, shares=[(0, ME, 1, 3, 6)]), id="copied by this entry, which copies nothing"),
        pytest.param(entry(6, shares=[(0, ME, 1, 3, 5)], copies=[(7, ME, 1)]), id="overwritten by this entry"),
        pytest.param(entry(6, shares=[(0, ME, 1, 3, 5)], copies=[(0, ME, 1)]), id="filled anew by this entry"),
        pytest.param(entry(6, shares=[(0, ME, SLOTS, 3, 5)]), id="no such slot"),
        pytest.param(entry(6, shares=[(EXPERTS, ME, 1, 3, 5)]), id="no such expert"),
        pytest.param(entry(6, shares=[(0, WORKERS, 1, 3, 5)]), id="no such worker"),
        pytest.param(entry(6, shares=[(0, ME, 1, -3, 5)]), id="negative count"),
        pytest.param(entry(6, shares=[(2, ME, 1, 3, 5)]), id="own primary as a replica"),
        pytest.param(entry(6, layer=LAYERS, shares=[(0, ME, 1, 3, 5)]), id="no such layer"),
        pytest.param(entry(6, copies=[(0, ME, SLOTS)]), id="copy into no such slot"),
        pytest.param(entry(6, copies=[(2, ME, 0)]), id="copy of an own primary"),
        pytest.param(entry(6, copies=[(2, 1, 0), (0, 0, 0)]), id="copy of another worker's own primary"),
        pytest.param(entry(6, copies=[(EXPERTS, ME, 0)]), id="copy of no such expert"),
        pytest.param(entry(6, copies=[(0, WORKERS, 0)]), id="copy to no such worker"),
        pytest.param(entry(6, copies=[(0, ME, 0), (7, ME, 0)]), id="two copies into one slot"),
        pytest.param(entry(6, layer=LAYERS, copies=[(0, ME, 0)]), id="copy into no such layer"),
        pytest.param(entry(6, shares=[(5, 0, 0, 1, 2), (4, 0, 1, 1, 2)]), id="shares out of order"),
        pytest.param(entry(6, shares=[(5, 0, 0, 1, 2), (5, 0, 1, 1, 2)]), id="two replicas of one expert on a worker"),
        pytest.param(entry(6, shares=[(4, 0, 0, 1, 2), (5, 0, 0, 1, 2)]), id="two experts in one slot"),
    ],
)
def test_what_disagrees_is_refused_and_changes_nothing(bad: PlanEntry) -> None:
    slots = table()
    accept(slots, entry(5, copies=[(0, ME, 1)]))
    assert slots.judge(bad) is Verdict.BINDING_DISAGREES
    assert slots.state(0, 1) == (0, 5, SlotState.HELD)
    assert slots.state(0, 0) == (EMPTY, EMPTY, SlotState.EMPTY)
    assert [held.generation for held in slots.take_startable()] == [5]


def test_bindings_of_other_workers_are_theirs_to_judge() -> None:
    assert table().judge(entry(6, shares=[(0, 2, 0, 3, 1)], copies=[(2, 3, 1)])) is Verdict.ACCEPTED


def test_only_bindings_need_agreement() -> None:
    slots = table()
    assert not slots.needs_agreement(entry(0))
    assert not slots.needs_agreement(entry(1, kind=EntryKind.ABORT, cancels=0))
    assert slots.needs_agreement(entry(1, copies=[(0, 2, 0)]))
    assert slots.needs_agreement(entry(1, shares=[(0, 2, 0, 1, 0)]))


def test_a_copy_waits_for_every_earlier_target_of_its_slot() -> None:
    slots = table()
    accept(slots, entry(0, copies=[(0, ME, 0)], shares=[(0, ME, 0, 1, 0)]))
    assert [held.expert for held in slots.take_startable()] == [0]
    accept(slots, entry(1, shares=[(0, ME, 0, 1, 0)]), entry(2, copies=[(7, ME, 0)], shares=[(7, ME, 0, 1, 2)]))
    assert slots.take_startable() == []
    slots.let_go(1, enqueued=False)
    assert slots.take_startable() == [], "target 0 still holds the slot"
    assert slots.let_go(0, enqueued=True) == [(0, 0)]
    assert [held.expert for held in slots.take_startable()] == [7], "the copy's own target does not hold it back"


def test_copies_into_one_slot_start_in_order_and_none_is_left_out() -> None:
    slots = table()
    accept(slots, entry(0, copies=[(0, ME, 0)], start=CopyStart.ARRIVAL), entry(1, copies=[(7, ME, 0)]))
    assert slots.take_startable() == []
    assert slots.arrived(0)
    assert not slots.arrived(0)
    assert [held.expert for held in slots.take_startable()] == [0, 7]
    slots.landed(0, 0, 0)
    assert slots.state(0, 0) == (7, 1, SlotState.COPYING), "an older copy's landing says nothing of the newer"
    slots.landed(0, 0, 1)
    assert slots.state(0, 0) == (7, 1, SlotState.READY)


def test_report_is_complete_or_refused() -> None:
    slots = table()
    accept(slots, entry(0, copies=[(0, ME, 0)]), entry(1, layer=1, copies=[(7, ME, 1)], start=CopyStart.ARRIVAL))
    with pytest.raises(SlotError, match="2 copies are held"):
        slots.report()
    slots.arrived(1)
    slots.take_startable()
    slots.landed(0, 0, 0)
    assert [(r.layer, r.slot, r.expert, r.generation) for r in slots.report()] == [(0, 0, 0, 0)]


@pytest.mark.slow
@given(st.data())
def test_nothing_starts_over_a_use_and_everything_starts_in_the_end(data: st.DataObject) -> None:
    """Random plans of a scheduler that knows only its own projection; random progress of execution behind reading."""
    slots = table()
    bound: dict[int, tuple[int, int]] = {}
    uses: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    waiting: list[int] = []
    started: list[tuple[int, int]] = []
    foreign = [e for e in range(EXPERTS) if e not in (2, 3)]

    def start() -> None:
        for held in slots.take_startable():
            assert all(user >= held.generation for user in uses[held.slot]), (held, uses)
            started.append((held.slot, held.generation))

    asked = []
    for sequence in range(12):
        copies = {}
        for slot in range(SLOTS):
            if data.draw(st.booleans()):
                taken = {expert for other, (expert, _) in bound.items() if other != slot}
                copies[slot] = data.draw(st.sampled_from([e for e in foreign if e not in taken]))
                bound[slot] = (copies[slot], sequence)
                asked.append((slot, sequence))
        named = [slot for slot in bound if data.draw(st.booleans())]
        shares = sorted((bound[slot][0], ME, slot, 1, bound[slot][1]) for slot in named)
        start_at = data.draw(st.sampled_from(list(CopyStart)))
        plan = entry(sequence, copies=[(e, ME, s) for s, e in copies.items()], shares=shares, start=start_at)
        accept(slots, plan)
        for slot in named:
            uses[slot].append(sequence)
        waiting.append(sequence)
        start()
        while waiting and bool(data.draw(st.booleans())):
            now = waiting.pop(0)
            slots.arrived(now)
            start()
            slots.let_go(now, enqueued=data.draw(st.booleans()))
            for users in uses.values():
                if now in users:
                    users.remove(now)
            start()
    for now in waiting:
        slots.arrived(now)
        slots.let_go(now, enqueued=True)
        for users in uses.values():
            if now in users:
                users.remove(now)
        start()
    for slot in range(SLOTS):
        assert [g for s, g in started if s == slot] == [g for s, g in asked if s == slot]
