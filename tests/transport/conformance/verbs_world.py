"""The verbs fabric for the suite: one world for each binding of libibverbs. They join where the option ``--verbs`` names them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.fabric import VerbsFabric
from afore.transport.verbs.wire import ENDPOINT_BYTES
from tests.transport.conformance.worlds import CREDITS, MESSAGE_LIMIT, TcpWorld
from tests.transport.verbs.soft_device import TABLE, SoftBinding, Wire

COUNTED = ("qp", "cq", "mr", "pd", "ctx")


class VerbsWorld(TcpWorld):
    """Queue pairs of this machine's RDMA device, met over the loopback interface."""

    bulk = 1_000
    lives = 16
    networked = False
    """No relay stands between two queue pairs."""
    link_terms = (ENDPOINT_BYTES, 0)
    api = "auto"

    def __init__(self) -> None:
        super().__init__()
        self._before = resources()

    def verbs_config(self, label: str, **changes: Any) -> VerbsConfig:
        options: dict[str, Any] = {
            "api": self.api,
            "secret": self._secret,
            "label": label,
            "credits": CREDITS,
            "message_limit": MESSAGE_LIMIT,
            "handshake_timeout_us": 20e6,
        }
        return VerbsConfig(**options | {key: value for key, value in changes.items() if value is not None})

    def make(self, label: str, **changes: Any) -> Any:
        fabric = VerbsFabric(self.verbs_config(label, **changes))
        self._fabrics.append(fabric)  # type: ignore[arg-type]  # closed like the others
        return fabric

    def refusals(self, fabric: object) -> dict[str, int]:
        assert isinstance(fabric, VerbsFabric)
        return dict(fabric.refusals)

    def puppet_spec(self, label: str) -> dict[str, Any]:
        return {"fabric": "verbs", "api": self.api, "secret": self._secret.hex(), "label": label, "credits": CREDITS}

    async def close(self) -> None:
        await super().close()
        after = resources()
        left = {name: (self._before[name], after[name]) for name in COUNTED if after[name] > self._before[name]}
        assert not left, f"the device holds more than before the test: {left}"


class SoftVerbsWorld(VerbsWorld):
    """Over a strict device of this process, on every machine: what needs no hardware to go wrong goes wrong here."""

    bulk = 10_000
    lives = 40
    crosses_processes = False

    def __init__(self) -> None:
        TcpWorld.__init__(self)
        self.wire = Wire()

    def make(self, label: str, **changes: Any) -> Any:
        fabric = VerbsFabric(self.verbs_config(label, **changes), binding=SoftBinding(self.wire), table=TABLE)
        self._fabrics.append(fabric)  # type: ignore[arg-type]  # closed like the others
        return fabric

    async def close(self) -> None:
        await TcpWorld.close(self)
        assert self.wire.living() == (0, 0), "queue pairs or registrations were left"


class LaggingVerbsWorld(SoftVerbsWorld):
    """Requests take effect some turns of the event loop after they were posted."""

    loops = ("asyncio",)
    bulk = 2_000

    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire(lag=5)


class PyverbsWorld(VerbsWorld):
    """Over rdma-core's own binding."""

    api = "pyverbs"


class IbverbsWorld(VerbsWorld):
    """Over PyPI's."""

    api = "ibverbs"


VERBS_WORLDS: dict[str, type[VerbsWorld]] = {"pyverbs": PyverbsWorld, "ibverbs": IbverbsWorld}


def resources() -> dict[str, int]:
    """What the kernel holds for RDMA, of all processes, by kind."""
    shown = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True).stdout
    counts = dict.fromkeys(COUNTED, 0)
    for device in json.loads(shown):
        for name in COUNTED:
            counts[name] += int(device.get(name, 0))
    return counts
