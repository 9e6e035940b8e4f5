"""Predictions in a replay, in place of the attention workers': the next layer's demand, a layer ahead.

``transitions`` (Lina): which experts followed which, counted over past tokens as attention workers count; needs each token's
experts. Where a trace has none, and for ``next-gate`` (Libra), whose hidden states no trace has: the true demand, of which a stated
part stays and the rest is spread as the layer's demand was so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.policies.base import Predictor
from afore.scheduler.predictors import Transitions, inaccurate
from afore.scheduler.traces import TraceHeader, TraceTarget


class ReplayPredictor:
    """Of one policy's replay; deterministic by ``seed``."""

    def __init__(self, kind: Predictor, header: TraceHeader, *, accuracy: float, seed: int) -> None:
        self._accuracy, self._seed = accuracy, seed
        self._past_LE = np.ones((header.layers, header.experts))
        """Demand of each layer so far."""
        self._transitions = Transitions(header.layers, header.experts) if kind == "transitions" else None
        self._last_M: dict[int, TraceTarget] = {}
        """The last target of each microbatch."""

    def seen(self, row: TraceTarget) -> None:
        """The target's true demand is known."""
        target = row.target
        assert row.demand_E is not None
        self._past_LE[target.layer] += row.demand_E
        before = self._last_M.get(target.microbatch)
        if self._transitions is not None and row.ids_TK is not None:
            same = before is not None and (before.target.step, before.target.layer + 1) == (target.step, target.layer)
            if same and before is not None and before.ids_TK is not None and before.ids_TK.shape == row.ids_TK.shape:
                self._transitions.observe(target.layer - 1, before.ids_TK, row.ids_TK)
            self._last_M[target.microbatch] = row

    def predict(self, row: TraceTarget, following: TraceTarget) -> NDArray[np.int64]:
        """The demand of ``following``, which is ``row``'s microbatch in the next layer."""
        assert row.demand_E is not None
        assert following.demand_E is not None
        if self._transitions is not None and row.ids_TK is not None:
            return self._transitions.predict(row.target.layer, row.demand_E).astype(np.int64)
        target = following.target
        rng = np.random.default_rng((self._seed, target.step, target.layer, target.microbatch))
        past_E = self._past_LE[target.layer]
        return inaccurate(following.demand_E.astype(np.int64), self._accuracy, rng, past_E).astype(np.int64)
