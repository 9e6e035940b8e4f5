"""``doctor --serve``: the other side of ``doctor --peer``. Serves until it is told to end; each client in a task of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import cast

from afore.core.errors import AforeError, PeerLost
from afore.core.topology import split_address
from afore.tools.doctor_meeting import (
    CODEC,
    STEP_US,
    Meet,
    Met,
    Say,
    echo,
    open_links,
    parse,
    problem_and_mend,
    stands,
    tcp_endpoint,
)
from afore.tools.printable import printable
from afore.transport.api import Channel
from afore.transport.tcp_config import LOOPBACK_SECRET

MEETING_US = 120e6
"""A client that has not gone by then has forgotten to."""


class DoctorServer:
    """A doctor that others' ``--peer`` finds. ``close`` it; used in the event loop that runs when it is made."""

    def __init__(self, listen: str, secret: bytes | None, say: Say, *, patience_us: float = STEP_US) -> None:
        """``patience_us``: how long a client may take to say who it is.

        Raises ``ConfigError`` (beyond loopback without a secret), ``HostError`` (the address is taken).
        """
        self._host = split_address(listen, field="--listen", example="127.0.0.1:29514", any_port=True)[0]
        self._secret = secret
        self._say = say
        self._patience_us = patience_us
        self._fabric = tcp_endpoint(listen, secret)

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self._fabric.address

    async def open(self) -> None:
        """Takes clients from now on."""
        await self._fabric.listen(self._fabric.address, self._client)

    async def _client(self, channel: Channel) -> None:
        try:
            await self._meet(channel)
        finally:
            # Also of one whose first words were wrong, or did not come: it would wait, and its socket stay.
            await channel.close()

    async def _meet(self, channel: Channel) -> None:
        who = channel.peer
        try:
            meet = cast(Meet, parse(await channel.receive(timeout_us=self._patience_us), Meet, who))
        except PeerLost:
            return  # a hello alone
        except AforeError as error:
            self._tell(who, problem_and_mend(error)[0])
            return
        who = f"{meet.machine} at {who}"
        self._tell(who, "met")
        try:
            await self._serve(channel, meet)
        except PeerLost:
            self._tell(who, "done")
        except AforeError as error:
            self._tell(who, problem_and_mend(error)[0])

    def _tell(self, who: str, what: str) -> None:
        # A stranger's name and words.
        self._say(printable(f"{who}: {what}"))

    async def _serve(self, channel: Channel, meet: Meet) -> None:
        async with stands(self._fabric, self._host, self._secret or LOOPBACK_SECRET) as mine:
            links = await open_links(mine, meet.places)
            backs = {place.fabric: why for _, place, _, why in links}
            echoes = []
            try:
                for stand, place, link, _ in links:
                    if link is not None and stand.region is not None:
                        echoes.append(asyncio.create_task(echo(stand.region, link, place.key)))
                met = Met(
                    os.uname().nodename,
                    tuple(stand.place for stand in mine),
                    tuple(backs.get(place.fabric, "") for place in meet.places),
                )
                await channel.send(CODEC.to_wire(met), timeout_us=STEP_US)
                await channel.receive(timeout_us=MEETING_US)  # nothing more is due: its end
            finally:
                for task in echoes:
                    task.cancel()
                await asyncio.gather(*echoes, return_exceptions=True)
                for _, _, link, _ in links:
                    if link is not None:
                        await link.close()

    async def close(self) -> None:
        """Idempotent."""
        await self._fabric.close()


async def serve(listen: str, secret: bytes | None, say: Say) -> None:
    """Serves until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = DoctorServer(listen, secret, say)
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, ended.set)
        await server.open()
        say(f"serving at {server.address}; on the other machine: python -m afore.tools.doctor --peer {server.address}")
        await ended.wait()
    finally:
        await server.close()
