"""What peers run that are killed: one life with a survivor, counted in lines of the transport."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType
from typing import Any

from afore.transport.api import Lane, RegionKey
from tests.transport.conformance.puppet import make_fabric, plain_key

TRANSPORT = f"{os.sep}afore{os.sep}transport{os.sep}"
WRITES = 6
WORD = 8
STEP_US = 5e6
"""For one step of a life; a dead peer is noticed long before."""


class Doom:
    """Kills this process at the ``at``-th line of the transport."""

    def __init__(self, at: int) -> None:
        self.lines = 0
        self._at = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if TRANSPORT in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


async def _life(spec: dict[str, Any], survivor: str, hub: str, key: RegionKey) -> None:
    fabric = make_fabric(spec)
    region = fabric.register(4096, label="victim")
    link = await fabric.connect(survivor, Lane.DATA, timeout_us=STEP_US)
    channel = await fabric.dial(hub, timeout_us=STEP_US)
    await channel.send({"endpoint": fabric.address, "key": plain_key(region.key)}, timeout_us=STEP_US)
    for number in range(WRITES):
        await link.write(key, number * WORD, number.to_bytes(WORD, "little"), notify=number, timeout_us=STEP_US)
    await region.notified(timeout_us=STEP_US)
    region.close()
    await link.close()
    await channel.close()
    await fabric.close()


def live(doom_at: int, lines: Any, *life: Any) -> None:
    """What a victim's process runs; ``lines`` gets how many lines it lived, if it lived to the end."""
    doom = Doom(doom_at)
    sys.settrace(doom)
    try:
        asyncio.run(_life(*life))
    finally:
        sys.settrace(None)
    lines.value = doom.lines
