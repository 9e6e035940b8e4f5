"""The same requests twice: through real processes with the bundled model, and in virtual time on what was recorded of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afore.cluster import Cluster
from afore.core.clock import Clock
from afore.core.config import BatchOptions, PlannerOptions, RunConfig
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, Topology
from afore.core.trace import Tracer
from afore.models.bundle import bundled_prompts
from afore.models.counted import counted_spec
from afore.serving.virtual import Ask, Emulation, run_emulated
from afore.tools.calibrate.measure import TILE_TOKENS
from afore.tools.evaluate.demand import DemandKey, demand_of
from afore.tools.evaluate.reality_fit import Handovers
from afore.tools.trace_files import open_directory
from afore.workers.device.hardware import HardwareProfile

REAL, VIRTUAL, TRACE = "real", "virtual", "run.trace.npz"
SPANS = "spans"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is run, in both worlds."""

    attention: int
    ffn: int
    microbatches: int
    slots: int
    requests: int
    tokens: int
    policy: str = "afore"

    def config(self, directory: Path, *, emulated: bool, charge_us: float = 0.0) -> RunConfig:
        """The run's configuration; it records into ``directory``."""
        return RunConfig(
            policy=self.policy,
            topology=Topology(
                attention=self.attention, ffn=self.ffn, microbatches=self.microbatches, redundant_slots=self.slots
            ),
            planner=PlannerOptions(tile_tokens=TILE_TOKENS, charge_us=charge_us if emulated else 0.0),
            batch=BatchOptions(max_num_seqs=self.requests, kv_blocks=None if not emulated else 64 * self.requests),
            trace=None if emulated else str(directory / SPANS),
            record=str(directory / TRACE),
        )


async def run_really(shape: Shape, directory: Path, *, limit_s: float) -> None:
    """Processes, shared memory, the bundled model; requests all at once. Raises ``ConfigError`` when they take too long."""
    prompts = bundled_prompts()
    config = shape.config(directory, emulated=False)
    try:
        async with asyncio.timeout(limit_s), Cluster.start(config=config) as cluster:

            async def one(number: int) -> None:
                prompt = prompts[number % len(prompts)].prompt
                stream = cluster.generate(prompt, max_new_tokens=shape.tokens, ignore_eos=True)
                async with contextlib.aclosing(stream) as tokens:
                    async for _ in tokens:
                        pass

            await asyncio.gather(*(one(number) for number in range(shape.requests)))
    except TimeoutError as error:
        raise ConfigError(
            "reality",
            f"the processes took longer than {limit_s:g} s",
            "give fewer --requests or --tokens, or a --limit-s",
        ) from error


def run_virtually(shape: Shape, directory: Path, real: Path, profile: HardwareProfile, host: Handovers) -> None:
    """The same requests on the recorded demand and the fitted profile. Raises what a role does."""
    model = profile.shape
    moe, dense = int(model.layers.value - model.dense_layers.value), int(model.dense_layers.value)
    demand = demand_of(
        DemandKey(
            workload="chat",
            layers=moe,
            experts=int(model.experts.value),
            top_k=int(model.top_k.value),
            microbatches=shape.microbatches,
            tokens=shape.requests,
            steps=1 << 20,
            routing=str(real / TRACE),
        )
    )
    costs = host.on(replace(profile.costs(workers=shape.ffn), tile_tokens=TILE_TOKENS))
    spans = directory / SPANS
    spans.mkdir(parents=True, exist_ok=True)

    def tracer(name: str, clock: Clock) -> Tracer:
        return Tracer(name, clock, spans)

    emulation = Emulation(
        spec=counted_spec(
            num_experts=int(model.experts.value),
            experts_per_token=int(model.top_k.value),
            moe_layers=moe,
            dense_layers=dense,
        ),
        demand=demand,
        profile=costs,
        collectives=False,
        latency_us=host.message,
        record=False,
        make_tracer=tracer,
        free_prefill=True,
    )
    prompts = bundled_prompts()
    asks = [
        Ask(prompt=(0,) * max(1, len(prompts[number % len(prompts)].prompt) // 4), max_new_tokens=shape.tokens)
        for number in range(shape.requests)
    ]
    run_emulated(shape.config(directory, emulated=True, charge_us=costs.planner_us), asks, emulation)


@dataclass(frozen=True, slots=True)
class Passed:
    """One target's way: from the beginning of its attention to the last worker's reply."""

    step: int
    tokens: int
    took_us: float


def passed(directory: Path) -> list[Passed]:
    """Every target of a run's spans that began and was answered. Raises ``ConfigError`` where there is none."""
    files, _ = open_directory(directory / SPANS)
    began: dict[Target, int] = {}
    tokens: dict[Target, int] = defaultdict(int)
    ended: dict[Target, int] = {}
    for file in files:
        role = file.header.role
        for _, span in file.records():
            target = span.target
            if target is None or span.kind != "span":
                continue
            if role == ATTENTION and span.name == "attention":
                began[target] = min(began.get(target, span.start_ns), span.start_ns)
                tokens[target] += int(span.args.get("tokens", 0))
            elif role == FFN and span.name == "reply":
                ended[target] = max(ended.get(target, 0), span.end_ns)
    found = [
        Passed(target.step, tokens[target], (ended[target] - began[target]) / 1e3)
        for target in sorted(began, key=lambda one: (one.step, one.layer, one.microbatch))
        if target in ended and ended[target] > began[target]
    ]
    if not found:
        raise ConfigError(str(directory), "no target began and was answered", "run it again")
    return found


def of_size(found: Sequence[Passed], tokens: int) -> list[Passed]:
    """Those with that many rows."""
    return [one for one in found if one.tokens == tokens]
