"""Handover: order, waiting, and a taker that is cancelled."""

from __future__ import annotations

import asyncio

from afore.core.handover import Handover
from afore.testing import virtual_test


@virtual_test(seeds=(None, 1, 2, 3))
async def test_items_come_in_order_whether_or_not_somebody_waits() -> None:
    handover: Handover[int] = Handover()
    for item in (1, 2):
        handover.put(item)
    assert [await handover.take(), await handover.take()] == [1, 2]
    waiting = asyncio.create_task(handover.take())
    await asyncio.sleep(1)
    assert not waiting.done()
    handover.put(3)
    handover.put(4)
    assert await waiting == 3
    assert len(handover) == 1
    assert await handover.take() == 4


@virtual_test(seeds=(None, 1, 2, 3))
async def test_what_was_put_for_a_taker_that_is_cancelled_is_still_there() -> None:
    handover: Handover[str] = Handover()
    taker = asyncio.create_task(handover.take())
    await asyncio.sleep(1)
    handover.put("kept")
    taker.cancel()
    await asyncio.wait({taker})
    assert taker.cancelled()
    assert await handover.take() == "kept"
