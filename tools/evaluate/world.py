"""A cell as a configuration of the runtime and an emulation for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from afore.core.config import BatchOptions, CostOptions, DeviceOptions, PlannerOptions, RunConfig, TimeOptions
from afore.core.errors import ConfigError
from afore.core.policy_options import EplbOptions, PolicyOptions
from afore.core.topology import Topology
from afore.models.config import ModelSpec
from afore.models.counted import DemandSource, counted_spec
from afore.serving.virtual import Emulation
from afore.tools.evaluate.closed_run import AFTER_STEPS
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.run_options import with_options
from afore.tools.evaluate.workloads import ARRIVALS, LONGEST_PROMPT, output_lengths
from afore.workers.device.hardware import HardwareProfile
from afore.workers.device.profile import CostProfile

if TYPE_CHECKING:
    from afore.tools.evaluate.cell import Cell

_BLOCK_TOKENS = 64
_LONGEST_S = 3600.0
_SETTLE = 5
"""Steps from a rebalancing to what is measured: microbatches, which it stops, come apart again, or become fewer where they may."""
_LEAST_WARM = _SETTLE + 1
"""Steps in which EPLB can count, rebalance and settle before anything is measured."""


def config_of(cell: Cell, profile: HardwareProfile) -> RunConfig:
    """The cell's configuration. Raises ``ConfigError`` for what cannot be."""
    if cell.arrivals and cell.arrivals not in ARRIVALS:
        raise ConfigError("arrivals", f"there is no {cell.arrivals!r}", f"of {', '.join(ARRIVALS)}")
    if not 0.0 <= cell.next_gate_accuracy <= 1.0:
        raise ConfigError("next_gate_accuracy", f"{cell.next_gate_accuracy} is no part of assignments", "give 0 to 1")
    costs = profile.costs(workers=cell.ffn, redistribute_us=cell.redistribute_us)
    seats = cell.attention * cell.microbatches * cell.rows
    per_request = -(-(LONGEST_PROMPT + most_tokens(cell) + 2 + AFTER_STEPS) // _BLOCK_TOKENS) + 1
    return RunConfig(
        policy=cell.policy,
        policy_options=PolicyOptions(eplb=_eplb(cell)),
        topology=Topology(
            attention=cell.attention,
            ffn=cell.ffn,
            prefill=cell.prefill,
            microbatches=cell.microbatches,
            redundant_slots=cell.slots,
        ),
        planner=PlannerOptions(
            tile_tokens=costs.tile_tokens,
            copy_budget=cell.copy_budget,
            charge_us=0.0 if cell.policy == "static" else costs.planner_us,
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
        seed=cell.seed % (1 << 53),
    )


def _eplb(cell: Cell) -> EplbOptions:
    """EPLB at its best in a run of some twenty steps, for published windows are thousands of them.

    All layers are rebalanced once, ``_SETTLE`` steps before the first that is measured. Its steps are forward passes of one
    microbatch.
    """
    if cell.policy.startswith("eplb") and cell.warm < _LEAST_WARM and not cell.arrivals:
        raise ConfigError(
            "--warm",
            f"in {cell.warm} steps {cell.policy} cannot count, rebalance and settle before what is measured",
            f"give {_LEAST_WARM} or more",
        )
    if cell.arrivals:
        return EplbOptions(window_steps=cell.steps, interval_steps=cell.steps)
    passes = int(dict(cell.options).get("batch.least_microbatches") or cell.microbatches)
    counted = passes * max(1, cell.warm - _SETTLE)
    return EplbOptions(mode="stop", window_steps=counted, interval_steps=counted, most_rebalances=1)


def world_of(
    cell: Cell, profile: HardwareProfile, layers: int, demand: DemandSource, samples: CopySamples
) -> tuple[RunConfig, Emulation]:
    """The cell's configuration and emulation. Raises ``ConfigError`` for what cannot be."""
    shape, costs = profile.shape, profile.costs(workers=cell.ffn, redistribute_us=cell.redistribute_us)
    slow = _slower(costs, cell.slow_worker)
    emulation = Emulation(
        spec=counted_spec(
            num_experts=int(shape.experts.value),
            experts_per_token=int(shape.top_k.value),
            moe_layers=layers,
            dense_layers=int(shape.dense_layers.value),
        ),
        demand=demand,
        next_gate_accuracy=cell.next_gate_accuracy,
        profile=costs,
        profiles={"ffn-0": slow} if cell.slow_worker != 1.0 else {},
        colocated=cell.colocated,
        latency_us=profile.wires.message_us.value,
        data_latency_us=profile.wire_us(cell.rows),
        record=False,
        free_prefill=not cell.arrivals,
        make_tracer=samples.tracer,
    )
    return with_options(config_of(cell, profile), cell.options), emulation


def _slower(costs: CostProfile, times: float) -> CostProfile:
    return replace(costs, tile_us=costs.tile_us * times, expert_us=costs.expert_us * times)


def most_tokens(cell: Cell) -> int:
    """Tokens of the longest answer."""
    if cell.arrivals:
        return max(output_lengths(ARRIVALS[cell.arrivals], open_requests(cell), mean=cell.steps, seed=cell.seed))
    return cell.warm + cell.steps


def open_requests(cell: Cell) -> int:
    """Requests of a run in which they come one by one: each seat is taken twice."""
    return 2 * cell.attention * cell.microbatches * cell.rows


def most_requests_per_s(cell: Cell, costs: CostProfile, spec: ModelSpec, prompt_tokens: float) -> float:
    """Requests a second that balanced FFN workers could serve, or prefill workers, if those are fewer.

    ``prompt_tokens``: mean.
    """
    tiles = cell.attention * cell.rows * spec.experts_per_token / costs.tile_tokens / cell.ffn
    step_s = spec.num_moe_layers * cell.microbatches * (costs.experts_us + costs.tile_us * tiles) / 1e6
    prefill_s = (costs.prefill_us + costs.prefill_token_us * prompt_tokens) / 1e6
    decoding = cell.attention * cell.microbatches * cell.rows / (cell.steps * step_s)
    return min(decoding, cell.prefill / prefill_s)
