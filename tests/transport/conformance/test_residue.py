"""What counts as left behind by a fabric: its own sockets, and nobody else's."""

from __future__ import annotations

import socket

from tests.transport.conformance.worlds import TcpWorld, listeners


def listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    assert any(str(sock.getsockname()[1]) in name for name in listeners().values())
    return sock


async def test_a_stranger_s_socket_is_no_residue_and_one_of_later_is() -> None:
    with listening():
        world = TcpWorld()
        assert world.residue() == []
        with listening() as later:
            assert world.residue() == [f"listens at {later.getsockname()}"]
        assert world.residue() == []
        await world.close()
