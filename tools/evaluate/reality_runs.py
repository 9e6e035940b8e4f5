"""The same requests twice: through real processes with the bundled model, and in virtual time on what was recorded of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afore.cluster import Cluster
from afore.core.clock import Clock
from afore.core.config import BatchOptions, PlannerOptions, RunConfig
from afore.core.errors import ConfigError
from afore.core.topology import ATTENTION, FFN, Topology, member_name
from afore.core.trace import Tracer
from afore.models.bundle import bundled_prompts
from afore.models.counted import counted_spec
from afore.scheduler.traces import TraceReader
from afore.serving.virtual import Ask, Emulation, run_emulated
from afore.tools.calibrate.measure import TILE_TOKENS
from afore.tools.evaluate.demand import StoredDemand
from afore.tools.evaluate.reality_fit import Host, HostedCosts, hosted
from afore.tools.evaluate.reality_usage import Usage
from afore.workers.device.hardware import HardwareProfile

REAL, VIRTUAL, TRACE = "real", "virtual", "run.trace.npz"
SPANS, WIRE = "spans", "wire"


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
            record_wire=None if emulated else str(directory / WIRE),
        )

    def workers(self) -> tuple[tuple[str, int], ...]:
        """How many there are of each role that computes."""
        return ((ATTENTION, self.attention), (FFN, self.ffn))

    def __str__(self) -> str:
        return f"{self.attention} + {self.ffn}"


async def run_really(shape: Shape, directory: Path, *, limit_s: float) -> Usage:
    """Processes, shared memory, the bundled model; requests all at once. Raises ``ConfigError`` when they take too long."""
    prompts = bundled_prompts()
    config = shape.config(directory, emulated=False)
    usage = Usage(shape.requests, shape.tokens)
    try:
        async with asyncio.timeout(limit_s), Cluster.start(config=config) as cluster:

            async def one(number: int) -> None:
                prompt = prompts[number % len(prompts)].prompt
                stream = cluster.generate(prompt, max_new_tokens=shape.tokens, ignore_eos=True)
                async with contextlib.aclosing(stream) as tokens:
                    async for _ in tokens:
                        usage.token(number)

            await asyncio.gather(*(one(number) for number in range(shape.requests)))
    except TimeoutError as error:
        raise ConfigError(
            "reality",
            f"the processes took longer than {limit_s:g} s",
            "give fewer --requests or --tokens, or a --limit-s",
        ) from error
    return usage


def run_virtually(
    shape: Shape,
    directory: Path,
    real: Path,
    profile: HardwareProfile,
    host: Host,
    *,
    tokens: int,
    cores: int | None = None,
) -> None:
    """The same requests, on the demand of the odd steps in which the real run had ``tokens`` rows. Raises what a role does.

    ``cores``: all workers share so many; none: what waiting for one took is in the host's parts.
    """
    model = profile.shape
    moe, dense = int(model.layers.value - model.dense_layers.value), int(model.dense_layers.value)
    demand = recorded_demand(real / TRACE, tokens, shape.microbatches)
    costs = replace(profile.costs(workers=shape.ffn), tile_tokens=TILE_TOKENS)
    spans = directory / SPANS
    spans.mkdir(parents=True, exist_ok=True)

    def tracer(name: str, clock: Clock) -> Tracer:
        return Tracer(name, clock, spans)

    def on(rank: int) -> HostedCosts:
        return hosted(costs, host, rank=rank, layers=moe, microbatches=shape.microbatches)

    emulation = Emulation(
        spec=counted_spec(
            num_experts=int(model.experts.value),
            experts_per_token=int(model.top_k.value),
            moe_layers=moe,
            dense_layers=dense,
        ),
        demand=demand,
        profile=costs,
        profiles={member_name(role, rank): on(rank) for role, number in shape.workers() for rank in range(number)},
        cores=cores,
        collectives=False,
        latency_us=0.0,
        record=False,
        make_tracer=tracer,
        free_prefill=True,
    )
    prompts = bundled_prompts()
    asks = [
        Ask(prompt=(0,) * max(1, len(prompts[number % len(prompts)].prompt) // 4), max_new_tokens=shape.tokens)
        for number in range(shape.requests)
    ]
    run_emulated(shape.config(directory, emulated=True, charge_us=host.plan_us), asks, emulation)


def recorded_demand(path: Path, tokens: int, microbatches: int) -> StoredDemand:
    """What the targets of ``tokens`` rows in odd steps met, in their order. Raises ``ConfigError`` where there are none."""
    reader = TraceReader(path)
    header = reader.header
    steps: dict[tuple[int, int], dict[int, npt.NDArray[np.int32]]] = defaultdict(dict)
    for row in reader:
        full = row.demand_E is not None and int(row.demand_E.sum()) == tokens * header.top_k
        if full and row.target.step % 2:
            assert row.demand_E is not None
            steps[row.target.step, row.target.microbatch][row.target.layer] = row.demand_E
    table = [
        [layers[layer] for layer in range(header.layers)] for _, layers in sorted(steps.items()) if len(layers) == header.layers
    ]  # fmt: skip
    if not table:
        raise ConfigError("reality", f"no odd step had {tokens} rows in every layer", "give more --tokens")
    return StoredDemand(
        np.array(table, np.int32), microbatches=microbatches, top_k=header.top_k, source=f"{path.name}, odd steps"
    )
