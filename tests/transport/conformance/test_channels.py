"""Control channels: what is sent arrives once, in order, unchanged; every end and every wait is typed."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afore.core.errors import DeadlineExceeded, LinkClosed, PeerLost, WireError
from afore.transport.api import Channel, Lane, Link, RegionKey
from tests.transport.conformance.helpers import AT_ONCE_US, TIMEOUT_US, started
from tests.transport.conformance.worlds import MESSAGE_LIMIT, World

Message = dict[str, object]


async def channels(world: World, name: str = "hub") -> tuple[Channel, Channel]:
    """The two ends of a channel: the dialler's and the listener's."""
    listener, dialler = world.fabric("listener"), world.fabric("dialler")
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def handler(channel: Channel) -> None:
        accepted.set_result(channel)

    await listener.listen(world.channel_address(name), handler)
    near = await dialler.dial(world.channel_address(name), timeout_us=TIMEOUT_US)
    far = await accepted
    assert (near.peer, far.peer) == (world.channel_address(name), dialler.address)
    return near, far


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
numbers = itertools.count()
messages = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), values, max_size=8)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(batch=st.lists(messages, min_size=1, max_size=6))
async def test_messages_arrive_unchanged_and_in_order(world: World, batch: list[Message]) -> None:
    near, far = await channels(world, f"hub{next(numbers)}")
    for message in batch:
        await near.send(message, timeout_us=TIMEOUT_US)
        await far.send(message, timeout_us=TIMEOUT_US)
    for message in batch:
        assert await far.receive(timeout_us=TIMEOUT_US) == message
        assert await near.receive(timeout_us=TIMEOUT_US) == message
    await near.close()
    await far.close()


async def test_tuples_become_lists_and_special_floats_survive(world: World) -> None:
    near, far = await channels(world)
    await near.send({"t": (1, (2,)), "nan": math.nan, "inf": -math.inf}, timeout_us=TIMEOUT_US)
    got = await far.receive(timeout_us=TIMEOUT_US)
    assert (got["t"], got["inf"]) == ([1, [2]], -math.inf)
    assert math.isnan(got["nan"])  # type: ignore[arg-type]  # a float, or the test fails


@pytest.mark.parametrize(
    "message",
    [
        {"x": b"\0" * MESSAGE_LIMIT},
        {1: 2},
        {"x": {5: 1}},
        {"x": 2**64},
        {"x": object()},
        {"x": {1, 2}},
        {"x": "\ud800"},
        ["no", "map"],
        None,
    ],
    ids=["too long", "int key", "inner int key", "huge int", "object", "set", "surrogate", "list", "none"],
)  # fmt: skip
async def test_what_cannot_be_sent_is_refused_and_nothing_is_sent(world: World, message: Any) -> None:
    near, far = await channels(world)
    with pytest.raises(WireError):
        await near.send(message, timeout_us=TIMEOUT_US)
    await near.send({"next": 1}, timeout_us=TIMEOUT_US)
    assert await far.receive(timeout_us=TIMEOUT_US) == {"next": 1}


async def test_the_largest_message_passes(world: World) -> None:
    near, far = await channels(world)
    message: Message = {"x": b"\xa5" * (MESSAGE_LIMIT - 8)}
    with pytest.raises(WireError, match="limit"):
        await near.send({"x": b"\xa5" * (MESSAGE_LIMIT - 7)}, timeout_us=TIMEOUT_US)
    sending = asyncio.create_task(near.send(message, timeout_us=TIMEOUT_US))
    assert await far.receive(timeout_us=TIMEOUT_US) == message
    await sending


async def test_receiving_has_a_deadline(world: World) -> None:
    near, far = await channels(world)
    for timeout_us in (0.0, AT_ONCE_US):
        with pytest.raises(DeadlineExceeded):
            await far.receive(timeout_us=timeout_us)
    await near.send({"late": True}, timeout_us=TIMEOUT_US)
    assert await far.receive(timeout_us=TIMEOUT_US) == {"late": True}


async def test_cancelled_receives_lose_no_message(world: World) -> None:
    near, far = await channels(world)
    for number in range(40):
        wait = asyncio.create_task(far.receive(timeout_us=None))
        await started(wait)
        await near.send({"n": number, "pad": b"x" * (number * 1000)}, timeout_us=TIMEOUT_US)
        for _ in range(number % 5):
            await asyncio.sleep(0)
        wait.cancel()
        try:
            got = await wait
        except asyncio.CancelledError:
            got = await far.receive(timeout_us=TIMEOUT_US)
        assert got["n"] == number


async def test_several_receivers_share_the_messages(world: World) -> None:
    near, far = await channels(world)
    waits = [asyncio.create_task(far.receive(timeout_us=TIMEOUT_US)) for _ in range(4)]
    await started(*waits)
    waits[1].cancel()
    for number in range(3):
        await near.send({"n": number}, timeout_us=TIMEOUT_US)
    got = await asyncio.gather(*waits, return_exceptions=True)
    assert isinstance(got[1], asyncio.CancelledError)
    assert [message["n"] for message in got if isinstance(message, dict)] == [0, 1, 2]


async def test_a_sender_waits_for_a_reader_that_does_not_read(world: World) -> None:
    near, far = await channels(world)
    sent = 0

    async def push() -> None:
        nonlocal sent
        while sent < 1_000:
            await near.send({"n": sent, "pad": b"x" * 50_000}, timeout_us=50 * AT_ONCE_US)
            sent += 1

    with pytest.raises(DeadlineExceeded, match="does not read"):
        await push()
    for number in range(sent):
        assert (await far.receive(timeout_us=TIMEOUT_US))["n"] == number
    # What raised was not sent, and the channel goes on.
    await near.send({"n": "next"}, timeout_us=TIMEOUT_US)
    assert await far.receive(timeout_us=TIMEOUT_US) == {"n": "next"}


async def test_a_cancelled_send_leaves_the_channel_usable(world: World) -> None:
    near, far = await channels(world)
    finished = []

    async def send(number: int) -> None:
        await near.send({"n": number, "pad": b"x" * 100_000}, timeout_us=TIMEOUT_US)
        finished.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(40)]
    wait = asyncio.create_task(near.receive(timeout_us=None))
    await started(wait)
    for task in tasks[::2]:
        task.cancel()
    got: list[object] = []
    reader = asyncio.create_task(_collect(far, got))
    await asyncio.gather(*tasks, return_exceptions=True)
    await near.send({"n": "end"}, timeout_us=TIMEOUT_US)
    await reader
    assert got == [*finished, "end"]
    assert sorted(finished) == finished
    assert set(range(1, 40, 2)) <= set(finished)
    wait.cancel()


async def _collect(channel: Channel, got: list[object]) -> None:
    while "end" not in got:
        got.append((await channel.receive(timeout_us=TIMEOUT_US))["n"])


async def test_an_end_comes_after_what_was_sent(world: World) -> None:
    near, far = await channels(world)
    for number in range(10):
        await near.send({"n": number}, timeout_us=TIMEOUT_US)
    await near.close()
    await near.close()
    for number in range(10):
        assert await far.receive(timeout_us=TIMEOUT_US) == {"n": number}
    for _ in range(2):
        with pytest.raises(PeerLost):
            await far.receive(timeout_us=TIMEOUT_US)
        with pytest.raises(PeerLost):
            await far.send({"n": 1}, timeout_us=TIMEOUT_US)
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: near.send({"n": 1}, timeout_us=TIMEOUT_US),
        lambda: near.receive(timeout_us=TIMEOUT_US),
    ]
    for operation in operations:
        with pytest.raises(LinkClosed, match="closed on this side"):
            await operation()


async def test_closing_ends_waits_on_both_sides(world: World) -> None:
    near, far = await channels(world)
    own, other = (asyncio.create_task(end.receive(timeout_us=None)) for end in (near, far))
    await started(own, other)
    await near.close()
    with pytest.raises(LinkClosed):
        await own
    with pytest.raises(PeerLost):
        await other


async def test_dialling_nobody_is_peer_lost(world: World) -> None:
    dialler, closing = world.fabric("dialler"), world.fabric("closing")
    await closing.listen(world.channel_address("hub"), _never)
    await closing.close()
    for name in ("hub", "nobody"):
        with pytest.raises(PeerLost):
            await dialler.dial(world.channel_address(name), timeout_us=TIMEOUT_US)


async def _never(channel: Channel) -> None:
    pytest.fail("nobody should have come in")


async def test_a_handler_that_fails_closes_its_channel_and_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    listener, dialler = world.fabric("listener"), world.fabric("dialler")

    async def handler(channel: Channel) -> None:
        message = await channel.receive(timeout_us=None)
        if message["fail"]:
            raise RuntimeError("a defect in the handler")
        await channel.send(message, timeout_us=TIMEOUT_US)
        await channel.receive(timeout_us=None)

    await listener.listen(world.channel_address("hub"), handler)
    good, bad = [await dialler.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US) for _ in range(2)]
    await bad.send({"fail": True}, timeout_us=TIMEOUT_US)
    with pytest.raises(PeerLost):
        await bad.receive(timeout_us=TIMEOUT_US)
    assert "a defect in the handler" in caplog.text
    await good.send({"fail": False}, timeout_us=TIMEOUT_US)
    assert await good.receive(timeout_us=TIMEOUT_US) == {"fail": False}


async def test_closing_a_fabric_ends_its_handlers_and_channels(world: World) -> None:
    listener, dialler = world.fabric("listener"), world.fabric("dialler")
    ended: list[str] = []

    async def handler(channel: Channel) -> None:
        try:
            await channel.receive(timeout_us=None)
        except asyncio.CancelledError:
            ended.append(channel.peer)
            raise

    await listener.listen(world.channel_address("hub"), handler)
    near = [await dialler.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US) for _ in range(3)]
    waits = [asyncio.create_task(channel.receive(timeout_us=None)) for channel in near]
    await started(*waits)
    await listener.close()
    assert ended == [dialler.address] * 3
    for wait in waits:
        with pytest.raises(PeerLost):
            await wait


async def test_a_handler_may_close_its_own_fabric(world: World) -> None:
    listener, dialler = world.fabric("listener"), world.fabric("dialler")

    async def handler(channel: Channel) -> None:
        await channel.receive(timeout_us=None)
        await listener.close()

    await listener.listen(world.channel_address("hub"), handler)
    near = await dialler.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US)
    await near.send({"stop": True}, timeout_us=TIMEOUT_US)
    with pytest.raises(PeerLost):
        await near.receive(timeout_us=TIMEOUT_US)


async def test_an_endpoint_listens_at_its_own_address_too(world: World) -> None:
    listener, dialler = world.fabric("listener"), world.fabric("dialler")

    async def handler(channel: Channel) -> None:
        await channel.send({"to": channel.peer}, timeout_us=TIMEOUT_US)

    await listener.listen(listener.address, handler)
    near = await dialler.dial(listener.address, timeout_us=TIMEOUT_US)
    assert await near.receive(timeout_us=TIMEOUT_US) == {"to": dialler.address}


async def test_channels_and_links_do_not_hold_each_other_up(world: World) -> None:
    near, far = await channels(world)
    a, b = world.fabric("a"), world.fabric("b")
    region = b.register(8, label="r")
    link = await a.connect(b.address, Lane.DEMAND, timeout_us=TIMEOUT_US)
    flow = asyncio.create_task(_flow(link, region.key))
    for number in range(50):
        await near.send({"n": number}, timeout_us=TIMEOUT_US)
        assert await far.receive(timeout_us=TIMEOUT_US) == {"n": number}
        await asyncio.sleep(0)
    count = 0
    while count < 200:
        count += len(await region.notified(timeout_us=TIMEOUT_US))
    await flow


async def _flow(link: Link, key: RegionKey) -> None:
    for number in range(200):
        await link.write(key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
