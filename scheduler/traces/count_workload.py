"""Microbatches drawn around counts of chunks: all that is known of many models.

Demand is Dirichlet-multinomial. Each microbatch mixes the domains in proportions that drift (a softmax of Ornstein-Uhlenbeck
walks), and walks through their chunks, interpolating between neighbours. A target's shares are one draw of Dirichlet(κ · mixed
shares), its pairs a multinomial of T · K, no expert with more than T. κ is estimated, per layer, from how chunks of one domain
differ (moments), unless it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.scheduler.traces.calibrate import (
    HOT_PART,
    SKEW,
    SKEW_WORKERS,
    Shares,
    bisect,
    hot_part,
    in_words,
    normal,
    orders,
    skew,
)
from afore.scheduler.traces.corpus import CountCorpus
from afore.scheduler.traces.records import TraceHeader, TraceTarget
from afore.scheduler.traces.shape import PLACES, Motion, Shape


@dataclass(slots=True)
class CountWorkload:
    """Microbatches drawn around counts of chunks.

    ``skew="paper"`` raises shares to one power and puts experts in another order.
    """

    corpus: CountCorpus
    shape: Shape
    kappa_L: NDArray[np.float64] | None = None
    """κ of each chosen layer; none: estimated."""
    header: TraceHeader = field(init=False)
    _shares_DPLE: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        corpus, shape = self.corpus, self.shape
        if corpus.top_k == 0:
            raise ConfigError(
                "workload", "the counts' file does not say how many tokens its chunks have", "add <domain>_tokens"
            )
        chosen = shape.chosen(corpus.layers)
        counts_DPLE = corpus.counts_DPLE[:, :, chosen.start : chosen.stop]
        if shape.motion.turn_step is not None and len(corpus.sources) < 2:
            raise ConfigError(
                "workload.turn_step", f"{corpus.sources[0]} alone has nothing to turn to", "give counts of two domains"
            )
        if self.kappa_L is None:
            self.kappa_L = concentration(counts_DPLE) / shape.motion.jitter
        L, E = counts_DPLE.shape[2:]
        shares_DPLE, how = normal(counts_DPLE.astype(np.float64)), "as recorded"
        if shape.skew == "paper":
            shares_DPLE, how = self._calibrated(shares_DPLE)
        self._shares_DPLE = shares_DPLE
        mixed_LPE = self._examples(shares_DPLE)
        self.header = TraceHeader(
            experts=E,
            layers=L,
            top_k=corpus.top_k,
            microbatches=shape.microbatches,
            source=(
                f"{', '.join(corpus.sources)}: counts of {counts_DPLE.shape[1]} chunks each, layers {chosen.start} to"
                f" {chosen.stop - 1};"
                f" {shape.microbatches} microbatches of {shape.tokens} tokens, Dirichlet-multinomial with κ"
                f" {np.min(self.kappa_L):,.0f} to {np.max(self.kappa_L):,.0f}; {how}: {in_words(mixed_LPE)}"
                f"{_in_words(shape.motion)}; seed {shape.seed}"
            ),
            sources=("mixed",),
        )

    def _calibrated(self, shares_DPLE: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
        """As ``calibrate.calibrated``, but so that mixtures have the paper's skew: they are flatter than what they mix."""

        def powered(power: float) -> NDArray[np.float64]:
            return normal(shares_DPLE**power)

        exponent = bisect(lambda power: hot_part(self._examples(powered(power))) - HOT_PART, 0.05, 8.0)
        order_LE, blur = orders(self._examples(powered(exponent)), self.shape.seed)
        found = np.take_along_axis(powered(exponent), order_LE[None, None], axis=3)
        how = f"shares to the power {exponent:.2f}, experts ordered by heat with noise {blur:.2f}"
        wanted = self.shape.imbalance
        if wanted == SKEW:
            return found, how
        # Another skew than the paper's: the same experts on the same workers, hotter or cooler.
        workers = min(SKEW_WORKERS, found.shape[3])
        again = bisect(
            lambda power: float(skew(self._examples(normal(found**power)), workers).mean()) - wanted, 0.0, 8.0
        )
        return normal(found**again), f"{how}, to the power {again:.2f} for a skew of {wanted:g}"

    def _examples(self, shares_DPLE: NDArray[np.float64]) -> Shares:
        """Mixtures [L, places, E] as microbatches have them."""
        rng = np.random.default_rng(self.shape.seed)
        D, P = shares_DPLE.shape[:2]
        mix_XD = np.exp(rng.normal(size=(PLACES, D)))
        mix_XD /= mix_XD.sum(axis=1, keepdims=True)
        weight_XDP = mix_XD[:, :, None] * np.eye(P)[rng.integers(P, size=(PLACES, D))]
        mixed_LXE: Shares = np.einsum("xdp,dple->lxe", weight_XDP, shares_DPLE, optimize=True)
        return mixed_LXE

    def targets(self) -> Iterator[TraceTarget]:
        shape, header = self.shape, self.header
        assert self.kappa_L is not None
        rng = np.random.default_rng(shape.seed)
        D, P, _, _ = self._shares_DPLE.shape
        M, T = shape.microbatches, shape.tokens
        walk_MD = rng.normal(size=(M, D))
        place_MD = rng.uniform(0, P, size=(M, D))
        motion = shape.motion
        kept = _KEPT**motion.pace
        step = 0
        while True:
            mix_MD = np.exp(walk_MD)
            if motion.turn_step is not None:
                first = (D + 1) // 2
                mix_MD[:, first:] *= step >= motion.turn_step
                mix_MD[:, :first] *= step < motion.turn_step
            mix_MD /= mix_MD.sum(axis=1, keepdims=True)
            mixed_MLE = [self._mixed(mix_MD[m], place_MD[m]) for m in range(M)]
            for layer in range(header.layers):
                for m in range(M):
                    shares_E = rng.dirichlet(self.kappa_L[layer] * mixed_MLE[m][layer] + 1e-9)
                    demand_E = _limited(rng.multinomial(T * header.top_k, shares_E), T, shares_E)
                    yield TraceTarget(target=Target(layer, m, step), demand_E=demand_E, tokens=T)
            walk_MD = kept * walk_MD + np.sqrt(1 - kept**2) * rng.normal(size=(M, D))
            place_MD = (place_MD + _CHUNKS_PER_STEP * motion.pace) % P
            step += 1

    def _mixed(self, mix_D: NDArray[np.float64], place_D: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shares [L, E] of a microbatch."""
        D, P, L, E = self._shares_DPLE.shape
        mixed_LE = np.zeros((L, E))
        for d in range(D):
            here, part = int(place_D[d]) % P, place_D[d] % 1.0
            shares_PLE = self._shares_DPLE[d]
            mixed_LE += mix_D[d] * ((1 - part) * shares_PLE[here] + part * shares_PLE[(here + 1) % P])
        return mixed_LE


def _in_words(motion: Motion) -> str:
    words = f", moving {motion.pace:g} times as fast" if motion.pace != 1.0 else ""
    return (
        words if motion.turn_step is None else f"{words}, of the other half of domains from step {motion.turn_step} on"
    )


_KEPT = 0.98
"""Of a microbatch's mixture, from step to step: half of it is gone after 34 steps."""
_CHUNKS_PER_STEP = 0.02
"""A chunk is passed in 50 steps."""


def concentration(counts_DPLE: NDArray[np.int64]) -> NDArray[np.float64]:
    """κ of each layer by moments: chunks of a domain vary as Dirichlet-multinomial draws around their mean would.

    Var(share) = p(1-p) · (1/n + 1/(κ+1)), summed over experts, chunks and domains; between 10 and 100,000.
    """
    P, L = counts_DPLE.shape[1:3]
    if P < 2:
        return np.full(L, 1000.0)
    shares_DPLE = normal(counts_DPLE.astype(np.float64))
    mean_DLE = shares_DPLE.mean(axis=1)
    spread_L = ((shares_DPLE - mean_DLE[:, None]) ** 2).sum(axis=(0, 1, 3)) / (P - 1)
    base_L = (mean_DLE * (1 - mean_DLE)).sum(axis=(0, 2))
    sampling_L = ((mean_DLE * (1 - mean_DLE)).sum(axis=2)[:, None] / counts_DPLE.sum(axis=3)).mean(axis=1).sum(axis=0)
    excess_L = np.maximum(spread_L - sampling_L, 1e-12)
    kappa_L: NDArray[np.float64] = np.clip(base_L / excess_L - 1, 10.0, 1e5)
    return kappa_L


def _limited(demand_E: NDArray[np.int64], most: int, shares_E: NDArray[np.float64]) -> NDArray[np.int32]:
    """No expert is chosen twice by a token: what is above T goes to others, in proportion to their shares."""
    for _ in range(8):
        over = int(np.maximum(demand_E - most, 0).sum())
        if not over:
            break
        demand_E = np.minimum(demand_E, most)
        room_E = shares_E * (demand_E < most) + 1e-15 * (demand_E < most)
        demand_E = demand_E + np.floor(room_E / room_E.sum() * over).astype(np.int64)
        left = over - int(np.floor(room_E / room_E.sum() * over).sum())
        demand_E[np.argsort(-room_E, kind="stable")[:left]] += 1
    return np.minimum(demand_E, np.iinfo(np.int32).max).astype(np.int32)
