"""Weather between two endpoints of a network: a relay that delivers late, in pieces, in part, or not at all.

Nothing here sleeps: what is late is so by turns of the event loop, seeded.
"""

from __future__ import annotations

import asyncio
import enum
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass


class Side(enum.Enum):
    """Who sent the bytes."""

    CLIENT = "client"
    SERVER = "server"


class Storm(enum.Enum):
    """What happens to a connection once its bytes are through."""

    END = "end"
    """Both sides read an end, in order."""
    RESET = "reset"
    """Both sides read a reset."""
    HOLE = "hole"
    """Nothing: what follows vanishes, both ways, and both connections stay."""
    STALL = "stall"
    """What follows is neither delivered nor read, until ``calm``."""


@dataclass(frozen=True)
class Breaks:
    """When and how a connection breaks."""

    side: Side
    after: int
    """Bytes of ``side`` that are delivered before."""
    how: Storm


class Weather:
    """A relay. Peers connect to ``address``; it connects to ``target``."""

    def __init__(
        self, *, piece: int | None = None, late_turns: int = 0, seed: int = 0, breaks: Breaks | None = None
    ) -> None:
        """``piece``: bytes delivered at once; ``late_turns``: most turns of the loop that a piece waits."""
        self.target = ""
        self._piece = piece
        self._late_turns = late_turns
        self._chance = random.Random(seed)
        self._breaks = breaks
        self._calm = asyncio.Event()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._server.setblocking(False)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.broken = asyncio.Event()
        """Set when a connection has met what ``breaks`` says."""
        self._loop = asyncio.get_running_loop()
        self._tasks = {self._loop.create_task(self._accept())}
        self._socks: list[socket.socket] = []

    def calm(self) -> None:
        """Lets go of what stalls."""
        self._calm.set()

    async def close(self) -> None:
        """Ends all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for sock in (self._server, *self._socks):
            sock.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._server)
            server = socket.socket()
            server.setblocking(False)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks += [client, server]
            host, _, port = self.target.rpartition(":")
            try:
                await self._loop.sock_connect(server, (host, int(port)))
            except OSError:
                client.close()
                continue
            connection = _Connection(self, client, server)
            for side in Side:
                connection.tasks[side] = self._loop.create_task(connection.carry(side))
            self._tasks |= {*connection.tasks.values()}

    async def late(self) -> None:
        """Waits as long as a piece is late."""
        for _ in range(self._chance.randint(0, self._late_turns)):
            await asyncio.sleep(0)

    @property
    def piece(self) -> int:
        return self._piece or 1 << 16

    @property
    def breaks(self) -> Breaks | None:
        return self._breaks

    async def calmed(self) -> None:
        await self._calm.wait()


class _Connection:
    """One connection through the weather."""

    def __init__(self, weather: Weather, client: socket.socket, server: socket.socket) -> None:
        self._weather = weather
        self._ends = {Side.CLIENT: (client, server), Side.SERVER: (server, client)}
        self._over = ""
        self.tasks: dict[Side, asyncio.Task[None]] = {}

    async def carry(self, side: Side) -> None:
        """Carries what ``side`` sends."""
        weather, loop = self._weather, asyncio.get_running_loop()
        source, sink = self._ends[side]
        breaks = weather.breaks if weather.breaks is not None and weather.breaks.side is side else None
        left = breaks.after if breaks is not None else None
        with suppress(OSError):
            while True:
                if left == 0:
                    assert breaks is not None
                    left = None
                    await self._break(breaks.how)
                    weather.broken.set()
                    if breaks.how in (Storm.END, Storm.RESET):
                        return
                data = await loop.sock_recv(source, weather.piece if left is None else min(left, weather.piece))
                if not data:
                    if not self._over:
                        sink.shutdown(socket.SHUT_WR)
                    return
                if self._over:
                    continue
                await weather.late()
                await loop.sock_sendall(sink, data)
                if left is not None:
                    left -= len(data)

    async def _break(self, how: Storm) -> None:
        if how is Storm.STALL:
            await self._weather.calmed()
            return
        self._over = how.value
        if how is Storm.HOLE:
            return
        if how is Storm.RESET:
            # The other direction waits for one of these sockets.
            others = [task for task in self.tasks.values() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        for sock, _ in self._ends.values():
            if how is Storm.RESET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            else:
                sock.shutdown(socket.SHUT_WR)
