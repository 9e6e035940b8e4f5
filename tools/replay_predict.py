"""Predictions in a replay, in place of the attention workers': the next layer's demand, a layer ahead.

``transitions`` (Lina): which experts followed which, counted over past tokens; needs each token's experts. Where a trace has
none, and for ``next-gate`` (Libra), whose hidden states no trace has: the true demand, of which a stated part stays and the rest is
spread as the layer's demand was so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.policies.base import Predictor
from afore.scheduler.traces import TraceHeader, TraceTarget


class ReplayPredictor:
    """Of one policy's replay; deterministic by ``seed``."""

    def __init__(self, kind: Predictor, header: TraceHeader, *, accuracy: float, seed: int) -> None:
        self._kind = kind
        self._accuracy, self._seed = accuracy, seed
        L, E = header.layers, header.experts
        self._past_LE = np.ones((L, E))
        """Demand of each layer so far."""
        self._follows_LEE = np.zeros((max(L - 1, 0), E, E)) if kind == "transitions" else None
        self._ids_M: dict[int, TraceTarget] = {}
        """The last target of each microbatch."""

    def seen(self, row: TraceTarget) -> None:
        """The target's true demand is known."""
        target = row.target
        assert row.demand_E is not None
        self._past_LE[target.layer] += row.demand_E
        before = self._ids_M.get(target.microbatch)
        if self._follows_LEE is not None and row.ids_TK is not None:
            same = before is not None and (before.target.step, before.target.layer + 1) == (target.step, target.layer)
            if same and before is not None and before.ids_TK is not None and before.ids_TK.shape == row.ids_TK.shape:
                E = row.demand_E.size
                pairs = before.ids_TK[:, :, None].astype(np.int64) * E + row.ids_TK[:, None, :]
                self._follows_LEE[target.layer - 1] += np.bincount(pairs.reshape(-1), minlength=E * E).reshape(E, E)
            self._ids_M[target.microbatch] = row

    def predict(self, row: TraceTarget, following: TraceTarget) -> NDArray[np.int64]:
        """The demand of ``following``, which is ``row``'s microbatch in the next layer."""
        assert row.demand_E is not None
        assert following.demand_E is not None
        if self._follows_LEE is not None and row.ids_TK is not None:
            follows_EE = self._follows_LEE[row.target.layer]
            rows_E = follows_EE.sum(axis=1, keepdims=True)
            flat_E = self._past_LE[following.target.layer] / self._past_LE[following.target.layer].sum()
            next_EE = np.where(rows_E > 0, follows_EE / np.maximum(rows_E, 1), flat_E)
            predicted_E: NDArray[np.int64] = np.rint(row.demand_E @ next_EE).astype(np.int64)
            return predicted_E
        return self._noisy(following)

    def _noisy(self, following: TraceTarget) -> NDArray[np.int64]:
        target = following.target
        assert following.demand_E is not None
        rng = np.random.default_rng((self._seed, target.step, target.layer, target.microbatch))
        true_E = following.demand_E.astype(np.int64)
        kept_E = rng.binomial(true_E, self._accuracy)
        past_E = self._past_LE[target.layer]
        noisy_E: NDArray[np.int64] = kept_E + rng.multinomial(int((true_E - kept_E).sum()), past_E / past_E.sum())
        return noisy_E
