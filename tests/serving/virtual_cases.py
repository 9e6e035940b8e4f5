"""The virtual world of the smoke test, and a way to run it in a process of its own: ``python -m tests.serving.virtual_cases``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

from afore.core.config import BatchOptions, CostOptions, PlannerOptions, RunConfig, TimeOptions
from afore.core.topology import Topology
from afore.models.emulated import emulated_spec, emulated_tokens
from afore.serving.virtual import Ask, EmulatedRun, Emulation, VirtualCluster, run_emulated
from afore.workers.device.profile import LAPTOP_EMULATED

FFN_BOUND = dataclasses.replace(
    LAPTOP_EMULATED,
    name="ffn-bound",
    source="made up: experts outlast attention, and copies fit under two targets",
    tile_tokens=1,
    tile_us=30.0,
    attention_us=20.0,
    attention_token_us=1.0,
    gate_us=5.0,
)
SPEC = emulated_spec(num_experts=64, experts_per_token=4, moe_layers=3, expert_size=2000)
SMOKE = RunConfig(
    topology=Topology(attention=2, ffn=8, microbatches=3, redundant_slots=4),
    planner=PlannerOptions(tile_tokens=1),
    costs=CostOptions(tile_us=1000.0, copy_us=1.0, window_us=0.0, adapt=False),
    batch=BatchOptions(max_num_seqs=24, block_tokens=4, kv_blocks=40),
    times=TimeOptions(target_s=0.05, verdict_s=0.2, step_s=1.0, lease_s=0.5, control_s=1.0, join_s=1.0, shutdown_s=0.1),
    seed=3,
)
"""8 FFN workers, 3 MoE layers, M = 3. Compute is dear and copies are cheap to the planner, with or without a window."""
EMULATION = Emulation(spec=SPEC, profile=FFN_BOUND)
QUIET = dataclasses.replace(EMULATION, record=False)
"""Without the log: faster."""
SMALL = dataclasses.replace(
    SMOKE,
    topology=Topology(attention=2, ffn=3, microbatches=3, redundant_slots=2),
    batch=BatchOptions(max_num_seqs=12, block_tokens=4, kv_blocks=30),
)
"""For runs that are repeated over many seeds."""


def asks(count: int = 9, new_tokens: int = 6, apart_us: float = 0.0) -> list[Ask]:
    """Prompts of different lengths, a few tokens each."""
    return [
        Ask(
            prompt=tuple((7 * number + 3 * j) % SPEC.vocab_size for j in range(3 + 2 * number)),
            max_new_tokens=new_tokens + number % 3,
            at_us=number * apart_us,
        )
        for number in range(count)
    ]


def prescribed(requests: list[Ask], config: RunConfig = SMOKE) -> list[list[int]]:
    """The tokens that the model prescribes for them."""
    return [emulated_tokens(SPEC, ask.prompt, ask.max_new_tokens, seed=config.seed) for ask in requests]


def smoke(policy: str = "afore", **kwargs: Any) -> EmulatedRun:
    """The smoke test's run."""
    return run_emulated(dataclasses.replace(SMOKE, policy=policy), asks(), EMULATION, **kwargs)


async def whatever_comes(cluster: VirtualCluster, requests: list[Ask]) -> list[list[int] | BaseException]:
    """Tokens, or what each request ended with."""

    async def one(ask: Ask) -> list[int]:
        await cluster.network.clock.sleep_us(ask.at_us)
        return await cluster.ask(ask)

    return await asyncio.gather(*(one(ask) for ask in requests), return_exceptions=True)


FORBIDDEN = frozenset(
    {
        "time.sleep",
        "socket.__new__",
        "socket.connect",
        "socket.bind",
        "subprocess.Popen",
        "os.fork",
        "os.posix_spawn",
        "_thread.start_new_thread",
    }
)
"""Audit events of calls that block, or that leave the process, and that no event loop sees."""


def main() -> None:
    """Runs the smoke test's run, with blocking calls forbidden; prints what it did as JSON."""
    running = False

    def forbid(event: str, args: tuple[object, ...]) -> None:
        if running and event in FORBIDDEN:
            raise RuntimeError(f"a role called {event}{args}")

    sys.addaudithook(forbid)
    running = True
    run = smoke()
    running = False
    json.dump({"digest": run.log.digest(), "tokens": run.tokens, "hash": hash("afore")}, sys.stdout)


if __name__ == "__main__":
    main()
