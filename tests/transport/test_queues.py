"""Where coroutines wait: under every interleaving nothing is lost, nobody overtakes, and every wait ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from afore.core.errors import DeadlineExceeded, PeerLost, RegionRevoked
from afore.testing import run_virtual, virtual_now_ns, virtual_test
from afore.transport.api import Notification
from afore.transport.queues import Arrivals, Inbox, Turnstile

SEEDS = range(60)


class Account:
    """Counts the credit that is given back."""

    def __init__(self) -> None:
        self.credit = 0

    def give_back(self, count: int) -> None:
        self.credit += count


@virtual_test(seeds=SEEDS)
async def test_every_item_is_read_once_in_order_whoever_is_cancelled() -> None:
    draw = random.Random(3)
    arrivals: Arrivals[int] = Arrivals("p", "item")
    read: list[int] = []

    async def reader() -> None:
        while True:
            await arrivals.ready(draw.choice([None, 3.0, 50.0]))
            read.append(arrivals.items.popleft())
            arrivals.wake()

    async def persistent() -> None:
        while True:
            try:
                await reader()
            except DeadlineExceeded:
                continue

    readers = [asyncio.create_task(persistent()) for _ in range(4)]
    for number in range(200):
        arrivals.items.append(number)
        arrivals.wake()
        if draw.random() < 0.3:
            victim = draw.randrange(4)
            readers[victim].cancel()
            readers[victim] = asyncio.create_task(persistent())
        if draw.random() < 0.5:
            await asyncio.sleep(draw.choice([0, 1e-6, 1e-5]))
    await asyncio.sleep(1e-3)
    assert read == list(range(200))
    arrivals.end(lambda: PeerLost("p", "gone"))
    for task in readers:
        with pytest.raises(PeerLost):
            await task


@virtual_test
async def test_a_deadline_is_exact_and_an_ending_comes_after_what_arrived() -> None:
    arrivals: Arrivals[int] = Arrivals("p", "item")
    with pytest.raises(DeadlineExceeded, match=r"p: item: nothing came within 0\.25 s"):
        await arrivals.ready(250_000)
    assert virtual_now_ns() == 250_000_000
    arrivals.items.append(1)
    arrivals.end(lambda: PeerLost("p", "first"))
    arrivals.end(lambda: PeerLost("p", "second"))
    await arrivals.ready(0)
    assert arrivals.items.popleft() == 1
    for _ in range(2):
        with pytest.raises(PeerLost, match="first"):
            await arrivals.ready(None)


@virtual_test(seeds=SEEDS)
async def test_what_is_taken_from_an_inbox_is_given_back_to_its_sender() -> None:
    draw = random.Random(5)
    inbox = Inbox("owner", "r")
    senders = [Account() for _ in range(3)]
    sent = [0, 0, 0]
    taken: list[Notification] = []

    async def read() -> None:
        while True:
            taken.extend(await inbox.take(None))

    reader = asyncio.create_task(read())
    for number in range(150):
        sender = draw.randrange(3)
        inbox.put(Notification(str(sender), number), senders[sender])
        sent[sender] += 1
        if draw.random() < 0.4:
            inbox.wake()
            await asyncio.sleep(0)
    if draw.random() < 0.5:
        inbox.wake()
        await asyncio.sleep(1e-6)
        assert [told.immediate for told in taken] == list(range(150))
    inbox.revoke("r", "owner", "was closed")
    assert [sender.credit for sender in senders] == sent
    with pytest.raises(RegionRevoked, match="was closed"):
        await reader


class Room:
    """Something with a number of free places."""

    def __init__(self, free: int) -> None:
        self.free = free

    def has_room(self) -> bool:
        return self.free > 0


@virtual_test(seeds=SEEDS)
async def test_senders_pass_in_the_order_they_came_whatever_happens_to_the_others() -> None:
    draw = random.Random(9)
    turnstile, room = Turnstile(), Room(1)
    passed: list[int] = []
    failed: list[int] = []
    arrived = [asyncio.Event() for _ in range(80)]

    async def send(number: int) -> None:
        arrived[number].set()
        try:
            if turnstile or not room.has_room():
                await turnstile.enter(
                    room.has_room, draw.choice([20.0, 1e6]), peer="p", what=f"send {number}", hint="wait"
                )
        except DeadlineExceeded:
            failed.append(number)
            return
        room.free -= 1
        passed.append(number)
        assert room.free >= 0

    tasks = []
    for number in range(80):
        tasks.append(asyncio.create_task(send(number)))
        # Each has passed or lined up before the next comes, also where a seed shuffles what is ready.
        await arrived[number].wait()
        if draw.random() < 0.1:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            room.free += draw.randrange(1, 3)
            turnstile.poke()
        if draw.random() < 0.2:
            await asyncio.sleep(1e-5)
    room.free += 100
    turnstile.poke()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == sorted(passed)
    cancelled = [number for number, result in enumerate(results) if isinstance(result, asyncio.CancelledError)]
    assert sorted(passed + failed + cancelled) == list(range(80))
    assert not turnstile


def test_an_error_of_has_room_ends_each_wait() -> None:
    async def main() -> None:
        turnstile = Turnstile()
        lost = False

        def has_room() -> bool:
            if lost:
                raise PeerLost("p", "gone")
            return False

        waits = [asyncio.create_task(turnstile.enter(has_room, 1e9, peer="p", what="send", hint="")) for _ in range(5)]
        await asyncio.sleep(0)
        lost = True
        turnstile.poke()
        for wait in waits:
            with pytest.raises(PeerLost):
                await wait
        assert virtual_now_ns() == 0

    run_virtual(main)
