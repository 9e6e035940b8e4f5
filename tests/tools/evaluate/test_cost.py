"""What a target costs in virtual time, as far as it can be counted: nobody's clock is asked."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from afore.core.virtual_loop import VirtualLoop
from afore.serving.virtual import Ask, running_virtual
from afore.testing import run_virtual
from afore.tools.evaluate.cell import Cell, demand_key
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.demand import demand_of
from afore.tools.evaluate.profiles import cut_to
from afore.tools.evaluate.world import world_of
from afore.workers.device.hardware import read_profile

FFN, ATTENTION = 4, 2
CELL = Cell(policy="afore", attention=ATTENTION, ffn=FFN, prefill=1, rows=8, layers=6, warm=1, steps=6)


def costs(tokens: int) -> dict[str, Any]:
    """Callbacks of the loop, decoded entries, targets, and objects in cycles, of a run in which requests get so many tokens."""
    profile = cut_to(read_profile(CELL.profile), CELL.layers)
    key = demand_key(CELL, read_profile(CELL.profile))
    config, emulation = world_of(CELL, profile, key.layers, demand_of(key), CopySamples(CELL.ffn))
    asks = [Ask(prompt=(0,) * 16, max_new_tokens=tokens)] * (ATTENTION * CELL.microbatches * CELL.rows)

    async def main() -> dict[str, Any]:
        async with running_virtual(config, emulation) as cluster:
            await cluster.ask_all(asks)
            counters = (await cluster.client.stats())["counters"]
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            return {
                "targets": counters["targets"],
                "callbacks": loop.callbacks,
                "decoded": cluster.world.decoders.decoded,
            }

    gc.collect()
    gc.disable()
    try:
        return {**run_virtual(main), "garbage": gc.collect()}
    finally:
        gc.enable()


def test_a_target_costs_a_few_callbacks_of_each_worker_and_one_decoding() -> None:
    short, long = costs(3), costs(8)
    targets, callbacks, decoded = (long[name] - short[name] for name in ("targets", "callbacks", "decoded"))
    assert targets >= 5 * CELL.microbatches * CELL.layers
    assert decoded == targets, "all FFN workers of a process share a decoding"
    # What is left in cycles is of requests and their tokens.
    assert long["garbage"] - short["garbage"] < 10 * targets, "what a target made is gone with its last reference"
    per_target = callbacks / targets
    # Each FFN worker: bells, turn, inputs, stream and replies; each attention worker: three pieces of work, replies and hand-overs.
    assert per_target <= 12 * FFN + 10 * ATTENTION, f"{per_target:.1f} callbacks of a target"
