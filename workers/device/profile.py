"""What work costs on an emulated device. Every number has a unit in its name and the profile says where it was taken from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from afore.core.errors import ConfigError
from afore.workers.device.base import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Costs of one kind of worker. A rate is 10^9 bytes a second; 0 means that bytes cost nothing."""

    name: str
    """What results are labelled with."""
    source: str
    """Where the numbers come from: machine, method, date or publication."""
    launch_us: float
    """Every piece of work, of whatever span, before it does anything."""
    tile_tokens: int
    """M_tile: pairs of one expert in a tile."""
    tile_us: float
    """One tile of one expert's grouped GEMM (β_tile)."""
    experts_us: float
    """The grouped GEMM of a target, however many tiles it has."""
    partition_us: float
    """Exact partitioning of a target (eq. 11)."""
    partition_pair_ns: float
    """More of it for each gathered pair."""
    gate_us: float
    """Gate and top-k of a layer."""
    attention_us: float
    """Attention of a layer, however many tokens it has. Dense layers cost the same."""
    attention_token_us: float
    """More of it for each token."""
    attention_context_ns: float
    """More of it for each cached position that is read."""
    gather_us: float
    """Gathering a target's rows."""
    gather_gb_per_s: float
    """Rate of it."""
    reduce_us: float
    """Reducing a target's partial rows."""
    reduce_gb_per_s: float
    """Rate of it."""
    copy_latency_us: float
    """Copying one expert, however small."""
    copy_gb_per_s: float
    """Rate of one port: a worker sends one expert at a time, and receives one at a time."""
    planner_us: float
    """One plan of the scheduler."""
    prefill_us: float = 0.0
    """A chunk of a prompt through the whole model, however short."""
    prefill_token_us: float = 0.0
    """More of it for each token."""
    prefill_context_ns: float = 0.0
    """More of it for each position that a token looks at, its own among them."""
    expert_us: float = 0.0
    """Least time of one expert that has pairs, however few: its weights are read once."""
    sample_us: float = 0.0
    """The last norm, logits and sampling of a step, however few rows."""
    sample_token_us: float = 0.0
    """More of it for each row."""
    redistribute_us: float = 0.0
    """What the policy puts on each target's critical path: gathering true loads and telling tokens where to go."""
    gather_token_bytes: float = 0.0
    """Bytes that gathering moves for each token; 0: what the rows weigh."""
    reduce_token_bytes: float = 0.0
    """Bytes that reducing moves for each token; 0: what the rows weigh."""
    expert_bytes: float = 0.0
    """Bytes of one expert; 0: what the store's rows weigh."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"profile.{field.name}", f"{value!r} is not a cost", "give a finite number, 0 or more"
                )
        if self.tile_tokens < 1:
            raise ConfigError("profile.tile_tokens", f"{self.tile_tokens} pairs make no tile", "give 1 or more")

    def work_ns(self, work: Work) -> int:
        """Nanoseconds of a piece of work on a stream. A span that no field speaks of costs its launch alone."""
        match work.span:
            case "experts":
                cost_us = self.experts_us + self.tile_us * work.tiles
            case "partition":
                cost_us = self.partition_us + self.partition_pair_ns * work.pairs / 1e3
            case "gate":
                cost_us = self.gate_us
            case "attention" | "dense":
                context_us = self.attention_context_ns * work.context / 1e3
                cost_us = self.attention_us + self.attention_token_us * work.tokens + context_us
            case "prefill":
                context_us = self.prefill_context_ns * work.context / 1e3
                cost_us = self.prefill_us + self.prefill_token_us * work.tokens + context_us
            case "gather":
                nbytes = work.tokens * self.gather_token_bytes or work.nbytes
                cost_us = self.gather_us + _bytes_us(nbytes, self.gather_gb_per_s)
            case "reduce":
                nbytes = work.tokens * self.reduce_token_bytes or work.nbytes
                cost_us = self.reduce_us + _bytes_us(nbytes, self.reduce_gb_per_s)
            case "sample":
                cost_us = self.sample_us + self.sample_token_us * work.tokens
            case "redistribute":
                cost_us = self.redistribute_us
            case _:
                cost_us = 0.0
        return round((self.launch_us + cost_us) * 1e3)

    def beside_ns(self, work: Work) -> tuple[int, ...]:
        """How long further cores are busy once ``work`` is done, while nobody waits for it; where workers share cores."""
        return ()

    def copy_ns(self, nbytes: int) -> int:
        """Nanoseconds for which a copy occupies both its ports; at least one, so that every copy has a before and an after."""
        moved = self.expert_bytes or nbytes
        return max(1, round((self.copy_latency_us + _bytes_us(moved, self.copy_gb_per_s)) * 1e3))

    def rows_us(self, start_S1: npt.NDArray[np.int32]) -> float:
        """The tiles of a grouping of pairs by store row [S+1]: each expert its tiles, at least the reading of its weights."""
        tiles_S = -(-np.diff(start_S1) // self.tile_tokens)
        if not self.expert_us:
            return float(tiles_S.sum()) * self.tile_us
        return float(np.maximum(tiles_S * self.tile_us, np.where(tiles_S > 0, self.expert_us, 0.0)).sum())


def _bytes_us(nbytes: float, gb_per_s: float) -> float:
    return nbytes / gb_per_s / 1e3 if gb_per_s > 0 else 0.0


LAPTOP_EMULATED = CostProfile(
    name="laptop-emulated",
    source="two shared cores of an AMD EPYC virtual machine, one thread, float32, a model of D=128, I=32, 128 experts, top-8; "
    "kernels and copies measured alone, group costs those of shared memory",
    launch_us=0.5,
    tile_tokens=8,
    tile_us=1.3,
    experts_us=2.0,
    partition_us=1.5,
    partition_pair_ns=3.0,
    gate_us=20.0,
    attention_us=50.0,
    attention_token_us=3.0,
    attention_context_ns=20.0,
    gather_us=5.0,
    gather_gb_per_s=4.0,
    reduce_us=2.0,
    reduce_gb_per_s=4.0,
    copy_latency_us=1.0,
    copy_gb_per_s=8.0,
    planner_us=5.0,
)

PROFILES: Mapping[str, CostProfile] = MappingProxyType({LAPTOP_EMULATED.name: LAPTOP_EMULATED})
"""The profiles that come with the package, by name."""
