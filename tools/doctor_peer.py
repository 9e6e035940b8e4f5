"""``doctor --peer``: a real connection to another machine, step by step, that ends at the step that fails and says what mends it.

The peer is another doctor (``--serve``) or the rendezvous of a running door, which is told by how it answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from typing import cast

from afore.core.errors import WireError
from afore.core.metrics import percentile
from afore.core.topology import RENDEZVOUS_PORT, is_loopback, join_address, split_address
from afore.tools.doctor_check import Check
from afore.tools.doctor_meeting import (
    CODEC,
    REGION_BYTES,
    STEP_US,
    Meet,
    Met,
    Place,
    Stand,
    parse,
    stands,
    tcp_endpoint,
)
from afore.tools.doctor_rendezvous import check_rendezvous
from afore.tools.doctor_steps import Ended, Steps, find_name, find_route, try_connect, try_hello
from afore.transport.api import Lane, Link
from afore.transport.handshake import Identity
from afore.transport.tcp import TcpFabric
from afore.transport.tcp_config import LOOPBACK_SECRET
from afore.transport.verbs.link import VerbsLink

SMALL_BYTES = 512
"""A demand vector of a model with 128 experts."""
ROUNDS = 1000
HELLO_US = 2e6
"""After so much silence it is no endpoint, and may be a rendezvous."""


def parse_peer(peer: str, port: int) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT``, ``[v6]:PORT`` or a bare IPv6 address as (host, port), ``port`` where it names none.

    Raises ``ConfigError``.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(peer)), port
    if ":" not in peer:
        peer = f"{peer}:{port}"
    return split_address(peer, field="--peer", example=f"127.0.0.1:{port}")


async def examine_peer(
    host: str, port: int, secret: bytes | None, *, rounds: int = ROUNDS, hello_us: float = HELLO_US
) -> list[Check]:
    """The steps up to the one that failed, or all of them."""
    steps = Steps()
    with contextlib.suppress(Ended):
        await _examine(steps, host, port, secret, rounds, hello_us)
    return steps.checks


async def _examine(steps: Steps, host: str, port: int, secret: bytes | None, rounds: int, hello_us: float) -> None:
    address = join_address(await find_name(steps, host, port), port)
    own = find_route(steps, address)
    if secret is None and not is_loopback(own):
        raise steps.fail(
            "secret",
            f"{address} lies beyond this machine, and there is no secret",
            "give both sides the same file: --secret-file FILE",
        )
    steps.ok("secret", "the one that was given" if secret is not None else "none: loopback needs none")
    sock = await try_connect(steps, address)
    if port == RENDEZVOUS_PORT:
        sock.close()
        await check_rendezvous(steps, address, secret)
        return
    me = Identity(address=join_address(own, 0), secret=secret or LOOPBACK_SECRET)
    try:
        await try_hello(steps, sock, me, address, timeout_us=hello_us)
    except WireError:
        # Not our protocol: perhaps a door's rendezvous at a port of its own.
        await check_rendezvous(steps, address, secret)
        return
    finally:
        sock.close()
    with steps.step("endpoint"):
        tcp = tcp_endpoint(join_address(own, 0), secret)
    try:
        async with stands(tcp, own, secret or LOOPBACK_SECRET) as mine:
            await _meet(steps, tcp, mine, address, rounds)
    finally:
        await tcp.close()


async def _meet(steps: Steps, tcp: TcpFabric, mine: tuple[Stand, ...], address: str, rounds: int) -> None:
    with steps.step("meeting", "it is an endpoint, but no doctor: run `python -m afore.tools.doctor --serve` there"):
        channel = await tcp.dial(address, timeout_us=STEP_US)
        try:
            meet = Meet(os.uname().nodename, tuple(stand.place for stand in mine))
            await channel.send(CODEC.to_wire(meet), timeout_us=STEP_US)
            met = cast(Met, parse(await channel.receive(timeout_us=4 * STEP_US), Met, address))
            if len(met.ways_back) != len(mine):
                raise WireError(address, "its answer is not about what it was asked")
        except BaseException:
            await channel.close()
            raise
    try:
        places = {place.fabric: place for place in met.places}
        steps.ok("meeting", f"{met.machine}, which offers {', '.join(p.fabric for p in met.places if p.endpoint)}")
        for stand, back in zip(mine, met.ways_back, strict=True):
            await _try_fabric(steps, stand, places.get(stand.place.fabric), back, rounds)
    finally:
        await channel.close()


async def _try_fabric(steps: Steps, stand: Stand, place: Place | None, back: str, rounds: int) -> None:
    """One-sided writes both ways over one fabric."""
    name = stand.place.fabric
    if stand.fabric is None or stand.region is None or place is None or not place.endpoint:
        ours = f"here: {stand.place.why_not}" if stand.place.why_not else ""
        theirs = "" if place is None or place.endpoint else f"there: {place.why_not}"
        steps.ok(name, f"not tried ({'; '.join(part for part in (ours, theirs) if part) or 'not offered'})")
        return
    if back:
        port = stand.place.endpoint.rpartition(":")[2]
        mend = f"let the peer reach {stand.place.endpoint}: firewalls here must pass any port of AFORE's processes"
        raise steps.fail(f"{name} way back", f"the peer could not connect to port {port} here: {back}", mend)
    steps.ok(f"{name} way back", f"the peer connected to {stand.place.endpoint}")
    with steps.step(f"{name} link"):
        link = await stand.fabric.connect(place.endpoint, Lane.DEMAND, timeout_us=STEP_US)
    try:
        steps.ok(f"{name} link", link.mtu_reason if isinstance(link, VerbsLink) else f"connected to {place.endpoint}")
        with steps.step(f"{name} write"):
            pattern = bytes(range(256)) * (REGION_BYTES // 256)
            await link.write(place.key, 0, pattern, notify=REGION_BYTES, timeout_us=STEP_US)
            await _echoed(stand, REGION_BYTES)
            if bytes(stand.region.buffer[:REGION_BYTES]) != pattern:
                raise WireError(place.endpoint, "what came back is not what was written", "please report it")
        steps.ok(f"{name} write", f"{REGION_BYTES:,} bytes with a notification, written back the same")
        with steps.step(f"{name} round trip"):
            trips_ns = [await _trip(stand, place, link) for _ in range(rounds)]
        p50, p99 = (percentile(trips_ns, q) or 0.0 for q in (50, 99))
        steps.ok(
            f"{name} round trip",
            f"{SMALL_BYTES} bytes and back, {rounds:,} times: p50 {p50 / 1e3:,.0f} µs, p99 {p99 / 1e3:,.0f} µs",
        )
    finally:
        await link.close()


async def _trip(stand: Stand, place: Place, link: Link) -> int:
    """Nanoseconds until a small write has come back."""
    begin_ns = time.perf_counter_ns()
    await link.write(place.key, 0, _SMALL, notify=SMALL_BYTES, timeout_us=STEP_US)
    await _echoed(stand, SMALL_BYTES)
    return time.perf_counter_ns() - begin_ns


_SMALL = bytes(SMALL_BYTES)


async def _echoed(stand: Stand, nbytes: int) -> None:
    assert stand.region is not None
    notifications = await stand.region.notified(timeout_us=STEP_US)
    if [one.immediate for one in notifications] != [nbytes]:
        raise WireError(stand.place.endpoint, f"came back with other notifications: {notifications}")
