"""The doctor's checks of what can carry bytes between roles."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from afore.core.errors import ConfigError, HostError
from afore.core.topology import is_loopback
from afore.tools.doctor_check import Check
from afore.tools.doctor_rdma import NO_DEVICE, SYS, choice
from afore.transport.verbs.binding import Binding, load_binding


def check_fabrics(sys: Path = SYS, load: Callable[[str], Binding] = load_binding) -> list[Check]:
    """The four fabrics, and whether each would open here."""
    return [
        Check("fabric loopback", "ok", "one process"),
        Check("fabric shm", "ok", "processes of one machine; needs shared memory, eventfd (above)"),
        check_tcp(),
        check_verbs(sys, load),
    ]


def check_tcp(host: str = "127.0.0.1") -> Check:
    """A connection to this machine itself, and the addresses at which others may reach it."""
    try:
        with (
            socket.create_server((host, 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=5.0) as client,
            listener.accept()[0] as server,
        ):
            client.sendall(b"?")
            server.settimeout(5.0)
            works = server.recv(1) == b"?"
    except OSError as error:
        return Check("fabric tcp", "fail", f"{host}: {error}", "bring the loopback interface up: ip link set lo up")
    if not works:
        return Check("fabric tcp", "fail", f"{host}: what is sent does not come", "see this machine's firewall rules")
    others = ", ".join(own_addresses()) or "none"
    return Check("fabric tcp", "ok", f"processes of any machines; addresses of this one beyond loopback: {others}")


def own_addresses() -> list[str]:
    """``eth0 10.0.0.7``: the addresses of this machine's interfaces without loopback and link-local ones."""
    import psutil

    found = []
    for interface, addresses in sorted(psutil.net_if_addrs().items()):
        for one in addresses:
            host = one.address.partition("%")[0]
            if (
                one.family in (socket.AF_INET, socket.AF_INET6)
                and not is_loopback(host)
                and not host.startswith("fe80")
            ):
                found.append(f"{interface} {host}")
    return found


def check_verbs(sys: Path = SYS, load: Callable[[str], Binding] = load_binding) -> Check:
    """Whether a verbs endpoint would open here; without a device there is nothing to miss."""
    try:
        path = choice(sys)
        if path is None:
            return Check("fabric verbs", "ok", f"not here: {NO_DEVICE}")
        binding = load("auto")
    except (HostError, ConfigError) as error:
        return Check("fabric verbs", "warn", f"not here: {error.problem}", error.remedy)
    return Check("fabric verbs", "ok", f"{path.device} port {path.port}, {path.gid}, by {binding.name}")
