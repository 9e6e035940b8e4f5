"""The compiled call leaves the same bytes, statistics and state behind as the plain way, whatever happens in between."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core import control
from afore.core.demand import demand_crc
from afore.core.plan import EntryKind, PlanEntry
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.core.trace import Span
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.testing import run_virtual
from afore.transport.entry_core import crc32_words
from tests.scheduler.hot_rig import LAYERS, RING_SLOTS, Shape, Side, record_of
from tests.scheduler.plan_cases import speeds


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_the_compiled_checksum_is_zlibs(words: list[int], start: int, count: int, before: int) -> None:
    array = np.array(words, np.uint32)
    start = min(start, len(words))
    count = min(count, len(words) - start)
    assert crc32_words(array, start, count, before) == zlib.crc32(array[start : start + count].tobytes(), before)


def random_shape(rng: np.random.Generator) -> Shape:
    N, E = int(rng.choice([1, 2, 3, 5])), int(rng.integers(1, 13))
    slots = rng.integers(0, 4, N) if rng.random() < 0.3 else int(rng.integers(0, 4))
    config = PlannerConfig(
        num_experts=E,
        num_workers=N,
        slots_per_worker=slots,
        tile_tokens=int(rng.choice([1, 3, 8])),
        copy_budget=None if rng.random() < 0.7 else int(rng.integers(0, 4)),
        compactness_share=float(rng.choice([0.0, 0.0, 0.3])),
        worker_speed=speeds(rng, N),
    )
    primaries_E = contiguous_primaries(E, N) if rng.random() < 0.5 else rng.integers(0, N, E).astype(np.int32)
    return Shape(
        config=config,
        primaries_E=primaries_E,
        attention=int(rng.integers(1, 4)),
        microbatches=int(rng.integers(1, 4)),
        policy=str(rng.choice(["afore", "afore-no-overlap", "afore-plus"])),
        costs=Costs(
            tile_us=20.0, copy_us=float(rng.choice([0.0, 1.0, 35.0])), window_us=float(rng.choice([0.0, 50.0]))
        ),
        adapt=bool(rng.random() < 0.5),
    )


class Story:
    """Random events, the same for both sides."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = random_shape(self.rng)
        self.sides = [Side(self.shape, hot=hot) for hot in (True, False)]
        self.steps_M = [0] * self.shape.microbatches
        self.tokens_M: list[tuple[int, ...]] = [()] * self.shape.microbatches
        self.layers_M = [LAYERS] * self.shape.microbatches
        self.entries: list[PlanEntry] = []
        self.unread = 0
        self.refusals = self.aborts = 0
        self.planned: list[Span] = []

    def demand(self, magnitude: int = 40) -> np.ndarray:
        E = self.shape.config.num_experts
        return (self.rng.integers(0, magnitude, E) * (self.rng.random(E) < 0.6)).astype(np.int32)

    async def announce(self, m: int) -> None:
        tokens_A = tuple(int(t) for t in self.rng.integers(0, 3, self.shape.attention))
        if not any(tokens_A):
            tokens_A = (1, *tokens_A[1:])
        self.tokens_M[m], self.layers_M[m] = tokens_A, 0
        self.steps_M[m] += 1
        for side in self.sides:
            await side.planning.announced(control.Announce(m, self.steps_M[m], tokens_A))

    async def vectors(self, m: int) -> None:
        """All vectors of the microbatch's next layer, in any order, with bells that come late or for two at once."""
        rng = self.rng
        target = Target(self.layers_M[m], m, self.steps_M[m])
        senders = [a for a, tokens in enumerate(self.tokens_M[m]) if tokens]
        huge = rng.random() < 0.04
        for a in rng.permutation(senders).tolist():
            demand_E = self.demand(2**31 - 1 if huge else 40)
            spoiled, where = rng.random(), int(rng.integers(1000))
            for side in self.sides:
                if spoiled < 0.1:
                    side.write_vector(a, target, demand_E, torn=where)
                elif spoiled < 0.15:
                    side.write_vector(a, target, demand_E, epoch=9)
                elif spoiled < 0.2:
                    side.write_vector(a, Target(target.layer, m, target.step + 1), demand_E)
            if spoiled < 0.2:
                await self.bell(m)
            for side in self.sides:
                side.write_vector(a, target, demand_E)
            if rng.random() < 0.7:
                await self.bell(m)
        await self.bell(m)
        self.layers_M[m] += 1
        self.unread += 1

    async def bell(self, m: int) -> None:
        await asyncio.sleep(1e-6)
        for side in self.sides:
            await side.planning.demand_arrived([m])

    async def read(self) -> None:
        refused = bool(self.rng.random() < 0.15)
        left, right = (side.read(refused) for side in self.sides)
        assert left == right
        self.refusals += refused and bool(left)
        self.entries += left
        self.unread = 0
        for entry in left:
            if entry.kind is not EntryKind.PLAN:
                continue
            missing = bool(self.rng.random() < 0.08)
            for worker in range(self.shape.config.num_workers):
                record = record_of(entry, worker, self.rng, missing=missing)
                for side in self.sides:
                    side.write_record(worker, record)
            if missing:
                self.aborts += 1
                self.layers_M[entry.target.microbatch] = LAYERS
                for side in self.sides:
                    await side.planning.feedback_arrived()
                self.unread += 1

    async def tell(self, events: int) -> None:
        for _ in range(events):
            if self.unread >= RING_SLOTS - 2 or self.rng.random() < 0.3:
                await self.read()
            for side in self.sides:
                side.watched = bool(len(self.entries) % 3 == 0)
            m = int(self.rng.integers(self.shape.microbatches))
            if self.layers_M[m] == LAYERS:
                await self.announce(m)
                self.compare_rings()
            else:
                await self.vectors(m)
                await self.compare()

    def compare_rings(self) -> None:
        hot, plain = self.sides
        assert hot.ring_memory.tobytes() == plain.ring_memory.tobytes()
        assert hot.rung == plain.rung
        assert hot.reports == plain.reports

    async def compare(self) -> None:
        """After a target: refusals, which the compiled way may hear with an earlier bell, have been heard by both."""
        self.compare_rings()
        hot, plain = self.sides
        assert await hot.statistics() == await plain.statistics()
        traced = hot.moments()
        assert traced == plain.moments()
        self.planned += [moment for moment in traced if moment.name == "planned"]
        for ours, theirs in zip(hot.policy._planners, plain.policy._planners, strict=True):  # type: ignore[attr-defined]
            assert np.array_equal(ours.buffer, theirs.buffer)


def check_planned(moment: Span, story: Story) -> bool:
    """Whether a vector was accepted before its target's last one; times are in order, the demand is the one that was written."""
    args = moment.args
    times = [at_ns for at_ns in args["accepted_ns"] if at_ns]
    assert moment.target is not None
    assert 0 < min(times) <= max(times) <= args["began_ns"] <= moment.end_ns
    entry = next(entry for entry in story.entries if entry.sequence == args["sequence"])
    assert len(times) == sum(tokens > 0 for tokens in entry.tokens_A)
    assert demand_crc(np.array(args["demand"], np.int32)) == entry.demand_crc
    waited: bool = min(times) < max(times)
    return waited


def test_stories_reach_what_they_are_for() -> None:
    async def tell() -> None:
        copies = shares = refusals = aborts = hot = waited = searches = 0
        for seed in range(12):
            story = Story(seed)
            await story.tell(12)
            await story.read()
            copies += sum(len(entry.copies) for entry in story.entries)
            shares += sum(len(entry.shares) for entry in story.entries)
            refusals += story.refusals
            aborts += story.aborts
            hot += story.sides[0].hot is not None
            searches += story.shape.policy == "afore-plus" and story.sides[0].hot is not None
            assert story.sides[1].hot is None
            for moment in story.planned:
                waited += check_planned(moment, story)
        assert min(copies, shares) > 20
        assert min(refusals, aborts) > 2
        assert hot > 6
        assert waited > 6
        assert searches > 2

    run_virtual(tell())


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_the_compiled_call_equals_the_plain_way(seed: int) -> None:
    async def tell() -> None:
        await Story(seed).tell(16)

    run_virtual(tell())
