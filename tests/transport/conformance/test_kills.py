"""Peers killed at every step: what they leave is nothing. Two hundred of them: ``python -m tests.transport.conformance.kills``."""

from __future__ import annotations

import pytest

from tests.transport.conformance.kills import kill_peers
from tests.transport.conformance.worlds import StreamWorld

pytestmark = [pytest.mark.processes, pytest.mark.slow]
COUNT = 10


async def test_peers_killed_at_every_step_leave_nothing(crossing_world: StreamWorld) -> None:
    survivor = await kill_peers(crossing_world, COUNT, seed=7)
    assert survivor.kills == COUNT
    assert survivor.errors.keys() <= {"PeerLost", "RegionRevoked", "WireError"}
