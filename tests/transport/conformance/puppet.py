"""An endpoint in a process of its own, led over its standard input and output: one JSON command a line, one JSON answer a line.

As a module it is the puppet (``python -m tests.transport.conformance.puppet SPEC``); ``Puppet`` is the hand that leads it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

from afore.core.errors import AforeError
from afore.transport.api import Channel, Fabric, Lane, Link, Region, RegionKey
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

ROOT = Path(__file__).parents[3]
COMMAND_TIMEOUT_S = 30
SEQUENCE_BYTES = 8


def plain_key(key: RegionKey) -> dict[str, Any]:
    """A key as JSON carries it."""
    return dataclasses.asdict(key)


class PuppetError(Exception):
    """A command raised this in the puppet; ``kind`` is the error's class name."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Puppet:
    """A running puppet. ``end`` it."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address
        self.pid = process.pid

    @classmethod
    async def start(cls, spec: dict[str, Any]) -> Puppet:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.transport.conformance.puppet",
            json.dumps(spec),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        puppet = cls(process, "")
        puppet.address = await puppet.call("address")
        return puppet

    def order(self, command: str, **arguments: Any) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")

    async def answer(self) -> Any:
        """The answer to the oldest command that has none yet."""
        assert self._process.stdout is not None
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            line = await self._process.stdout.readline()
        said = json.loads(line)
        if "error" in said:
            raise PuppetError(said["error"], said["text"])
        return said["value"]

    async def call(self, command: str, **arguments: Any) -> Any:
        self.order(command, **arguments)
        return await self.answer()

    async def register(self, nbytes: int) -> RegionKey:
        return RegionKey(**await self.call("register", nbytes=nbytes))

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    async def kill(self) -> None:
        """kill -9, also when frozen."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Lets it close its endpoint and leave."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._process.wait()


class _Stage:
    """The puppet's side: one method for each command."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._regions: dict[int, Region] = {}
        self._links: list[Link] = []
        self._channels: list[Channel] = []

    async def address(self) -> str:
        return self._fabric.address

    async def register(self, nbytes: int) -> dict[str, Any]:
        region = self._fabric.register(nbytes, label="puppet")
        self._regions[region.key.region] = region
        return plain_key(region.key)

    async def revoke(self, region: int) -> None:
        self._regions[region].close()

    async def connect(self, address: str, lane: int) -> int:
        self._links.append(await self._fabric.connect(address, Lane(lane), timeout_us=5e6))
        return len(self._links) - 1

    async def write(
        self, link: int, key: dict[str, Any], offset: int, data: str, notify: int | None, timeout_us: float
    ) -> None:
        await self._links[link].write(
            RegionKey(**key), offset, bytes.fromhex(data), notify=notify, timeout_us=timeout_us
        )

    async def stream(self, link: int, key: dict[str, Any], count: int) -> None:
        """Writes 0 … count - 1, each to its place in the region, notifying with the same number."""
        remote = RegionKey(**key)
        slots = remote.nbytes // SEQUENCE_BYTES
        for number in range(count):
            await self._links[link].write(
                remote,
                number % slots * SEQUENCE_BYTES,
                number.to_bytes(SEQUENCE_BYTES, "little"),
                notify=number,
                timeout_us=20e6,
            )

    async def notified(self, region: int) -> list[int]:
        return [one.immediate for one in await self._regions[region].notified(timeout_us=20e6)]

    async def read(self, region: int, offset: int, nbytes: int) -> str:
        return self._regions[region].buffer[offset : offset + nbytes].hex()

    async def listen_echo(self, address: str) -> None:
        async def echo(channel: Channel) -> None:
            while True:
                await channel.send(await channel.receive(timeout_us=None), timeout_us=5e6)

        await self._fabric.listen(address, echo)

    async def dial(self, address: str) -> None:
        self._channels.append(await self._fabric.dial(address, timeout_us=5e6))

    async def say(self, message: dict[str, object]) -> None:
        await self._channels[-1].send(message, timeout_us=5e6)

    async def hear(self) -> dict[str, object]:
        return await self._channels[-1].receive(timeout_us=20e6)


def make_fabric(spec: dict[str, Any]) -> Fabric:
    """The endpoint that a world's ``puppet_spec`` describes."""
    kind = spec.pop("fabric")
    options = spec | {"secret": bytes.fromhex(spec["secret"])}
    if kind == "shm":
        return ShmFabric(ShmConfig(**options))
    if kind == "verbs":
        # Only where there is a device is the fabric worth its import.
        from afore.transport.verbs.config import VerbsConfig
        from afore.transport.verbs.fabric import VerbsFabric

        return VerbsFabric(VerbsConfig(**options))
    assert kind == "tcp", f"no puppet for {kind}"
    return TcpFabric(TcpConfig(**options))


async def _perform(spec: dict[str, Any]) -> None:
    fabric = make_fabric(spec)
    stage = _Stage(fabric)
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        said = cast(dict[str, Any], json.loads(line))
        try:
            answer = {"value": await getattr(stage, said.pop("command"))(**said)}
        except AforeError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    transport.close()
    await fabric.close()


if __name__ == "__main__":
    asyncio.run(_perform(json.loads(sys.argv[1])))
