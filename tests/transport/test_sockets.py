"""Unix sockets in bad conditions: long paths, full backlogs, full tables, leftovers."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest

from afore.core.clock import deadline
from afore.core.errors import ConfigError, DeadlineExceeded, HostError, PeerLost
from afore.transport import sockets
from afore.transport.unix_sockets import UnixListener, connect_unix, somebody_listens


class Guests:
    """Those who were let in."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.sockets: list[socket.socket] = []

    def __call__(self, sock: socket.socket) -> None:
        self.sockets.append(sock)
        self.came.set()

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


async def test_a_path_longer_than_an_address_works_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 120) / ("b" * 120)
    folder.mkdir(parents=True)
    guests = Guests()
    path = str(folder / "hub")
    listener = UnixListener(path, guests)
    with await connect_unix(path):
        await guests.came.wait()
    assert somebody_listens(path)
    listener.close()
    listener.close()
    guests.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(PeerLost):
        await connect_unix(path)
    with pytest.raises(ConfigError, match="too long"):
        await connect_unix(str(folder / ("c" * 100)))


async def test_a_leftover_is_replaced_and_a_live_listener_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "hub")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert not somebody_listens(path)
    guests = Guests()
    listener = UnixListener(path, guests)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(HostError, match="in use"):
        UnixListener(path, guests)
    with await connect_unix(path):
        await guests.came.wait()
    listener.close()
    guests.close()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PeerLost):
        await connect_unix(str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError):
        UnixListener(str(tmp_path / "nowhere" / "hub"), guests)


async def test_a_full_backlog_is_waited_out(tmp_path: Path) -> None:
    path = str(tmp_path / "hub")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        first = await connect_unix(path)
        assert somebody_listens(path)
        with pytest.raises(DeadlineExceeded):
            async with deadline(10_000, peer=path, operation="connect"):
                await connect_unix(path)
        waiting = asyncio.create_task(connect_unix(path))
        await asyncio.sleep(0)
        busy.accept()[0].close()
        second = await waiting
        first.close()
        second.close()


async def test_a_full_table_of_descriptors_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_RETRY_ACCEPT_S", 0)
    guests = Guests()
    path = str(tmp_path / "hub")
    listener = UnixListener(path, guests)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    # Room for the client's end and nothing else.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, limits[1]))
    try:
        client = await connect_unix(path)
        with pytest.raises(HostError, match="open files"):
            await connect_unix(path)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "ulimit -n" in caplog.text
        assert not guests.sockets
        # Looked at again and again, said ever more rarely.
        for _ in range(10_000):
            if listener.pauses >= 40:
                break
            await asyncio.sleep(0)
        said = [record.message for record in caplog.records if "cannot accept" in record.message]
        assert [line.partition(", ")[2].split()[0] for line in said] == ["1", "2", "4", "8", "16", "32"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await asyncio.wait_for(guests.came.wait(), 20)
    client.close()
    guests.close()
    listener.close()
