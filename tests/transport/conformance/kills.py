"""Peers that are killed at every step of what they do, and a survivor that is counted afterwards.

    python -m tests.transport.conformance.kills --fabric tcp --count 200
    python -m tests.transport.conformance.kills --fabric verbs --api pyverbs    where there is an RDMA device

A victim is a process that meets the survivor, writes, is written to, closes a region and leaves. It counts the lines of
``afore.transport`` that it executes, and kills itself (SIGKILL) at a given one: so every step of a handshake, of a write and of an
end has its turn, also those between two system calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing.context
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from afore.core.errors import TransportError
from afore.transport.api import Channel, Lane, Region, RegionKey
from afore.transport.shm import sweep_stale
from tests.transport.conformance.puppet import ended, fork_server
from tests.transport.conformance.verbs_world import VERBS_WORLDS
from tests.transport.conformance.victim import STEP_US, WORD, WRITES, live
from tests.transport.conformance.worlds import ShmWorld, StreamWorld, TcpWorld

WORLDS: dict[str, type[ShmWorld] | type[TcpWorld]] = {"shm": ShmWorld, "tcp": TcpWorld}
"""Those of every machine; ``verbs`` has one for each binding."""
NEVER = 1 << 40
TRIES = 20
"""Lives until one of them ends by a kill: the last lines come in another order from run to run, so a life may be too short."""


@dataclass
class Survivor:
    """The side that goes on."""

    world: StreamWorld
    context: multiprocessing.context.ForkServerContext = field(init=False)
    errors: Counter[str] = field(default_factory=Counter)
    """What its operations ended with, by name."""
    kills: int = 0

    def __post_init__(self) -> None:
        self.fabric = self.world.fabric("survivor")
        self.hub = self.world.channel_address("hub")
        self.context = fork_server()

    async def start(self) -> None:
        await self.fabric.listen(self.hub, self._meet)

    async def _meet(self, channel: Channel) -> None:
        """Whoever comes is connected back to and written to, until it leaves or dies."""
        try:
            said: dict[str, Any] = await channel.receive(timeout_us=STEP_US)
            key = RegionKey(**said["key"])
            link = await self.fabric.connect(said["endpoint"], Lane.DEMAND, timeout_us=STEP_US)
            try:
                for number in range(WRITES):
                    await link.write(key, 0, b"survivor", notify=number, timeout_us=STEP_US)
                await channel.receive(timeout_us=STEP_US)
            finally:
                await link.close()
        except Exception as error:
            self.errors[type(error).__name__] += 1
        finally:
            await channel.close()

    async def outlive(self, label: str, doom_at: int) -> int:
        """One victim's life. Returns the lines that it lived, 0 if it was killed. What arrived of its writes must be right."""
        region = self.fabric.register(WRITES * WORD, label="survivor")
        lines = self.context.Value("q", 0)
        life = (self.world.puppet_spec(label), self.fabric.address, self.hub, region.key)
        process = self.context.Process(target=live, args=(doom_at, lines, *life))
        process.start()
        try:
            await ended(process)
        finally:
            process.kill()
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"the victim left with {process.exitcode}"
        self.kills += process.exitcode != 0
        await self._check(region, whole=process.exitcode == 0)
        region.close()
        process.close()
        return int(lines.value)

    async def _check(self, region: Region, *, whole: bool) -> None:
        told: list[int] = []
        with suppress(TransportError):
            while len(told) < WRITES:
                told += [one.immediate for one in await region.notified(timeout_us=STEP_US if whole else 0)]
        assert told == list(range(len(told)))
        assert len(told) == WRITES or not whole
        words = region.buffer.cast("Q")
        assert all(words[number] == number for number in told)

    async def settle(self) -> tuple[int, int, int]:
        """Descriptors, mappings and names (shared files, listeners) of this process and of the dead, once all ends were noticed."""
        counts = (0, 0, 0)
        same = 0
        while same < 50:
            sweep_stale()
            before, counts = counts, (_descriptors(), _mappings(), len(self.world.residue()))
            same = same + 1 if counts == before else 0
            await asyncio.sleep(0)
        return counts


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("afore" in line for line in file)


async def kill_peers(world: StreamWorld, count: int, seed: int) -> Survivor:
    """Kills ``count`` peers, spread over the whole of a life. Raises ``AssertionError`` where anything is left or wrong."""
    gc.collect()  # what earlier tests left to the collector is not ours to count
    survivor = Survivor(world)
    await survivor.start()
    whole = await survivor.outlive("whole", NEVER)
    assert whole > 0
    await survivor.outlive("another", NEVER)
    at_first = await survivor.settle()
    chance = random.Random(seed)
    for number in range(count):
        # One in each of ``count`` equal parts.
        doom_at = int((number + chance.random()) * whole / count) + 1
        for _ in range(TRIES):
            lived = await survivor.outlive(f"victim{number}", doom_at)
            if not lived:
                break
            doom_at = max(1, lived - chance.randrange(whole // count + 1))
    after = await survivor.settle()
    # The survivor still serves.
    await survivor.outlive("last", NEVER)
    assert survivor.kills == count, f"{survivor.kills} of {count} peers were killed"
    assert after == at_first, f"descriptors, mappings, names: {at_first} before, {after} after {count} kills"
    return survivor


async def _run(name: str, world: StreamWorld, count: int, seed: int) -> None:
    survivor = await kill_peers(world, count, seed)
    counts = await survivor.settle()
    await world.close()
    assert world.residue() == []
    sys.stdout.write(
        f"{name}: {survivor.kills} of {count} peers killed; {counts[0]} descriptors, {counts[1]} mappings and "
        f"{counts[2]} names as before; operations of the survivor ended with {dict(survivor.errors)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill peers at every step; count what is left.")
    parser.add_argument("--fabric", choices=(*WORLDS, "verbs"), default="tcp")
    parser.add_argument("--api", choices=VERBS_WORLDS, default="pyverbs", help="verbs: the binding")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    verbs = options.fabric == "verbs"
    name = f"verbs over {options.api}" if verbs else options.fabric
    made = VERBS_WORLDS[options.api] if verbs else WORLDS[options.fabric]

    async def run() -> None:
        await _run(name, made(), options.count, options.seed)

    asyncio.run(run())


if __name__ == "__main__":
    main()
