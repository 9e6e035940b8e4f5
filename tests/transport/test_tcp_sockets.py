"""TCP sockets: addresses, both versions of IP, who is not there, and a stranger who costs nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from afore.core.clock import deadline
from afore.core.errors import AuthenticationFailed, ConfigError, DeadlineExceeded, HostError, PeerLost
from afore.core.link_options import TcpOptions
from afore.transport.api import Channel, Lane
from afore.transport.endpoint import StreamEndpoint
from afore.transport.handshake import Hello, Identity, admit
from afore.transport.sockets import receive_exactly, send_all
from afore.transport.tcp_sockets import TcpListener, connect_tcp, connect_to, require_secret

SECRET = b"the secret of this run, long enough"
T_US = 20e6
Open = Callable[..., StreamEndpoint]


@pytest.fixture
async def endpoints() -> AsyncIterator[Open]:
    """Opens endpoints, and closes them."""
    opened: list[StreamEndpoint] = []

    def open_one(address: str = "127.0.0.1:0", secret: bytes = SECRET) -> StreamEndpoint:
        def welcome(sock: socket.socket, hello: Hello) -> None:
            admit(sock, endpoint.identity, hello, reply=hello.address.encode().ljust(64))
            sock.close()

        endpoint = StreamEndpoint(timeout_us=T_US, message_limit=1 << 20, greetings_limit=8)
        endpoint.open(Identity(address=address, secret=secret), welcome)
        opened.append(endpoint)
        return endpoint

    yield open_one
    for endpoint in opened:
        await endpoint.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_endpoints_meet_at_any_kind_of_address(endpoints: Open, host: str) -> None:
    far, near = endpoints(f"{host}:0"), endpoints()
    assert far.address.startswith(f"{host}:")
    assert far.address == far.listens_at

    async def echo(channel: Channel) -> None:
        await channel.send(await channel.receive(timeout_us=T_US), timeout_us=T_US)

    far.listen(far.address, echo)
    channel = await near.dial(far.address, timeout_us=T_US)
    await channel.send({"n": 1}, timeout_us=T_US)
    assert await channel.receive(timeout_us=T_US) == {"n": 1}
    sock, reply, fds = await near.meet(far.address, Lane.DATA, timeout_us=T_US, reply_bytes=64)
    sock.close()
    assert (reply.rstrip(), fds) == (near.address.encode(), [])
    odd = endpoints(secret=b"another secret, just as long....")
    with pytest.raises(AuthenticationFailed):
        await odd.dial(far.address, timeout_us=T_US)


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:0", ":1", "a\0b:1"],
)
async def test_what_is_no_address_is_said_so(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        await connect_tcp(address, TcpOptions())


async def test_nobody_there_is_peer_lost() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "localhost:1", "no-such-host.invalid:1"):
            with pytest.raises(PeerLost):
                await connect_tcp(address, TcpOptions())


async def test_a_connection_that_meets_itself_is_nobody() -> None:
    with socket.socket() as sock:
        sock.setblocking(False)
        # The kernel may draw the local port that the connection goes to.
        sock.bind(("127.0.0.1", 0))
        here = sock.getsockname()
        with pytest.raises(PeerLost, match="nobody listens"):
            await connect_to(sock, here, "itself")


async def test_where_no_connection_can_be_the_kernel_has_the_word() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(PeerLost, match=r"nobody listens there \(Connection refused\)"):
            await connect_tcp(closed, TcpOptions())
    # From a socket that is bound to loopback no way leads beyond it.
    with socket.socket() as bound:
        bound.setblocking(False)
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLost, match=r"it cannot be reached \((Invalid argument|Network is unreachable)\)"):
            await connect_to(bound, ("192.0.2.1", 9), "192.0.2.1:9")


async def test_a_connect_that_is_not_answered_ends_in_its_deadline() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        fillers = []
        with pytest.raises(DeadlineExceeded):  # noqa: PT012  # how many fit the backlog is the kernel's affair
            async with deadline(50_000, peer=address, operation="connect"):
                while True:
                    fillers.append(await connect_tcp(address, TcpOptions()))
        for filler in fillers:
            filler.close()


async def test_a_port_is_given_once(endpoints: Open) -> None:
    first = endpoints()
    with pytest.raises(HostError, match="in use"):
        TcpListener(first.address, lambda sock: sock.close(), TcpOptions())
    with pytest.raises(HostError, match="another address"):
        TcpListener("203.0.113.1:0", lambda sock: sock.close(), TcpOptions())


async def test_connections_are_tuned_on_both_sides() -> None:
    tuning = TcpOptions(keepalive_idle_s=7, keepalive_interval_s=3, keepalive_probes=4, unacknowledged_ms=9_000)
    came: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    listener = TcpListener("127.0.0.1:0", came.set_result, tuning)
    with await connect_tcp(listener.address, tuning) as near, await came as far:
        for sock in (near, far):
            options = [
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_NODELAY,
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            ]
            assert options == [1, 7, 3, 4, 9_000]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    listener.close()


@pytest.mark.parametrize(
    "options",
    [{"keepalive_idle_s": 0}, {"keepalive_interval_s": 1 << 15}, {"keepalive_probes": 128}, {"unacknowledged_ms": 0}],
)
def test_tuning_that_the_kernel_would_refuse_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        TcpOptions(**options)


def test_beyond_this_machine_a_secret_is_required() -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "/run/afore/hub"):
        require_secret(address, None)
    for address in ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "node-1:1"):
        require_secret(address, SECRET)
        with pytest.raises(ConfigError, match="no secret"):
            require_secret(address, None)


async def test_strangers_push_each_other_out_and_nobody_else(endpoints: Open) -> None:
    far, near = endpoints(), endpoints()
    strangers = [await connect_tcp(far.address, TcpOptions()) for _ in range(30)]
    for sock in strangers:
        await send_all(sock, b"AFO", "far")
    taken, _, _ = await near.meet(far.address, Lane.DATA, timeout_us=T_US, reply_bytes=64)
    taken.close()
    assert far.refusals["Crowded"] >= 30 - 8
    with pytest.raises(PeerLost):
        await receive_exactly(strangers[0], 1, "far")
    for sock in strangers:
        sock.close()


async def test_what_was_sent_before_a_close_arrives_though_messages_were_never_read(endpoints: Open) -> None:
    far, near = endpoints(), endpoints()
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def keep(channel: Channel) -> None:
        accepted.set_result(channel)

    far.listen(far.address, keep)
    channel = await near.dial(far.address, timeout_us=T_US)
    other = await accepted
    for number in range(50):
        await other.send({"unread": number}, timeout_us=T_US)
    # More than two sockets hold, so that most of it is on its way when the channel closes.
    sending = [asyncio.create_task(channel.send({"n": n, "pad": bytes(1 << 19)}, timeout_us=T_US)) for n in range(40)]

    async def read() -> list[object]:
        numbers: list[object] = []
        while len(numbers) < 40:
            numbers.append((await other.receive(timeout_us=T_US))["n"])
        return numbers

    reading = asyncio.create_task(read())
    await asyncio.gather(*sending)
    await channel.close()
    assert await reading == list(range(40))
    with pytest.raises(PeerLost):
        await other.receive(timeout_us=T_US)
