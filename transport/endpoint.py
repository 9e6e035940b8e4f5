"""The door of an endpoint, the same for every fabric whose peers meet over streams: its own address, channels, links' handshakes.

A fabric keeps its memory and its links; here is how its peers come in, prove themselves, and talk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import Counter
from collections.abc import Callable

from afore.core.clock import deadline
from afore.core.errors import HostError, LinkClosed
from afore.core.link_options import TcpOptions
from afore.transport.api import ChannelHandler, Lane
from afore.transport.channel import StreamChannel
from afore.transport.greeter import GREETINGS_LIMIT, Greeter
from afore.transport.handlers import HandlerTasks
from afore.transport.handshake import Hello, Identity, Purpose, admit, introduce
from afore.transport.sockets import close_all
from afore.transport.streams import connect_stream

LinkWelcome = Callable[[socket.socket, Hello], None]
"""Takes over a proven client that wants a link, and admits it; closes the socket if it raises."""


class StreamEndpoint:
    """Listens, greets and dials for one fabric. Used in the event loop that runs when it is opened."""

    def __init__(
        self,
        *,
        timeout_us: float,
        message_limit: int,
        tuning: TcpOptions | None = None,
        greetings_limit: int = GREETINGS_LIMIT,
    ) -> None:
        """``timeout_us`` bounds a client's handshake, ``message_limit`` the bytes of a control message."""
        self._tuning = tuning or TcpOptions()
        self._message_limit = message_limit
        self._greeter = Greeter(timeout_us=timeout_us, limit=greetings_limit, tuning=self._tuning)
        self._channels: dict[StreamChannel, None] = {}
        self._own_handler: ChannelHandler | None = None
        self._welcome_link: LinkWelcome
        self._handlers: HandlerTasks
        self._open = False
        self.identity: Identity
        """Who this endpoint is; ``address`` is where peers connect to."""
        self.listens_at: str
        """Where it listens; another address than ``identity``'s behind a translating router."""

    def open(self, me: Identity, welcome_link: LinkWelcome, *, listen_at: str | None = None) -> None:
        """Listens at ``listen_at``, by default the address of ``me``; a port 0 in either becomes the one that the kernel chose.

        Raises ``HostError``, ``ConfigError``, ``FileNotFoundError`` (a path whose folder is missing).
        """

        def identify(at: str) -> Identity:
            if me.address.endswith(":0"):
                return dataclasses.replace(me, address=me.address[:-1] + at.rpartition(":")[2])
            return me

        self.listens_at = self._greeter.listen(listen_at or me.address, identify, self._own_purposes, self._welcome_own)
        self.identity = identify(self.listens_at)
        self._welcome_link = welcome_link
        self._handlers = HandlerTasks(self.address)
        self._open = True

    @property
    def address(self) -> str:
        """Where peers connect to."""
        return self.identity.address

    @property
    def refusals(self) -> Counter[str]:
        """Connections that were refused, by the error's name."""
        return self._greeter.refusals

    def require_open(self) -> None:
        """Raises ``LinkClosed`` once the endpoint is shut."""
        if not self._open:
            raise LinkClosed(self.address, "this endpoint is closed", "open a new one")

    # Those who come

    def _own_purposes(self) -> frozenset[Purpose]:
        return frozenset({Purpose.LINK} if self._own_handler is None else {Purpose.LINK, Purpose.CHANNEL})

    async def _welcome_own(self, sock: socket.socket, hello: Hello) -> None:
        if hello.purpose is Purpose.LINK:
            self._welcome_link(sock, hello)
        else:
            assert self._own_handler is not None
            await self._welcome_channel(sock, hello, self._own_handler)

    def listen(self, address: str, handler: ChannelHandler) -> None:
        """As ``Fabric.listen``; ``address`` is a path or ``HOST:PORT``."""
        self.require_open()
        if address in (self.address, self.listens_at):
            if self._own_handler is not None:
                raise HostError(address, "it has a listener already", "listen at another address")
            self._own_handler = handler
            return

        async def welcome(sock: socket.socket, hello: Hello) -> None:
            await self._welcome_channel(sock, hello, handler)

        try:
            self._greeter.listen(
                address,
                lambda at: dataclasses.replace(self.identity, address=at),
                lambda: frozenset({Purpose.CHANNEL}),
                welcome,
            )
        except FileNotFoundError:
            raise HostError(address, "its directory does not exist", "make it, or choose another address") from None

    async def _welcome_channel(self, sock: socket.socket, hello: Hello, handler: ChannelHandler) -> None:
        try:
            admit(sock, self.identity, hello)
        except BaseException:
            sock.close()
            raise
        self._handlers.start(handler, await self._channel(sock, hello.address))

    # Those to whom we go

    async def meet(
        self, address: str, lane: Lane, *, timeout_us: float, reply_bytes: int, max_fds: int = 0
    ) -> tuple[socket.socket, bytes, list[int]]:
        """A connection for a link, after the handshake, with what the owner gave. Raises as ``Fabric.connect`` does."""
        self.require_open()
        async with deadline(timeout_us, peer=address, operation="connect"):
            sock = await connect_stream(address, self._tuning)
            try:
                reply, fds = await introduce(
                    sock, self.identity, Purpose.LINK, lane, peer=address, reply_bytes=reply_bytes, max_fds=max_fds
                )
            except BaseException:
                sock.close()
                raise
        try:
            self.require_open()
        except BaseException:
            sock.close()
            close_all(fds)
            raise
        return sock, reply, fds

    async def dial(self, address: str, *, timeout_us: float, peer: str | None = None) -> StreamChannel:
        """As ``Fabric.dial``; ``peer`` is the name to call it by."""
        self.require_open()
        name = peer or address
        async with deadline(timeout_us, peer=name, operation="dial"):
            sock = await connect_stream(address, self._tuning)
            try:
                await introduce(sock, self.identity, Purpose.CHANNEL, Lane.CONTROL, peer=name)
                self.require_open()
            except BaseException:
                sock.close()
                raise
            return await self._channel(sock, name)

    async def _channel(self, sock: socket.socket, peer: str) -> StreamChannel:
        channel = await StreamChannel.over(sock, peer=peer, limit=self._message_limit)
        if not self._open:
            await channel.close()
            self.require_open()
        self._channels[channel] = None
        channel.on_gone = self._forget_channel
        return channel

    def _forget_channel(self, channel: StreamChannel) -> None:
        self._channels.pop(channel, None)

    # The end

    def shut(self) -> bool:
        """Begins the end: nobody new, handlers are cancelled. Whether it was open; ``close`` follows in any case."""
        was_open, self._open = self._open, False
        if was_open:
            self._handlers.cancel()
        return was_open

    async def close(self) -> None:
        """Ends listeners, handshakes, handlers and channels. Idempotent."""
        self.shut()
        try:
            await self._greeter.close()
        finally:
            # Whoever cuts this short still leaves nothing open.
            try:
                await self._handlers.ended()
            finally:
                if self._channels:
                    await asyncio.gather(*[channel.close() for channel in self._channels])
