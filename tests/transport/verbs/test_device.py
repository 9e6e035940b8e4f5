"""Each binding over this machine's own RDMA device, where there is one; ``make softroce`` makes one and runs the whole suite."""

from __future__ import annotations

import pytest

from afore.transport.api import Lane
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.fabric import VerbsFabric
from tests.softroce.device import need_device
from tests.transport.conformance.helpers import take

T_US = 20e6


@pytest.mark.parametrize("api", ["pyverbs", "ibverbs"])
async def test_a_write_and_its_notification_and_a_read(api: str, request: pytest.FixtureRequest) -> None:
    need_device(request, api)
    config = VerbsConfig(api=api, secret=b"the secret of this run, long enough")
    near, far = VerbsFabric(config), VerbsFabric(config)
    region = far.register(4096, label="r")
    link = await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    for nbytes in (1, 4000):
        await link.write(region.key, 5, b"\xa5" * nbytes, notify=nbytes, timeout_us=T_US)
        (told,) = await take(region, 1)
        assert (told.peer, told.immediate) == (near.address, nbytes)
        assert region.buffer[5 : 5 + nbytes] == b"\xa5" * nbytes
    back = bytearray(4096)
    await link.read(region.key, 0, back, timeout_us=T_US)
    assert back == region.buffer
    await near.close()
    await far.close()
