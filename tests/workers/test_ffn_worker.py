"""FFN workers when something is not as it should be: refused plans, aborts, wrong inputs, silent neighbours."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from afore.core.errors import DeadlineExceeded, WireError
from afore.core.plan import CopyStart, EntryKind, PlanEntry, Share
from afore.core.target import Target
from afore.testing import run_virtual, virtual_test
from afore.transport import bells
from afore.transport.feedback import FeedbackFlags, FeedbackRecord
from afore.workers.device.profile import LAPTOP_EMULATED
from afore.workers.slot_table import SlotState
from afore.workers.tagged import TaggedStore
from tests.workers.ffn_parts import Batch, Shape
from tests.workers.ffn_rig import Rig
from tests.workers.random_plans import RandomPlans
from tests.workers.storms import JITTER, emulated

SHAPE = Shape(attention=2, ffn=3, microbatches=2, slots=1, layers=2, experts=6, steps=1)
"""Worker w owns experts 2w and 2w + 1."""
SEEDS = range(6)


def batch(rig: Rig, step: int, *, microbatch: int = 0, popular: int = 0) -> Batch:
    return rig.batch(Target(0, microbatch, step), (2, 1), popular=popular)


async def finish(rig: Rig, *batches: Batch) -> None:
    """Writes all inputs and checks all replies."""
    for one in batches:
        for a in range(rig.shape.attention):
            await rig.write(one, a)
    for one in batches:
        for a in range(rig.shape.attention):
            await rig.check(one, a)


async def publish(rig: Rig, one: Batch, *shares: Share, copies: tuple[tuple[int, int, int], ...] = ()) -> PlanEntry:
    """Publishes a plan; shares of generation -1 name what this very entry copies."""
    own = tuple(replace(share, generation=rig.ring.sequence) if share.generation < 0 else share for share in shares)
    entry = rig.entry(one, own, copies)
    await rig.publish_entry(entry)
    return entry


def records(rig: Rig, entry: PlanEntry) -> list[FeedbackRecord]:
    return [record for record in rig.records if record.sequence == entry.sequence]


def replica_reads(stores: list[TaggedStore]) -> list[int]:
    return [store.check().replica_reads for store in stores]


async def quiet(rig: Rig) -> None:
    """Long enough for everything that can happen by itself."""
    await rig.clock.sleep_us(2_000)


# Refusals


@pytest.mark.slow
@virtual_test(seeds=SEEDS)
async def test_one_refusal_and_everyone_runs_primaries() -> None:
    async with emulated(SHAPE) as (rig, stores), rig.running():
        first, second, third, fourth = (batch(rig, step) for step in range(4))
        await publish(rig, first, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
        await finish(rig, first)
        assert replica_reads(stores) == [0, 1, 0]

        # Worker 1 does not agree that its slot holds expert 0 of generation 0: its table was damaged, say.
        rig.epochs[1].table._slots[0][0].generation = 77
        refused = await publish(rig, second, Share(0, 1, 0, 1, 0), Share(0, 2, 0, 1, -1), copies=((0, 2, 0), (4, 0, 0)))
        await finish(rig, second)
        assert replica_reads(stores) == [0, 1, 0]
        assert [epoch.reader.counts.refused for epoch in rig.epochs] == [1, 1, 1]
        assert [epoch.reader.counts.refused_here for epoch in rig.epochs] == [0, 1, 0]
        assert [epoch.table.state(0, 0)[2] for epoch in (rig.epochs[0], rig.epochs[2])] == [SlotState.EMPTY] * 2
        await quiet(rig)
        assert [record.flags for record in records(rig, refused)] == [FeedbackFlags.REFUSED] * 3

        # A later plan that names a binding of the refused entry is refused likewise, by whoever should hold it.
        void = await publish(rig, third, Share(0, 2, 0, 1, refused.sequence))
        await finish(rig, third)
        assert [epoch.reader.counts.refused_here for epoch in rig.epochs] == [0, 1, 1]
        assert rig.ring.verdicts(void.sequence).count(rig.ring.verdicts(void.sequence)[2]) == 1

        # The scheduler starts anew, and all is well.
        await publish(rig, fourth, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
        await finish(rig, fourth)
        assert replica_reads(stores) == [0, 2, 0]


@virtual_test(seeds=SEEDS)
async def test_a_damaged_plan_runs_on_primaries() -> None:
    async with emulated(SHAPE) as (rig, stores), rig.running():
        one = batch(rig, 0)
        entry = rig.entry(one, (Share(0, 1, 0, 1, 0),), [(0, 1, 0)])
        rig.ring.publish(entry)
        offset = rig.layouts.ring.entry_offset(0)
        body = offset + rig.ring.new_record().dtype.fields["shares"][1]  # type: ignore[index]  # a record type has fields
        rig.ring_region.buffer[body] ^= 1
        await rig.ring_plan(0)
        await finish(rig, one)
        assert [epoch.reader.counts.refused_here for epoch in rig.epochs] == [1, 1, 1]
        assert replica_reads(stores) == [0, 0, 0]


@virtual_test
async def test_an_entry_that_names_no_target_ends_the_worker() -> None:
    async with emulated(SHAPE) as (rig, _):
        rig.ring.publish(rig.entry(batch(rig, 0)))
        rig.ring_region.buffer[rig.layouts.ring.entry_offset(0) + 40] ^= 1

        async def serve() -> None:
            async with rig.running():
                await rig.ring_plan(0)
                await quiet(rig)

        with pytest.raises(WireError, match="ring entry 0 cannot be read"):
            await serve()


@virtual_test
async def test_a_bell_that_is_not_for_an_ffn_worker_is_refused() -> None:
    async with emulated(SHAPE) as (rig, _):

        async def serve() -> None:
            async with rig.running():
                link, key = rig.attention[1].doors[0]
                await link.write(key, 0, b"", notify=bells.REPLY(0, 1), timeout_us=1e6)
                await quiet(rig)

        with pytest.raises(WireError, match="peer attention-1: rang REPLY at an FFN worker"):
            await serve()


@virtual_test(seeds=SEEDS)
async def test_a_silent_neighbour_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = SHAPE.config(verdict_s=0.5)
    async with emulated(SHAPE, config=config) as (rig, _):

        async def serve() -> None:
            async with rig.running(silent=2):
                await publish(rig, batch(rig, 0), Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
                await rig.clock.sleep_us(1e6)

        caplog.clear()
        with pytest.raises(DeadlineExceeded, match=r"peer ffn-2: no verdict on plan 0 within 0\.5 s"):
            await serve()
    warned = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert set(warned) == {"ffn-2: no verdict on plan 0 for 0.1 s; after 0.5 s it counts as lost"}


@virtual_test(seeds=SEEDS)
async def test_plans_without_bindings_wait_for_nobody() -> None:
    async with emulated(SHAPE) as (rig, _), rig.running(silent=2):
        one = batch(rig, 0)
        entry = await publish(rig, one)
        for a in range(2):
            await rig.write(one, a)
        await quiet(rig)
        assert sorted(record.worker for record in records(rig, entry)) == [0, 1]


# Aborts


@virtual_test(seeds=SEEDS)
async def test_a_target_without_inputs_is_reported_aborted_and_passed() -> None:
    config = SHAPE.config(target_s=0.01)
    async with emulated(SHAPE, config=config) as (rig, stores), rig.running():
        lost, later = batch(rig, 0), batch(rig, 0, microbatch=1)
        entry = await publish(rig, lost, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
        await publish(rig, later, Share(0, 1, 0, 1, entry.sequence))
        await rig.write(lost, 0)
        for a in range(2):
            await rig.write(later, a)
        await rig.clock.sleep_us(9_000)
        assert records(rig, entry) == []
        await rig.clock.sleep_us(3_000)
        assert [record.flags for record in records(rig, entry)] == [FeedbackFlags.MISSING] * 3
        await rig.publish_entry(rig.entry(lost, kind=EntryKind.ABORT, cancels=entry.sequence))
        for a in range(2):
            await rig.check(later, a)
        await quiet(rig)
        passed = records(rig, entry)[3:]
        assert sorted(record.worker for record in passed) == [0, 1, 2]
        assert all(record.flags == FeedbackFlags.NONE and record.pairs == 0 for record in passed)
        assert [epoch.sequencer.counts.skipped for epoch in rig.epochs] == [1, 1, 1]
        # The copy landed all the same, and the later target used it.
        assert rig.epochs[1].table.state(0, 0) == (0, entry.sequence, SlotState.READY)
        assert replica_reads(stores) == [0, 1, 0]


@virtual_test(seeds=SEEDS)
async def test_late_inputs_run_without_an_abort() -> None:
    config = SHAPE.config(target_s=0.01)
    async with emulated(SHAPE, config=config) as (rig, _), rig.running():
        one = batch(rig, 0)
        entry = await publish(rig, one)
        await rig.clock.sleep_us(30_000)
        await finish(rig, one)
        await quiet(rig)
        flags = sorted(int(record.flags) for record in records(rig, entry))
        assert flags == [0, 0, 0, int(FeedbackFlags.MISSING)] + [int(FeedbackFlags.MISSING)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("collectives", [False, True])
@virtual_test(seeds=range(20))
async def test_an_abort_may_cross_the_inputs(collectives: bool) -> None:
    """Some workers run the target, some skip it; the microbatch comes again once all have passed it, and nothing is mixed up."""
    async with emulated(SHAPE, collectives=collectives) as (rig, _), rig.running():
        for step in range(0, 6, 2):
            first, again = batch(rig, step), batch(rig, step + 1)
            entry = await publish(rig, first, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
            abort = rig.entry(first, kind=EntryKind.ABORT, cancels=entry.sequence)
            doing = [rig.write(first, 0), rig.write(first, 1), rig.publish_entry(abort)]
            rig.random.shuffle(doing)
            for one in doing:
                await rig.clock.sleep_us(rig.random.random() * 3)
                await one
            async with asyncio.timeout(1):
                while len(records(rig, entry)) < 3:
                    await rig.clock.sleep_us(10)
            for side in rig.attention:
                side.guard.abandoned(first.target)
            await publish(rig, again, Share(0, 1, 0, 1, entry.sequence))
            await finish(rig, again)
        assert all(epoch.sequencer.counts.run + epoch.sequencer.counts.skipped == 6 for epoch in rig.epochs)


# Inputs that are not what was planned for


@virtual_test(seeds=SEEDS)
async def test_inputs_of_another_demand_run_on_primaries() -> None:
    async with emulated(SHAPE) as (rig, stores), rig.running():
        one, other = batch(rig, 0), batch(rig, 0, popular=5)
        assert not np.array_equal(one.demand_E, other.demand_E)
        entry = await publish(rig, one, Share(0, 1, 0, 2, -1), copies=((0, 1, 0),))
        await finish(rig, other)
        await quiet(rig)
        assert [record.flags for record in records(rig, entry)] == [FeedbackFlags.PRIMARIES] * 3
        assert [epoch.sequencer.counts.mismatched for epoch in rig.epochs] == [1, 1, 1]
        assert replica_reads(stores) == [0, 0, 0]
        assert rig.epochs[1].table.state(0, 0)[2] is SlotState.READY


# When copies start


@virtual_test(seeds=SEEDS)
async def test_copies_of_start_arrival_begin_after_the_target_ahead() -> None:
    async with emulated(SHAPE) as (rig, _), rig.running():
        rig.spans(1)
        first, second = batch(rig, 0), batch(rig, 0, microbatch=1)
        await publish(rig, first)
        own = (Share(0, 1, 0, 1, rig.ring.sequence),)
        entry = rig.entry(second, own, [(0, 1, 0)], CopyStart.ARRIVAL)
        await rig.publish_entry(entry)
        await quiet(rig)
        assert rig.epochs[1].table.state(0, 0)[2] is SlotState.HELD, "its target has not come"
        await finish(rig, first, second)
        await quiet(rig)
        spans = rig.spans(1)
        (copy,) = [span for span in spans if span.name == "copy"]
        ahead = [span for span in spans if span.name == "reduce" and span.target == first.target]
        assert copy.target == second.target
        assert copy.start_ns >= ahead[0].end_ns


@virtual_test(seeds=SEEDS)
async def test_copies_ahead_of_any_target_land() -> None:
    async with emulated(SHAPE) as (rig, stores), rig.running():
        one = batch(rig, 0)
        ahead = rig.publisher.copies(one.target, 0, [(0, 1, 0)])
        assert ahead.kind is EntryKind.COPIES
        await rig.ring_plan(ahead.sequence)
        await quiet(rig)
        assert rig.epochs[1].table.state(0, 0) == (0, ahead.sequence, SlotState.READY)
        await publish(rig, one, Share(0, 1, 0, 1, ahead.sequence))
        await finish(rig, one)
        assert replica_reads(stores) == [0, 1, 0]


@virtual_test(seeds=SEEDS)
async def test_a_copy_that_takes_for_ever_is_told_of_and_still_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    slow = replace(LAPTOP_EMULATED, copy_latency_us=55_000.0)
    async with emulated(SHAPE, config=SHAPE.config(target_s=0.01), profile=slow) as (rig, stores), rig.running():
        one = batch(rig, 0)
        await publish(rig, one, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
        await finish(rig, one)
        assert rig.epochs[1].migrator.counts.overdue == 5
        assert "ffn-1: 1 copies submitted for l0/m0/s0 have not landed after 0.01" in caplog.text
        assert replica_reads(stores) == [0, 1, 0]


# Groups


@virtual_test(seeds=SEEDS)
async def test_collectives_begin_together() -> None:
    async with emulated(SHAPE, jitter=JITTER, collectives=True) as (rig, _), rig.running():
        rig.spans(0), rig.spans(1), rig.spans(2)
        batches = [batch(rig, 0), batch(rig, 0, microbatch=1)]
        for one in batches:
            await publish(rig, one)
        await finish(rig, *batches)
        await quiet(rig)
        spans = [rig.spans(rank) for rank in range(3)]
        for one in batches:
            computed_N, reduced_N = [], []
            for worker in spans:
                mine = {span.name: span for span in worker if span.target == one.target}
                computed_N.append(mine["experts"].end_ns)
                reduced_N.append(mine["reduce"].end_ns)
            assert len(set(computed_N)) > 1, "they do not compute equally long"
            assert min(reduced_N) > max(computed_N), "nobody reduces before all have computed"


# What is recorded


@virtual_test(seeds=SEEDS)
async def test_spans_tell_a_target_s_life_and_what_ties_it_together() -> None:
    async with emulated(SHAPE) as (rig, _), rig.running():
        rig.spans(1)
        one = batch(rig, 0)
        entry = await publish(rig, one, Share(0, 1, 0, 1, -1), copies=((0, 1, 0),))
        await finish(rig, one)
        await quiet(rig)
        spans = {span.name: span for span in rig.spans(1)}
        assert sorted(spans) == sorted(
            ["read", "submit", "copy", "ready", "gather", "wait", "partition", "experts", "reduce", "reply"]
        )
        assert all(span.target == one.target and span.args["sequence"] == entry.sequence for span in spans.values())
        assert {key: spans["copy"].args[key] for key in ("layer", "slot", "generation", "expert")} == {
            "layer": 0,
            "slot": 0,
            "generation": entry.sequence,
            "expert": 0,
        }
        assert spans["wait"].args["generations"] == [entry.sequence]
        order = ["gather", "wait", "partition", "experts", "reduce"]
        assert all(spans[a].end_ns == spans[b].start_ns for a, b in pairwise(order))
        (record,) = [record for record in records(rig, entry) if record.worker == 1]
        reached_ns, landed_ns = spans["wait"].start_ns, spans["copy"].end_ns
        submitted_ns = spans["copy"].args["submitted_ns"]
        assert record.window_us == (reached_ns - submitted_ns) / 1e3
        assert record.copy_us == (landed_ns - spans["copy"].start_ns) / 1e3
        assert record.slack_us == (reached_ns - landed_ns) / 1e3
        assert record.exposed_us == max(0, landed_ns - reached_ns) / 1e3 == (spans["wait"].end_ns - reached_ns) / 1e3
        own = one.demand_E[2:4]
        assert (record.copies, record.replica_pairs) == (1, 1)
        assert record.pairs == own.sum() + 1
        assert record.tiles == np.count_nonzero(own) + 1, "fewer than M_tile pairs of each"


def test_runs_are_the_same_twice() -> None:
    async def run() -> list[FeedbackRecord]:
        async with emulated(replace(SHAPE, steps=3), 5, jitter=JITTER) as (rig, _):
            rig.jitter_us = 50.0
            await rig.serve(RandomPlans(rig.shape, 5))
            return rig.records

    assert run_virtual(run, seed=3) == run_virtual(run, seed=3) != []
