"""Where predicted demand comes from: how experts have followed one another (Lina), and, for traces without hidden states, a
predictor of a stated accuracy (Libra). Attention workers and replays use the same.

Letters: L layers, E experts, T tokens, K choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.demand import DemandVector
from afore.scheduler.split import largest_remainder

Ids = NDArray[np.integer[Any]]


class Transitions:
    """For every layer but the last: how often a token that chose expert e chose each expert of the next. Learns as it goes."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._E = num_experts
        self.counts_LEE: NDArray[np.int64] = np.zeros((max(0, num_layers - 1), num_experts, num_experts), np.int64)

    def observe(self, layer: int, ids_TK: Ids, next_ids_TK: Ids) -> None:
        """The same tokens chose ``ids_TK`` in ``layer`` and ``next_ids_TK`` in the next one."""
        cells_X = ids_TK[:, :, None].astype(np.int64) * self._E + next_ids_TK[:, None, :]
        self.counts_LEE[layer] += np.bincount(cells_X.reshape(-1), minlength=self._E**2).reshape(self._E, self._E)

    def predict(self, layer: int, demand_E: Ids) -> DemandVector:
        """The next layer's demand [E], int32, from that of ``layer``: each pair counts as its expert's followers' shares.

        Pairs of experts that nothing has been seen of go where all others went; before anything was seen, nothing is predicted.
        """
        counts_EE = self.counts_LEE[layer]
        seen_E, followed_E = counts_EE.sum(axis=1), counts_EE.sum(axis=0)
        if not followed_E.any():
            return np.zeros(self._E, np.int32)
        known_E = np.where(seen_E > 0, demand_E, 0)
        strangers = int(np.sum(demand_E)) - int(known_E.sum())
        expected_E = (known_E / np.maximum(seen_E, 1)) @ counts_EE + strangers * followed_E / followed_E.sum()
        return largest_remainder(expected_E, int(np.sum(demand_E))).astype(np.int32)


def inaccurate(
    demand_E: Ids, accuracy: float, rng: np.random.Generator, strays_E: NDArray[np.floating[Any]] | None = None
) -> DemandVector:
    """A demand [E] as a predictor would have it that is right for ``accuracy`` of the pairs.

    The others are spread in proportion to ``strays_E``; none: they are any experts'. Raises ``ValueError`` for an accuracy that is
    no part of 1.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy {accuracy} is not from 0 to 1")
    strays_E = np.ones(len(demand_E)) if strays_E is None else strays_E
    right_E = rng.binomial(demand_E, accuracy)
    wrong = int(np.sum(demand_E)) - int(right_E.sum())
    return (right_E + rng.multinomial(wrong, strays_E / strays_E.sum())).astype(np.int32)
