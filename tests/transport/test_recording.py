"""The recording fabric changes nothing and writes everything down; the conformance suite's promises are the wrapped fabric's."""

from __future__ import annotations

from pathlib import Path

import pytest

from afore.core.clock import WallClock
from afore.core.errors import LinkClosed
from afore.transport.api import Channel, Lane
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.recording import RecordingFabric
from afore.transport.wire_file import PAYLOAD_LIMIT, WireFile

SOON_US = 5e6


async def test_writes_and_messages_are_recorded_and_arrive(tmp_path: Path) -> None:
    clock = WallClock()
    network = LoopbackNetwork(clock)
    left = RecordingFabric(LoopbackFabric(network, "left"), str(tmp_path), "attention-0", clock)
    right = RecordingFabric(LoopbackFabric(network, "right"), str(tmp_path), "ffn-0", clock)
    heard: list[dict[str, object]] = []

    async def handle(channel: Channel) -> None:
        heard.append(await channel.receive(timeout_us=SOON_US))
        await channel.send({"answer": 2}, timeout_us=SOON_US)

    await right.listen("right", handle)
    region = right.register(PAYLOAD_LIMIT + 64, label="bells")
    link = await left.connect("right", Lane.DATA, timeout_us=SOON_US)
    await link.write(region.key, 8, b"hello", notify=7, timeout_us=SOON_US)
    await link.write(region.key, 0, bytes(PAYLOAD_LIMIT + 1), timeout_us=SOON_US)
    into = bytearray(4)
    await link.read(region.key, 8, memoryview(into), timeout_us=SOON_US)
    assert [one.immediate for one in await region.notified(timeout_us=SOON_US)] == [7]
    channel = await left.dial("right", timeout_us=SOON_US)
    await channel.send({"ask": 1}, timeout_us=SOON_US)
    assert await channel.receive(timeout_us=SOON_US) == {"answer": 2}
    await link.close()
    with pytest.raises(LinkClosed):
        await link.write(region.key, 0, b"", timeout_us=SOON_US)
    await left.close()
    await right.close()
    assert heard == [{"ask": 1}]

    said = [[kind, *rest] for kind, _, *rest in WireFile(tmp_path / "attention-0.wire").records()]
    number = region.key.region
    assert said[:3] == [
        ["write", "right", Lane.DATA, "right", number, 8, b"hello", 5, 7],
        ["write", "right", Lane.DATA, "right", number, 0, None, PAYLOAD_LIMIT + 1, None],
        ["read", "right", Lane.DATA, "right", number, 8, 4],
    ]
    assert said[3:5] == [
        ["message", "out", 1, "right", {"ask": 1}],
        ["message", "in", 1, "right", {"answer": 2}],
    ]
    assert said[-1][0] == "end"
    theirs = [[kind, *rest] for kind, _, *rest in WireFile(tmp_path / "ffn-0.wire").records()]
    assert theirs[0][:2] == ["region", "bells"]
    assert [one[1] for one in theirs if one[0] == "message"] == ["in", "out"]
