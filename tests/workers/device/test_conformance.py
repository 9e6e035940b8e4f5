"""What every device promises (``workers/device/base.py``)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

from afore.core.errors import DeadlineExceeded, DeviceClosed, DeviceError, WireError
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.core.target import Target
from afore.workers.device.base import Event, Pairs, Work
from afore.workers.experts import ExpertRow, ExpertStore, PeerStore
from afore.workers.kernels import grouped_mlp_reference
from afore.workers.store_shape import StoreShape
from tests.workers.device.rig import EVERY_KIND, PATIENCE_US, WORK, Rig, come, on_device

SHORT_US = 2_000.0
"""For what must not come."""

Scenario = Callable[[Rig], Coroutine[Any, Any, None]]


def every_device(scenario: Scenario) -> Callable[[str], None]:
    """Makes a scenario a test of every kind of device, in the loop that belongs to it."""

    @pytest.mark.parametrize("kind", EVERY_KIND)
    def test(kind: str) -> None:
        on_device(kind, scenario)

    test.__doc__ = scenario.__doc__
    return test


async def _stays_away(event: Event) -> None:
    with pytest.raises(DeadlineExceeded, match="did not reach an event within"):
        await event.wait(timeout_us=SHORT_US)
    assert not event.done


# Order


@every_device
async def test_order_within_a_stream(rig: Rig) -> None:
    events = []
    for number in range(30):
        rig.note(rig.model, str(number))
        if number % 3 == 0:
            events.append(rig.model.record())
        if number % 10 == 9:
            rig.model.flush()
    await come(events[-1])
    last = rig.model.record()
    rig.model.flush()
    await come(last)
    assert rig.log == [str(number) for number in range(30)]
    stamps = [event.completed_ns for event in (*events, last)]
    assert stamps == sorted(stamps)
    assert all(event.done for event in events)


@every_device
async def test_nothing_runs_before_flush(rig: Rig) -> None:
    rig.note(rig.model, "a")
    event = rig.model.record()
    await _stays_away(event)
    assert rig.log == []
    rig.model.flush()
    await come(event)
    assert rig.log == ["a"]


@every_device
async def test_an_event_of_an_idle_stream_comes(rig: Rig) -> None:
    first = rig.migration.record()
    rig.migration.flush()
    await come(first, first)
    assert first.done


@every_device
async def test_a_stream_waits_for_the_other(rig: Rig) -> None:
    for ahead, behind in ((rig.model, rig.migration), (rig.migration, rig.model)):
        rig.log.clear()
        rig.note(ahead, "ahead")
        event = ahead.record()
        rig.note(behind, "before")
        reached = behind.record()
        behind.wait(event)
        rig.note(behind, "after")
        last = behind.record()
        behind.flush()
        await come(reached)
        await _stays_away(last)
        assert rig.log == ["before"]
        ahead.flush()
        await come(last)
        assert rig.log == ["before", "ahead", "after"]
        assert reached.completed_ns <= event.completed_ns <= last.completed_ns


@every_device
async def test_streams_do_not_hold_each_other_up(rig: Rig) -> None:
    held = rig.migration.record()  # never flushed
    rig.model.wait(held)
    rig.note(rig.model, "held")
    rig.model.flush()
    other_event = rig.other.model_stream.record()
    rig.other.model_stream.flush()
    await come(other_event)
    assert rig.log == []


@every_device
async def test_waiting_for_oneself_is_no_wait(rig: Rig) -> None:
    rig.note(rig.model, "a")
    rig.model.wait(rig.model.record())
    rig.note(rig.model, "b")
    last = rig.model.record()
    rig.model.flush()
    await come(last)
    assert rig.log == ["a", "b"]


@every_device
async def test_a_slot_is_reused_safely(rig: Rig) -> None:
    """Compute uses a row, the copy waits for that use, the next compute waits for the copy; the host awaits only the end."""
    row_D = np.zeros(4096)
    sums: list[float] = []
    use: Event | None = None
    copied: list[Event] = []
    used: list[Event] = []
    for content in range(1, 41):
        if use is not None:
            rig.migration.wait(use)

        def fill(content: int = content) -> None:
            row_D.fill(content)

        rig.copy(rig.migration, fill)
        copied.append(rig.migration.record())
        rig.migration.flush()
        rig.model.wait(copied[-1])
        rig.model.run(WORK, lambda: sums.append(float(row_D.sum())))
        use = rig.model.record()
        used.append(use)
        rig.model.flush()
    await come(used[-1])
    assert sums == [content * 4096.0 for content in range(1, 41)]
    stamps = [event.completed_ns for pair in zip(copied, used, strict=True) for event in pair]
    assert stamps == sorted(stamps)


@every_device
async def test_any_program_keeps_its_order(rig: Rig) -> None:
    """Random programs over both streams: whatever had to run before a closure did, whenever streams were flushed."""
    for seed in range(25):
        generator = random.Random(seed)
        rig.log.clear()
        streams = (rig.model, rig.migration)
        behind: list[set[str]] = [set(), set()]  # what a stream's next closure must come after
        events: list[tuple[Event, set[str]]] = []
        must: dict[str, set[str]] = {}
        for step in range(40):
            which = generator.randrange(2)
            stream = streams[which]
            match generator.choice("rrrcewwf"):
                case "r" | "c" as what:
                    name = f"{which}:{step}"
                    must[name] = set(behind[which])
                    behind[which].add(name)
                    if what == "r":
                        rig.note(stream, name)
                    else:
                        rig.copy(stream, partial(rig.log.append, name))
                case "e":
                    events.append((stream.record(), set(behind[which])))
                case "w":
                    if events:
                        event, names = generator.choice(events)
                        stream.wait(event)
                        behind[which] |= names
                case _:
                    stream.flush()
        ends = [stream.record() for stream in streams]
        for stream in generator.sample(streams, 2):
            stream.flush()
        await come(*ends, *(event for event, _ in events))
        assert sorted(rig.log) == sorted(must)
        place = {name: index for index, name in enumerate(rig.log)}
        for name, names in must.items():
            assert all(place[before] < place[name] for before in names)


# Awaiting


@every_device
async def test_many_await_one_event(rig: Rig) -> None:
    event = rig.model.record()
    waiters = [asyncio.ensure_future(event.wait(timeout_us=PATIENCE_US)) for _ in range(5)]
    await asyncio.sleep(0)
    waiters[2].cancel()
    rig.model.flush()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 2 + [asyncio.CancelledError] + [type(None)] * 2


@every_device
async def test_a_deadline_leaves_the_event_usable(rig: Rig) -> None:
    rig.note(rig.model, "a")
    event = rig.model.record()
    await _stays_away(event)
    with pytest.raises(DeadlineExceeded, match="flush"):
        await event.wait(timeout_us=0)
    rig.model.flush()
    await come(event)


# Mistakes and failures


@every_device
async def test_a_foreign_event_is_refused(rig: Rig) -> None:
    foreign = rig.other.model_stream.record()
    strange: Any = object()
    for event in (foreign, strange):
        with pytest.raises(ValueError, match="was not recorded on this device"):
            rig.model.wait(event)


TARGET = Target(layer=1, microbatch=0, step=7)


@every_device
async def test_a_failure_is_the_error_of_everything_behind_it(rig: Rig) -> None:
    def fail() -> None:
        raise WireError("attention", "names expert 999")

    before = rig.model.record()
    rig.model.run(Work("partition", TARGET), fail)
    rig.note(rig.model, "dropped")
    after = rig.model.record()
    rig.model.flush()
    await come(before)
    for event in (after, after):
        with pytest.raises(DeviceError, match=r"partition of l1/m0/s7: WireError: .*names expert 999") as caught:
            await come(event)
        assert isinstance(caught.value.__cause__, WireError)
    assert after.done
    # The other stream goes on until it waits for what failed.
    rig.note(rig.migration, "goes on")
    fine = rig.migration.record()
    rig.migration.wait(after)
    rig.copy(rig.migration, lambda: rig.log.append("dropped too"))
    spoiled = rig.migration.record()
    rig.migration.flush()
    await come(fine)
    with pytest.raises(DeviceError, match="partition of l1/m0/s7"):
        await come(spoiled)
    # Later work as well, and forever.
    rig.note(rig.model, "dropped")
    later = rig.model.record()
    rig.model.flush()
    with pytest.raises(DeviceError, match="partition of l1/m0/s7"):
        await come(later)
    assert rig.log == ["goes on"]


@every_device
async def test_a_copy_that_fails_spoils_those_who_wait_for_it(rig: Rig) -> None:
    def fail() -> None:
        raise OSError

    rig.copy(rig.migration, fail)
    copied = rig.migration.record()
    rig.migration.flush()
    rig.note(rig.model, "independent")
    independent = rig.model.record()
    rig.model.wait(copied)
    rig.note(rig.model, "dependent")
    dependent = rig.model.record()
    rig.model.flush()
    await come(independent)
    for event in (copied, dependent):
        with pytest.raises(DeviceError, match=r"copy: OSError$"):
            await come(event)
    assert rig.log == ["independent"]


@every_device
async def test_close_in_the_middle(rig: Rig) -> None:
    rig.note(rig.model, "done")
    done = rig.model.record()
    rig.model.flush()
    await come(done)
    held = rig.migration.record()  # never flushed, so the model stream never gets past it
    rig.model.wait(held)
    rig.note(rig.model, "dropped")
    never = rig.model.record()
    rig.model.flush()
    waiter = asyncio.ensure_future(never.wait(timeout_us=PATIENCE_US))
    await asyncio.sleep(0)
    rig.device.close()
    rig.device.close()
    with pytest.raises(DeviceClosed, match="closed before it reached this point"):
        await waiter
    for event in (held, never):
        assert not event.done
        with pytest.raises(DeviceClosed):
            await come(event)
    await come(done)
    for stream in (rig.model, rig.migration):
        with pytest.raises(DeviceClosed, match="nothing can be enqueued after close"):
            stream.record()
    assert rig.log == ["done"]


@every_device
async def test_a_target_computes_what_it_should(rig: Rig) -> None:
    """Copy, wait, partition and experts, twice with the slot filled anew, against float64."""
    primaries_E = contiguous_primaries(4, 2)
    layouts = [StoreLayout(primaries_E, rank, 1) for rank in range(2)]
    shapes = [StoreShape.of(layout, num_layers=1, hidden_size=8, expert_size=4) for layout in layouts]
    buffers = [bytearray(shape.nbytes) for shape in shapes]
    stores = [ExpertStore(b, s, o, verify_copies=True) for b, s, o in zip(buffers, shapes, layouts, strict=True)]
    generator = np.random.default_rng(0)

    def read(_layer: int, _expert: int, row: ExpertRow) -> None:
        for part in row.parts:
            part[:] = generator.random(part.shape)

    for store in stores:
        store.load(read)
    peer = PeerStore(buffers[1], shapes[1], layouts[1])
    ids_TK = np.array([[0, 2], [2, 3], [2, 1], [3, 2]], dtype=np.int32)
    hidden_TD = generator.random((4, 8), dtype=np.float32)
    weights_TK = generator.random((4, 2), dtype=np.float32)
    out_TD = np.empty_like(hidden_TD)
    pairs = Pairs.empty(ids_TK.size, layouts[0].num_rows)
    gate_up_SFD, down_SDI = stores[0].gate_up[0], stores[0].down[0]
    kernels = rig.device.kernels
    use: Event | None = None
    for expert, count in ((2, 3), (3, 1)):
        shares_X4 = np.array([[expert, 0, 0, count]], dtype=np.int32)
        if use is not None:
            rig.migration.wait(use)
        _, do = stores[0].copy_closure(0, expert, 0, peer, generation=expert)
        rig.copy(rig.migration, do)
        copied = rig.migration.record()
        rig.migration.flush()
        rig.model.wait(copied)
        rig.model.run(
            Work("partition", None),
            partial(kernels.partition, ids_TK, shares_X4, layouts[0].row_E, 0, layouts[0].num_rows, 2, pairs),
        )
        rig.model.run(
            Work("experts", None),
            partial(kernels.grouped_mlp, hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD),
        )
        use = rig.model.record()
        rig.model.flush()
        await come(use)
        assert pairs.start_S1.tolist() == [0, 1, 2, 2 + count]
        assert stores[0].content(0, 0) == (expert, expert)
        expected_TD = grouped_mlp_reference(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI)
        np.testing.assert_allclose(out_TD, expected_TD, rtol=1e-5, atol=1e-6)
