"""One cell of the evaluation: a run of the whole system in virtual time, and what it showed, as plain JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from afore.core import control
from afore.core.config import BatchOptions, CostOptions, DeviceOptions, PlannerOptions, RunConfig, TimeOptions
from afore.core.topology import Topology
from afore.models.counted import counted_spec
from afore.serving.client import Event, failure
from afore.serving.virtual import Emulation, VirtualCluster, running_virtual
from afore.testing import run_virtual
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.demand import STATIC_IMBALANCE, WORKLOADS, DriftingDemand, prompt_lengths
from afore.tools.evaluate.options import Option, with_options
from afore.workers.device.hardware import HardwareProfile, read_profile

FORMAT = 1
"""Of a cell's JSON: a run of another format is run again."""
_BLOCK_TOKENS = 64
_LONGEST_PROMPT = 4096
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run. Two cells that are equal have the same result, byte for byte."""

    policy: str
    workload: str = "chat"
    profile: str = "a100-glm45air"
    attention: int = 4
    ffn: int = 8
    prefill: int = 4
    microbatches: int = 3
    slots: int = 8
    """R."""
    rows: int = 325
    """Requests of one attention worker in one microbatch."""
    layers: int = 0
    """MoE layers; 0: those of the profile's model."""
    warm: int = 5
    """Steps of each request before anything is measured."""
    steps: int = 25
    """Steps of each request that are measured."""
    redistribute_us: float = 0.0
    """What the policy puts on every target's critical path."""
    collectives: Literal["model-stream", "own-stream"] = "model-stream"
    colocated: bool = False
    """Attention on the FFN workers' devices."""
    imbalance: float = STATIC_IMBALANCE
    """Mean static imbalance of the demand; 1: uniform routing."""
    slow_worker: float = 1.0
    """How many times slower FFN worker 0 is."""
    options: tuple[Option, ...] = ()
    """Options of the run that differ from what the fields above say: (name as on the command line, value)."""
    seed: int = 0

    def key(self) -> str:
        """Names the cell's file."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return f"{self.policy.replace(':', '-')}-{self.workload}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def run_cell(cell: Cell) -> dict[str, Any]:
    """Runs a cell. Raises ``ConfigError`` for what cannot run, and whatever ends a role."""
    profile = read_profile(cell.profile)
    shape = profile.shape
    layers = cell.layers or int(shape.layers.value - shape.dense_layers.value)
    demand = DriftingDemand(
        WORKLOADS[cell.workload],
        num_layers=layers,
        num_experts=int(shape.experts.value),
        experts_per_token=int(shape.top_k.value),
        seed=cell.seed,
        imbalance=cell.imbalance,
        crc_steps=cell.warm + cell.steps,
    )
    samples = CopySamples(cell.ffn)
    config, emulation = _world(cell, profile, layers, demand, samples)
    window = run_virtual(lambda: _Run(cell, config, emulation).measured())
    return {
        "format": FORMAT,
        "cell": asdict(cell),
        "layers": layers,
        "demand_crc": demand.crc,
        **window,
        "copies": samples.summary(),
    }


def _world(
    cell: Cell, profile: HardwareProfile, layers: int, demand: DriftingDemand, samples: CopySamples
) -> tuple[RunConfig, Emulation]:
    shape = profile.shape
    costs = profile.costs(workers=cell.ffn, redistribute_us=cell.redistribute_us)
    seats = cell.attention * cell.microbatches * cell.rows
    per_request = -(-(_LONGEST_PROMPT + cell.warm + cell.steps + 8) // _BLOCK_TOKENS) + 1
    config = RunConfig(
        policy=cell.policy,
        topology=Topology(
            attention=cell.attention,
            ffn=cell.ffn,
            prefill=cell.prefill,
            microbatches=cell.microbatches,
            redundant_slots=cell.slots,
        ),
        planner=PlannerOptions(
            tile_tokens=costs.tile_tokens, charge_us=0.0 if cell.policy == "static" else costs.planner_us
        ),
        costs=CostOptions(
            tile_us=costs.tile_us,
            copy_us=costs.copy_ns(0) / 1e3,
            window_us=(cell.microbatches - 1) * (costs.experts_us + costs.tile_us),
        ),
        batch=BatchOptions(
            max_num_seqs=seats,
            max_waiting=2 * seats,
            block_tokens=_BLOCK_TOKENS,
            kv_blocks=per_request * cell.microbatches * cell.rows,
            prefill_chunk_tokens=0,
        ),
        device=DeviceOptions(name="emulated", collectives=cell.collectives),
        times=TimeOptions(step_s=_LONGEST_S, target_s=_LONGEST_S, verdict_s=_LONGEST_S, lease_s=_LONGEST_S),
        seed=cell.seed,
    )
    slow = _slower(costs, cell.slow_worker)
    emulation = Emulation(
        spec=counted_spec(
            num_experts=int(shape.experts.value),
            experts_per_token=int(shape.top_k.value),
            moe_layers=layers,
            dense_layers=int(shape.dense_layers.value),
        ),
        demand=demand,
        profile=costs,
        profiles={"ffn-0": slow} if cell.slow_worker != 1.0 else {},
        colocated=cell.colocated,
        latency_us=profile.wires.message_us.value,
        data_latency_us=profile.wire_us(cell.rows),
        record=False,
        free_prefill=True,
        make_tracer=samples.tracer,
    )
    return with_options(config, cell.options), emulation


def _slower(costs: Any, times: float) -> Any:
    from dataclasses import replace

    return replace(costs, tile_us=costs.tile_us * times, expert_us=costs.expert_us * times)


class _Run:
    """A closed batch: every request is there from the beginning and decodes until the last is measured."""

    def __init__(self, cell: Cell, config: RunConfig, emulation: Emulation) -> None:
        self._cell = cell
        self._config = config
        self._emulation = emulation
        self._seats = cell.attention * cell.microbatches * cell.rows
        self._times_ns: list[list[int]] = [[] for _ in range(self._seats)]
        self._left_to_warm = self._left = self._seats
        self._warm, self._done = asyncio.Event(), asyncio.Event()

    async def measured(self) -> dict[str, Any]:
        """The run's figures."""
        cell = self._cell
        lengths = prompt_lengths(WORKLOADS[cell.workload], self._seats, seed=cell.seed, most=_LONGEST_PROMPT)
        async with running_virtual(self._config, self._emulation) as cluster:
            tasks = [
                asyncio.create_task(self._request(cluster, number, length)) for number, length in enumerate(lengths)
            ]
            await self._reached(self._warm, tasks)
            cluster.world.prefill_is_free = False
            before = await cluster.client.stats()
            await self._reached(self._done, tasks)
            stats = await cluster.client.stats()
            await cluster.client.stop("the last request is measured")
            await asyncio.wait(tasks)
        return self._figures(before, stats)

    async def _reached(self, event: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        """Returns once the event is set. Raises what ended a request."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            for task in tasks:
                if task.done():
                    task.result()
            raise AssertionError("a request ended before it was measured")

    async def _request(self, cluster: VirtualCluster, number: int, length: int) -> None:
        cell, times_ns = self._cell, self._times_ns[number]
        warm, last = 2 + cell.warm, 2 + cell.warm + cell.steps
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(came: tuple[int, Event]) -> None:
            at_ns, event = came
            if not isinstance(event, control.TokenOut):
                if isinstance(event, control.Failed) and not self._done.is_set():
                    ended.set_exception(failure(event))
                else:
                    ended.set_result(None)
                return
            times_ns.append(at_ns)
            if len(times_ns) == warm:
                self._left_to_warm -= 1
                if not self._left_to_warm:
                    self._warm.set()
            elif len(times_ns) == last:
                self._left -= 1
                if not self._left:
                    self._done.set()

        # Some more than are measured, so that no microbatch shrinks while another is still measured.
        await cluster.client.submit_to(take, (0,) * length, max_new_tokens=last + _AFTER)
        await ended

    def _figures(self, before: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
        warm = 1 + self._cell.warm
        last = warm + self._cell.steps
        itls_ms = sorted(
            (after - earlier) / 1e6
            for times_ns in self._times_ns
            for earlier, after in zip(times_ns[warm:last], times_ns[warm + 1 : last + 1], strict=True)
        )
        began_ns = min(times_ns[warm] for times_ns in self._times_ns)
        ended_ns = max(times_ns[last] for times_ns in self._times_ns)
        tokens = sum(began_ns < at_ns <= ended_ns for times_ns in self._times_ns for at_ns in times_ns)
        return {
            "tokens": tokens,
            "elapsed_ms": (ended_ns - began_ns) / 1e6,
            "tokens_per_s": round(tokens / (ended_ns - began_ns) * 1e9, 3),
            "itl_mean_ms": round(sum(itls_ms) / len(itls_ms), 6),
            "itl_p50_ms": percentile(itls_ms, 50),
            "itl_p95_ms": percentile(itls_ms, 95),
            "imbalance": stats["imbalance"],
            "counters": stats["counters"],
            "layers_imbalance": stats["layers"],
            "targets": stats["counters"]["targets"] - before["counters"]["targets"],
        }


_AFTER = 4
"""Steps that requests go on for while others are still measured."""


def percentile(ordered: list[float], percent: float) -> float:
    """The nearest-rank percentile of sorted values; 0 of none."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, max(0, -(-int(percent * len(ordered)) // 100) - 1))], 6)
