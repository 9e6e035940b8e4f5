"""Two hosts on one machine: two network namespaces with one cable between them. Processes in them share no address."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """What runs ``arguments`` there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def missing() -> str:
    """Why this machine cannot have them; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    name = f"afore-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"the kernel makes no network namespace: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@contextmanager
def two_hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    """The two; skips with the reason where there can be none, unless ``--require namespaces`` says that there must be."""
    reason = missing()
    if reason:
        if "namespaces" in request.config.getoption("--require"):
            pytest.fail(f"namespaces are required here, and {reason}")
        pytest.skip(reason)
    number = os.getpid() % 250
    hosts = Host(f"afore-a{os.getpid()}", f"10.213.{number}.1"), Host(f"afore-b{os.getpid()}", f"10.213.{number}.2")
    cables = f"va{os.getpid()}", f"vb{os.getpid()}"
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            _ip("link", "set", cable, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", cable)
            _ip("-n", host.namespace, "link", "set", cable, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
