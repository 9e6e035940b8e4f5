"""This machine's RDMA device, for tests that take one."""

from __future__ import annotations

from pathlib import Path

import pytest

from afore.core.errors import AforeError
from afore.transport.verbs.binding import load_binding
from afore.transport.verbs.choice import choose_path
from afore.transport.verbs.table import read_table


def need_device(request: pytest.FixtureRequest, api: str) -> str:
    """Its name; without one, or the binding, skips with the reason, unless ``--require rdma`` says that there must be one."""
    try:
        path = choose_path(read_table())
        load_binding(api)
    except AforeError as error:
        if "rdma" in request.config.getoption("--require"):
            pytest.fail(f"RDMA over {api} is required here, and {error}")
        pytest.skip(f"{error} (`make softroce` runs this over an emulated device)")
    return path.device


def sent_packets(device: str) -> int:
    """Packets that the device has sent so far."""
    return sum(
        int(file.read_text()) for file in Path("/sys/class/infiniband", device, "ports").glob("*/hw_counters/sent_pkts")
    )
