"""An endpoint in a process of its own, led over a socket: one JSON command a line, one JSON answer a line.

Puppets are forked from a server that has imported what they need, so that one costs milliseconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import multiprocessing.context
import os
import signal
import socket
from contextlib import suppress
from typing import Any, cast

from afore.core.errors import AforeError
from afore.transport.api import Channel, Fabric, Lane, Link, Region, RegionKey
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

PRELOADED = ["tests.transport.conformance.victim", "tests.transport.conformance.worlds"]
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

    def __init__(
        self,
        process: multiprocessing.context.ForkServerProcess,
        answers: asyncio.StreamReader,
        commands: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._answers = answers
        self._commands = commands
        self._over = False
        self.address = ""
        assert process.pid is not None
        self.pid = process.pid

    @classmethod
    async def start(cls, spec: dict[str, Any]) -> Puppet:
        near, far = socket.socketpair()
        with far:
            process = fork_server().Process(target=perform, args=(spec, far))
            process.start()
        puppet = cls(process, *await asyncio.open_connection(sock=near))
        puppet.address = await puppet.call("address")
        return puppet

    def order(self, command: str, **arguments: Any) -> None:
        """Sends a command without waiting for its answer."""
        self._commands.write(json.dumps({"command": command, **arguments}).encode() + b"\n")

    async def answer(self) -> Any:
        """The answer to the oldest command that has none yet."""
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            line = await self._answers.readline()
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
        if not self._over:
            self._process.kill()
        await self._ended()

    async def end(self) -> None:
        """Lets it close its endpoint and leave."""
        if not self._over and not self._commands.is_closing():
            self._commands.close()
            # A test that failed between freezing it and killing it leaves it so.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            with suppress(ConnectionError):
                await self._commands.wait_closed()
        await self._ended()

    async def _ended(self) -> None:
        if not self._over:
            self._over = True
            await ended(self._process)
            self._process.close()
            self._commands.close()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Where processes of these tests come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


async def ended(process: multiprocessing.context.ForkServerProcess) -> None:
    """Returns once ``process`` has ended, however it does; ``TimeoutError`` after ``COMMAND_TIMEOUT_S``."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not over.done():
            over.set_result(None)

    loop.add_reader(process.sentinel, note)
    try:
        await asyncio.wait_for(over, COMMAND_TIMEOUT_S)
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


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


def perform(spec: dict[str, Any], sock: socket.socket) -> None:
    """What a puppet's process runs."""
    asyncio.run(_perform(spec, sock))


async def _perform(spec: dict[str, Any], sock: socket.socket) -> None:
    fabric = make_fabric(spec)
    stage = _Stage(fabric)
    commands, answers = await asyncio.open_connection(sock=sock)
    while line := await commands.readline():
        said = cast(dict[str, Any], json.loads(line))
        try:
            answer = {"value": await getattr(stage, said.pop("command"))(**said)}
        except AforeError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
    answers.close()
    await fabric.close()
