"""One cell of the evaluation: a run of the whole system in virtual time, and what it showed, as plain JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from afore.models.counted import NEXT_GATE_ACCURACY
from afore.scheduler.traces.shape import Motion
from afore.testing import run_virtual
from afore.tools.evaluate.closed_run import ClosedRun, percentile
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.demand import STATIC_IMBALANCE, DemandKey, StoredDemand, demand_of, routing_digest
from afore.tools.evaluate.open_run import OpenRun
from afore.tools.evaluate.profiles import Override, cut_to, profile_digest, with_overrides
from afore.tools.evaluate.run_options import Option
from afore.tools.evaluate.world import world_of
from afore.workers.device.hardware import HardwareProfile, read_profile

__all__ = ["Cell", "demand_key", "percentile", "run_cell"]

FORMAT = 7
"""Of a cell's JSON: a run of another format is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run. Two cells that are equal have the same result, byte for byte."""

    policy: str
    workload: str = "chat"
    profile: str = "a100-glm45air"
    overrides: tuple[Override, ...] = ()
    """Numbers of the profile that are replaced."""
    routing: str = ""
    """Files that the demand is made of, by commas; empty: generated."""
    attention: int = 4
    ffn: int = 8
    prefill: int = 4
    microbatches: int = 3
    slots: int = 8
    """R."""
    copy_budget: int | None = None
    """B; none: max(8, N)."""
    rows: int = 325
    """Requests of one attention worker in one microbatch."""
    layers: int = 0
    """MoE layers of the model, which is cut to them; 0: those of the profile's model."""
    warm: int = 15
    """Steps of each request before anything is measured."""
    steps: int = 8
    """Steps of each request that are measured; with ``arrivals``, tokens that a request asks for in the mean."""
    redistribute_us: float = 0.0
    """What the policy puts on every target's critical path."""
    collectives: Literal["model-stream", "own-stream"] = "model-stream"
    colocated: bool = False
    """Attention on the FFN workers' devices."""
    imbalance: float = STATIC_IMBALANCE
    """Mean static imbalance of the demand; 1: uniform routing."""
    pace: float = 1.0
    """How many times as fast as counted texts the traffic moves on."""
    jitter: float = 1.0
    """How many times as much targets differ from their traffic's mean as chunks of counted texts do."""
    turns: bool = False
    """Whether all requests are of other topics from the first measured step on."""
    next_gate_accuracy: float = NEXT_GATE_ACCURACY
    """Part of its assignments, 0 to 1, that a layer's gate gives right on the hidden states of the layer before, as policies ask
    that predict the next layer's demand (``libra``, ``afore-ahead``). Inferred, for it is a property of the model: published are
    86-92 % on one model and 73-80 % on another. Wrong ones go to the least demanded experts, evenly, and so the order of the hot
    ones survives: optimistic."""
    slow_worker: float = 1.0
    """How many times slower FFN worker 0 is."""
    options: tuple[Option, ...] = ()
    """Options of the run that differ from what the fields above say: (name as on the command line, value)."""
    arrivals: str = ""
    """Requests that come one by one, as in that trace (``workloads.ARRIVALS``); empty: a closed batch."""
    load: float = 0.8
    """With ``arrivals``: requests come as fast as would keep this part of the seats busy, were FFN workers balanced."""
    seed: int = 0

    def key(self, profile: HardwareProfile | None = None) -> str:
        """Names the cell's file: by all that is run, the profile's numbers and the routing's bytes among it."""
        text = json.dumps([FORMAT, asdict(self), self.content(profile)], sort_keys=True)
        return f"{self.policy.replace(':', '-')}-{self.workload}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def content(self, profile: HardwareProfile | None = None) -> dict[str, str]:
        """What names do not say: digests of the profile's numbers and of the routing's files. Raises ``ConfigError``."""
        chosen = with_overrides(profile or read_profile(self.profile), self.overrides)
        return {"profile": profile_digest(chosen), "routing": routing_digest(self.routing)}


def demand_key(cell: Cell, profile: HardwareProfile) -> DemandKey:
    """What the cell's demand is made of. Raises ``ConfigError`` for more layers than the model has."""
    shape = cut_to(with_overrides(profile, cell.overrides), cell.layers).shape
    return DemandKey(
        workload=cell.workload,
        layers=int(shape.layers.value - shape.dense_layers.value),
        experts=int(shape.experts.value),
        top_k=int(shape.top_k.value),
        microbatches=cell.microbatches,
        tokens=cell.attention * cell.rows,
        steps=cell.warm + cell.steps + 8,
        seed=cell.seed,
        imbalance=cell.imbalance,
        motion=Motion(pace=cell.pace, jitter=cell.jitter, turn_step=cell.warm + 1 if cell.turns else None),
        routing=cell.routing,
    )


def run_cell(cell: Cell, profile: HardwareProfile | None = None, demand: StoredDemand | None = None) -> dict[str, Any]:
    """Runs a cell. ``profile``: none reads the one of the cell's name; ``demand``: none makes it.

    Raises ``ConfigError`` for what cannot run, and whatever ends a role.
    """
    base = profile or read_profile(cell.profile)
    key = demand_key(cell, base)
    demand = demand or demand_of(key)
    samples = CopySamples(cell.ffn)
    chosen = cut_to(with_overrides(base, cell.overrides), cell.layers)
    config, emulation = world_of(cell, chosen, key.layers, demand, samples)
    make = OpenRun if cell.arrivals else ClosedRun
    window = run_virtual(lambda: make(cell, config, emulation, samples).measured())
    return {
        "format": FORMAT,
        "cell": asdict(cell),
        "content": cell.content(base),
        "layers": key.layers,
        "demand": {"digest": demand.digest, "source": demand.source},
        **window,
        "copies": samples.summary(),
    }
