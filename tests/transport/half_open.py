"""A machine that vanishes: two endpoints in a network namespace whose only interface goes down under them.

    unshare -rn python -m tests.transport.half_open

Nothing is sent that would say so; the kernel's probes, and what stays unacknowledged, must.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys

from afore.core.errors import PeerLost
from afore.core.link_options import TcpOptions
from afore.transport.api import Channel, Lane, Link, RegionKey
from afore.transport.tcp import TcpConfig, TcpFabric

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1
TUNING = TcpOptions(keepalive_idle_s=1, keepalive_interval_s=1, keepalive_probes=1, unacknowledged_ms=1500)
T_US = 60e6


def set_loopback(*, up: bool) -> None:
    """Switches the namespace's loopback interface (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(sock, SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", request, 16)
        struct.pack_into("H", request, 16, flags | IFF_UP if up else flags & ~IFF_UP)
        fcntl.ioctl(sock, SIOCSIFFLAGS, request)


async def vanish() -> list[str]:
    """What a link that waits in silence, one whose bytes nobody acknowledges, and a channel ended with."""
    set_loopback(up=True)
    near, far = (TcpFabric(TcpConfig(tuning=TUNING, credits=2)) for _ in range(2))

    async def listens(channel: Channel) -> str:
        try:
            await channel.receive(timeout_us=T_US)
        except PeerLost as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    heard: asyncio.Queue[str] = asyncio.Queue()

    async def served(channel: Channel) -> None:
        await heard.put("served")
        await heard.put(await listens(channel))

    await far.listen(far.address, served)
    channel = await near.dial(far.address, timeout_us=T_US)
    assert await heard.get() == "served"
    silent, busy = [await near.connect(far.address, lane, timeout_us=T_US) for lane in (Lane.DEMAND, Lane.DATA)]
    full, region = far.register(8, label="full"), far.register(8, label="r")
    for number in range(2):
        await silent.write(full.key, 0, b"x", notify=number, timeout_us=T_US)
        await busy.write(region.key, 0, b"x", notify=number, timeout_us=T_US)
    taken = 0
    while taken < 2:
        taken += len(await region.notified(timeout_us=T_US))
    set_loopback(up=False)

    async def ends(link: Link, key: RegionKey) -> str:
        try:
            for number in range(5):
                await link.write(key, 0, b"y", notify=number, timeout_us=T_US)
        except PeerLost as error:
            return str(error)
        return "nothing"

    ended = list(await asyncio.gather(ends(silent, full.key), ends(busy, region.key), listens(channel), heard.get()))
    await near.close()
    await far.close()
    return ended


if __name__ == "__main__":
    sys.stdout.write("\n".join(asyncio.run(vanish())) + "\n")
