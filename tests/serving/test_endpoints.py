"""Endpoints between nodes are made of the run's options."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.link_options import TcpOptions
from afore.serving.endpoints import LOOPBACK, far_fabrics
from afore.transport.api import Lane

SECRET = b"the secret of this run, long enough"


def kept_alive_after_s() -> set[int]:
    """Of every TCP connection of this process: the silence after which the kernel asks for the peer."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    found.add(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
        except OSError:
            pass  # closed meanwhile
    return found


async def test_connections_between_nodes_are_kept_alive_as_the_run_says() -> None:
    config = RunConfig(tcp=TcpOptions(keepalive_idle_s=4321))
    near, far = (far_fabrics(config, "tcp", host=LOOPBACK, secret=SECRET, label=label)["tcp"] for label in ("a", "b"))
    try:
        assert 4321 not in kept_alive_after_s()
        link = await near.connect(far.address, Lane.DATA, timeout_us=5e6)
        assert 4321 in kept_alive_after_s()
        await link.close()
    finally:
        await near.close()
        await far.close()


def test_what_no_kernel_takes_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tcp\.keepalive_probes: 128 is out of range"):
        TcpOptions(keepalive_probes=128)
