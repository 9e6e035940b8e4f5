"""Demand of the evaluation's workloads: skewed, layer by layer different, drifting; a pure function of the seed.

Each layer's log popularity is a part that stays and a part that drifts from step to step, separately for each microbatch (its
requests differ). How skewed both are together is set so that contiguous primaries on 8 workers have the paper's mean imbalance of
pairs, 1.70 (Figure 4, Static): a property of the demand, which no policy enters. How fast it drifts the paper does not say.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from afore.core.slots import contiguous_primaries

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

STATIC_IMBALANCE = 1.70
STATIC_WORKERS = 8
_BASE, _DRIFT = 1, 2
_CALIBRATION_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of traffic."""

    name: str
    about: str
    prompt_tokens: float
    """Median of prompt lengths."""
    prompt_spread: float
    """Standard deviation of their logarithm."""
    lasting: float
    """Part of the variance of log popularity that stays, 0 to 1."""
    keep: float
    """How much of the drifting part stays from one step to the next, 0 to 1."""


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        w.name: w
        for w in (
            Workload(
                name="chat",
                about="conversations (ShareGPT in the paper): medium prompts, mixed topics that change quickly",
                prompt_tokens=220,
                prompt_spread=1.1,
                lasting=0.45,
                keep=0.80,
            ),
            Workload(
                name="web",
                about="documents (FineWeb): long prompts, the most varied topics",
                prompt_tokens=550,
                prompt_spread=0.8,
                lasting=0.40,
                keep=0.75,
            ),
            Workload(
                name="code",
                about="programming problems (CodeForces): long prompts, one domain",
                prompt_tokens=450,
                prompt_spread=0.5,
                lasting=0.60,
                keep=0.88,
            ),
            Workload(
                name="math",
                about="short word problems (GSM8K): short prompts, one domain",
                prompt_tokens=90,
                prompt_spread=0.4,
                lasting=0.65,
                keep=0.90,
            ),
        )
    }
)


class DriftingDemand:
    """A ``DemandSource``. ``imbalance``: the mean static imbalance of pairs over 8 workers; 1 routes uniformly."""

    def __init__(
        self,
        workload: Workload,
        *,
        num_layers: int,
        num_experts: int,
        experts_per_token: int,
        seed: int,
        imbalance: float = STATIC_IMBALANCE,
        crc_steps: int = 0,
    ) -> None:
        self._workload = workload
        self._shape = (num_layers, num_experts)
        self._top_k = experts_per_token
        self._seed = seed
        self._name = zlib.crc32(workload.name.encode())
        self._base_LE = self._normal(_BASE, 0, 0)
        self._heat: dict[int, tuple[int, F64]] = {}
        """Of each microbatch: its last step, and the drifting part then."""
        self._share: dict[int, tuple[int, F64]] = {}
        self.crc = 0
        """Over what was asked for of the first ``crc_steps`` steps: two runs that met the same demand there have the same."""
        self._crc_steps = crc_steps
        self._scale = 0.0
        if imbalance > 1:
            self._scale = self._scale_for(imbalance)
            self._heat.clear()

    def counts(self, attention: int, microbatch: int, step: int, tokens: int) -> I64:
        """See ``DemandSource.counts``."""
        last = self._share.get(microbatch)
        if last is None or last[0] != step:
            last = self._share[microbatch] = (step, _shares(self._log_popularity(microbatch, step) * self._scale))
        generator = self._generator(3 + attention, microbatch, step)
        counts_LE = generator.multinomial(tokens * self._top_k, last[1]).astype(np.int64)
        for counts_E in counts_LE:
            _cap(counts_E, tokens)
        if step < self._crc_steps:
            self.crc = (self.crc + zlib.crc32(counts_LE.data)) & 0xFFFFFFFF
        return counts_LE

    def _log_popularity(self, microbatch: int, step: int) -> F64:
        workload = self._workload
        lasting = np.sqrt(workload.lasting) * self._base_LE
        log_LE: F64 = lasting + np.sqrt(1.0 - workload.lasting) * self._drifting(microbatch, step)
        return log_LE

    def _drifting(self, microbatch: int, step: int) -> F64:
        at, heat_LE = self._heat.get(microbatch, (-1, None))
        if heat_LE is None or at > step:
            at, heat_LE = 0, self._normal(_DRIFT, microbatch, 0)
        keep = self._workload.keep
        while at < step:
            at += 1
            heat_LE = keep * heat_LE + np.sqrt(1.0 - keep * keep) * self._normal(_DRIFT, microbatch, at)
        self._heat[microbatch] = (step, heat_LE)
        return heat_LE

    def _scale_for(self, imbalance: float) -> float:
        """How far apart experts must be for that static imbalance: by bisection, over a few steps of one microbatch."""
        heats = [self._log_popularity(0, step) for step in range(_CALIBRATION_STEPS)]
        primaries_E = contiguous_primaries(self._shape[1], STATIC_WORKERS)
        owner_EN = np.eye(STATIC_WORKERS)[np.asarray(primaries_E)]
        low, high = 0.0, 6.0
        for _ in range(30):
            scale = (low + high) / 2
            loads = [_shares(heat_LE * scale) @ owner_EN for heat_LE in heats]
            found = float(np.mean([(load.max(axis=1) / load.mean(axis=1)).mean() for load in loads]))
            low, high = (scale, high) if found < imbalance else (low, scale)
        return round((low + high) / 2, 6)

    def _normal(self, kind: int, microbatch: int, step: int) -> F64:
        return self._generator(kind, microbatch, step).standard_normal(self._shape)

    def _generator(self, kind: int, microbatch: int, step: int) -> np.random.Generator:
        key = [(self._seed << 32) ^ self._name, (kind << 48) | (microbatch << 36) | step]
        return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))


def _shares(log_LE: F64) -> F64:
    """Shares [L, E] of each layer, cut to 2^-30: what differs between two machines' exponentials is far below."""
    share_LE = np.exp(log_LE - log_LE.max(axis=1, keepdims=True))
    share_LE = np.round(share_LE * 2.0**30) + 1.0
    normal: F64 = share_LE / share_LE.sum(axis=1, keepdims=True)
    return normal


def _cap(counts_E: I64, most: int) -> None:
    """No expert has more than ``most``: what is over goes to those with the least, in place."""
    over = int(np.maximum(counts_E - most, 0).sum())
    if over:
        np.minimum(counts_E, most, out=counts_E)
        for expert in np.argsort(counts_E, kind="stable"):
            room = min(most - int(counts_E[expert]), over)
            counts_E[expert] += room
            over -= room
            if not over:
                return


def prompt_lengths(workload: Workload, count: int, *, seed: int, most: int) -> list[int]:
    """Prompt lengths of ``count`` requests, 1 … ``most``."""
    generator = np.random.Generator(
        np.random.Philox(key=np.array([seed, zlib.crc32(workload.name.encode())], np.uint64))
    )
    logs = np.log(workload.prompt_tokens) + workload.prompt_spread * generator.standard_normal(count)
    lengths: list[int] = np.clip(np.exp(logs), 1, most).astype(np.int64).tolist()
    return lengths
