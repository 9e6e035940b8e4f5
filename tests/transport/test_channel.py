"""What a peer of a channel can send without ever being read is bounded."""

from __future__ import annotations

import asyncio
import socket

from afore.transport.channel import StreamChannel

MANY = 16 << 20
"""Bytes that nobody's kernel keeps of a pair of sockets."""


async def test_messages_of_no_bytes_are_counted_too() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    channel = await StreamChannel.over(near, peer="p")
    sent = refused = 0
    while refused < 50 and sent < MANY:
        try:
            sent += far.send(bytes(1 << 16))
            refused = 0
        except BlockingIOError:
            refused += 1
        await asyncio.sleep(0)
    assert sent < MANY
    far.close()
    await channel.close()
