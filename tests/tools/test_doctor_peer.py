"""``doctor --peer``: against a real doctor, a real rendezvous, and whatever else may listen; the step that fails is named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError, PeerLost
from afore.core.topology import ROLES
from afore.serving.endpoints import host_id
from afore.serving.identity import ClusterIdentity
from afore.serving.rendezvous import Host
from afore.tools import doctor
from afore.tools.doctor_check import Check
from afore.tools.doctor_meeting import CODEC, STEP_US, Meet, Met
from afore.tools.doctor_peer import examine_peer, parse_peer
from afore.tools.doctor_serve import DoctorServer
from afore.transport.api import Channel
from afore.transport.routed_names import RoutedAddress
from afore.transport.tcp import TcpConfig, TcpFabric

SECRET = b"0123456789abcdef-of-this-test"
SILENCE_US = 50_000.0
"""A store says nothing to a hello, however long one waits."""
TO_PROOF = ["name", "route", "secret", "connect", "hello", "proof"]


@contextlib.asynccontextmanager
async def serving(secret: bytes | None = None) -> AsyncIterator[tuple[DoctorServer, list[str]]]:
    said: list[str] = []
    server = DoctorServer("127.0.0.1:0", secret, said.append)
    await server.open()
    try:
        yield server, said
    finally:
        await server.close()


async def examine(address: str, secret: bytes | None = None, hello_us: float = 5e6) -> list[Check]:
    return await examine_peer(*parse_peer(address, 29514), secret, rounds=3, hello_us=hello_us)


def failed(checks: list[Check], name: str) -> Check:
    """The last step, which is the one that failed, and no other did."""
    assert [check.name for check in checks if check.status != "ok"] == [name]
    assert checks[-1].mend
    return checks[-1]


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_all_steps_to_a_doctor(secret: bytes | None) -> None:
    async with serving(secret) as (server, said):
        checks = await examine(server.address, secret)
    assert {check.status for check in checks} == {"ok"}
    tcp = ["tcp way back", "tcp link", "tcp write", "tcp round trip"]
    assert [check.name for check in checks if not check.name.startswith("verbs")] == [*TO_PROOF, "meeting", *tcp]
    assert "3 times: p50" in next(check.found for check in checks if check.name == "tcp round trip")
    assert said[0].endswith(": met")


async def test_a_server_serves_many_and_nothing_of_them_stays() -> None:
    async with serving() as (server, said):
        results = await asyncio.gather(*[examine(server.address) for _ in range(3)])
        assert all(check.status == "ok" for checks in results for check in checks)
    assert sum(line.endswith(": met") for line in said) == 3


@contextlib.asynccontextmanager
async def stranger(server: DoctorServer) -> AsyncIterator[Channel]:
    """A channel to the server of somebody who is no doctor."""
    fabric = TcpFabric(TcpConfig())
    try:
        channel = await fabric.dial(server.address, timeout_us=STEP_US)
        try:
            yield channel
        finally:
            await channel.close()
    finally:
        await fabric.close()


@pytest.mark.parametrize("first", [{"kind": "nonsense"}, None])
async def test_a_client_whose_first_words_are_wrong_or_missing_is_closed(first: dict[str, object] | None) -> None:
    said: list[str] = []
    server = DoctorServer("127.0.0.1:0", None, said.append, patience_us=5e6 if first else 1e3)
    await server.open()
    try:
        async with stranger(server) as channel:
            if first is not None:
                await channel.send(first, timeout_us=STEP_US)
            with pytest.raises(PeerLost):
                await channel.receive(timeout_us=60e6)
    finally:
        await server.close()
    assert len(said) == 1


async def test_the_name_of_a_stranger_is_no_order_to_a_terminal() -> None:
    async with serving() as (server, said), stranger(server) as channel:
        await channel.send(CODEC.to_wire(Meet("\x1b]0;mine\x07\x1b[2J", ())), timeout_us=STEP_US)
        await channel.receive(timeout_us=STEP_US)
    assert said[0].startswith(" ]0;mine  [2J at ")
    assert all(line.isprintable() for line in said)


async def test_another_secret_fails_at_the_proof() -> None:
    async with serving(SECRET) as (server, _):
        assert "--secret-file" in failed(await examine(server.address, SECRET + b"?"), "proof").mend
        assert failed(await examine(server.address), "proof")


async def test_another_version_fails_at_the_hello_and_both_are_named() -> None:
    fabric = TcpFabric(TcpConfig(version=WIRE_VERSION + 1))
    try:
        found = failed(await examine(fabric.address), "hello").found
    finally:
        await fabric.close()
    assert f"{WIRE_VERSION + 1}, this side speaks {WIRE_VERSION}" in found


async def test_nobody_there_fails_at_the_connection() -> None:
    async with serving() as (server, _):
        address = server.address
    assert f"--serve --listen {address}" in failed(await examine(address), "connect").mend


async def test_a_name_that_is_none() -> None:
    assert "nowhere.invalid cannot be resolved" in failed(await examine("nowhere.invalid"), "name").found


async def test_an_endpoint_that_is_no_doctor() -> None:
    fabric = TcpFabric(TcpConfig())
    await fabric.listen(fabric.address, lambda channel: channel.close())
    try:
        assert "no doctor" in failed(await examine(fabric.address), "meeting").mend
    finally:
        await fabric.close()


async def test_a_peer_that_cannot_connect_back() -> None:
    async def answer(channel: Channel) -> None:
        await channel.receive(timeout_us=STEP_US)
        places = dataclasses.replace(PLACE, endpoint=fabric.address)
        await channel.send(CODEC.to_wire(Met("other", (places,), ("nobody listens there", ""))), timeout_us=STEP_US)

    from afore.tools.doctor_meeting import Place

    PLACE = Place("tcp", "", 1, 16, "00", "")
    fabric = TcpFabric(TcpConfig())
    await fabric.listen(fabric.address, answer)
    try:
        found = failed(await examine(fabric.address), "tcp way back")
    finally:
        await fabric.close()
    assert "nobody listens there" in found.found
    assert "firewall" in found.mend


def identity(**changes: object) -> ClusterIdentity:
    fields: dict[str, object] = {
        "cluster": "doctor_test", "wire": WIRE_VERSION, "nonce": "n", "host": host_id(), "node": "", "hub": "hub",
        "door_pid": 7, "counts": dict.fromkeys(ROLES, 1), "config": {}, "model": "m",
    }  # fmt: skip
    return ClusterIdentity(**{**fields, **changes})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def rendezvous(said: ClusterIdentity | None, secret: bytes | None = None) -> AsyncIterator[str]:
    host = await Host.listen("127.0.0.1", 0)
    if said is not None:
        host.publish(said, secret)
    try:
        yield host.where
    finally:
        host.close()


@pytest.mark.slow
async def test_the_rendezvous_of_a_door_on_several_nodes() -> None:
    hub = TcpFabric(TcpConfig(secret=SECRET))
    await hub.listen(hub.address, lambda channel: channel.close())
    cluster = identity(node="a", hub=str(RoutedAddress("a", "hub", {"tcp": hub.address})))
    try:
        async with rendezvous(cluster, SECRET) as where:
            checks = await examine(where, SECRET, SILENCE_US)
            assert {check.status for check in checks} == {"ok"}
            assert [check.name for check in checks][4:] == ["rendezvous", "hub route", "hub connect", "hello", "proof"]
            assert "cluster 'doctor_test'" in checks[4].found
            failed(await examine(where, SECRET + b"?", SILENCE_US), "rendezvous")
    finally:
        await hub.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "step", "word"),
    [
        (None, "rendezvous", "starting"),
        (identity(), "hub", "ended"),
        (identity(host="another"), "hub", "another machine"),
        (identity(wire=0), "rendezvous", "wire version 0"),
        (identity(node="a", hub="a;hub"), "hub", "over shm only"),
    ],
)
async def test_a_rendezvous_that_leads_nowhere(said: ClusterIdentity | None, step: str, word: str) -> None:
    async with rendezvous(said) as where:
        assert word in failed(await examine(where, hello_us=SILENCE_US), step).found


def test_addresses() -> None:
    assert parse_peer("h", 5) == ("h", 5)
    assert parse_peer("h:6", 5) == ("h", 6)
    assert parse_peer("::1", 5) == ("::1", 5)
    assert parse_peer("[::1]:6", 5) == ("::1", 6)
    with pytest.raises(ConfigError, match="--peer"):
        parse_peer("h:x", 5)


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.main(["--serve", "--peer", "h"]) == 2
    assert doctor.main(["--listen", "127.0.0.1:0"]) == 2
    assert doctor.main(["--serve", "--listen", "192.0.2.1:0"]) == 2
    assert doctor.main(["--peer", "h", "--secret-file", str(tmp_path / "none")]) == 2
    assert "lies beyond this machine, and there is no secret" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "afore.tools.doctor", "--serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[2].rstrip(";")
            assert doctor.main(["--json", "--peer", address]) == 0
            assert '"ok": true' in capsys.readouterr().out
        finally:
            server.terminate()
        assert server.wait(20) == 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("drips", [False, True])
def test_what_listens_and_speaks_another_language_ends_nothing_but_the_examination(drips: bool) -> None:
    """Torch's client of a store may still be at it when the examination is over."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=_babble, args=(listener, drips, over), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "afore.tools.doctor", "--json", "--peer", address],
            capture_output=True,
            text=True,
            timeout=300,
        )
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(60)
    assert done.returncode == 1
    assert '"ok": false' in done.stdout
    assert done.stderr == ""


def _babble(listener: socket.socket, drips: bool, over: threading.Event) -> None:
    """200 bytes that mean nothing to each client: at once, or one now and then."""
    noise = random.Random(7).randbytes(200)
    with contextlib.suppress(OSError):
        while not over.is_set():
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                for byte in noise if drips else ():
                    client.sendall(bytes([byte]))
                    over.wait(0.3)
                if not drips:
                    client.sendall(noise)
                over.wait(20)
