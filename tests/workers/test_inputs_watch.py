"""Which inputs have come is told once for each attention worker and target, however often its bell rings."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given
from hypothesis import strategies as st

from afore.core.target import Target
from afore.testing import run_virtual
from afore.workers.inputs_watch import InputsWatch


@given(
    st.lists(st.tuples(st.sampled_from(["write", "ring", "look"]), st.integers(0, 1), st.integers(0, 1)), max_size=40)
)
def test_a_bell_that_is_looked_at_late_counts_no_target_twice(events: list[tuple[str, int, int]]) -> None:
    slots: dict[tuple[int, int], Target] = {}
    told: list[tuple[int, Target]] = []
    rung: set[tuple[int, Target]] = set()

    async def main() -> None:
        looked: list[int] = []

        def arrived(attention: int, microbatch: int) -> Target | None:
            looked.append(attention)
            return slots.get((attention, microbatch))

        async def report(target: Target) -> None:
            told.append((looked[-1], target))

        watch = InputsWatch(arrived, report)
        running = asyncio.create_task(watch.run())
        for step, (event, attention, microbatch) in enumerate(events):
            if event == "write":
                slots[attention, microbatch] = Target(0, microbatch, step)
            if event in ("write", "ring"):
                watch.rang(attention, microbatch)
            else:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                rung.update((a, target) for (a, _), target in slots.items())
        await asyncio.sleep(1e-3)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    run_virtual(main)
    assert len(set(told)) == len(told)
    assert rung <= set(told)
    assert set(told) >= {(a, target) for (a, _), target in slots.items()}
