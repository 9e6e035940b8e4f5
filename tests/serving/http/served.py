"""A whole cluster with its HTTP door in a thread of its own: tests talk to it as clients do, through real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from afore.cluster import Cluster
from afore.core.clock import WallClock
from afore.core.config import BatchOptions, DeviceOptions, RunConfig, ServeOptions
from afore.core.topology import Topology
from afore.serving.client import Client
from afore.serving.inproc import running_members
from afore.serving.roles import RealWorld
from afore.transport.loopback import LoopbackNetwork

T = TypeVar("T")
PATIENCE_S = 60.0
CONFIG = RunConfig(
    topology=Topology(attention=2, ffn=2, redundant_slots=2),
    batch=BatchOptions(max_num_seqs=32, kv_blocks=256),
    device=DeviceOptions(threads=False),
    serve=ServeOptions(http=True, port=0),
)


class Served:
    """A running cluster: where it listens, and a way to run coroutines beside it."""

    def __init__(
        self, client: Client, cluster: Cluster, loop: asyncio.AbstractEventLoop, network: LoopbackNetwork
    ) -> None:
        self.url = client.status.url
        self.client = client
        self.cluster = cluster
        self._loop = loop
        self._network = network

    def kill(self, member: str) -> None:
        """The member's process dies."""
        self._loop.call_soon_threadsafe(self._network.kill, member)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine in the cluster's event loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE_S)

    def generate(self, prompt: str | list[int], **options: Any) -> tuple[list[int], str]:
        """What the scripting API answers: tokens and text."""

        async def work() -> tuple[list[int], str]:
            tokens = [token async for token in self.cluster.generate(prompt, **options)]
            return [token.id for token in tokens], "".join(token.text for token in tokens)

        return self.run(work)


@contextlib.contextmanager
def serving(config: RunConfig = CONFIG, *, model: Path | None = None, **serve: Any) -> Iterator[Served]:
    """Runs a cluster while the block does. ``serve`` overrides single options of the door."""
    config = dataclasses.replace(
        config, model=None if model is None else str(model), serve=dataclasses.replace(config.serve, **serve)
    )
    started = threading.Event()
    found: list[Served] = []
    failed: list[BaseException] = []
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        clock = WallClock()
        network = LoopbackNetwork(clock)
        async with running_members(config, clock, network, RealWorld()) as (client, _):
            found.append(Served(client, Cluster(client, config, clock), loop, network))
            ends.append(lambda: loop.call_soon_threadsafe(end.set))
            started.set()
            await end.wait()

    def thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    runner = threading.Thread(target=thread, name="served")
    runner.start()
    started.wait(PATIENCE_S)
    try:
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        if ends:
            ends[0]()
        runner.join(PATIENCE_S)
    if failed:
        raise failed[0]


SMALL = dataclasses.replace(
    CONFIG,
    topology=Topology(attention=1, ffn=2, microbatches=1, redundant_slots=2),
    batch=BatchOptions(max_num_seqs=1, kv_blocks=64, max_waiting=2),
)
"""One request at a time with room for 1,024 tokens, two more may wait."""


def metric(text: str, name: str) -> float:
    """The value of one line of /metrics, by its name with labels."""
    (value,) = [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(value)
