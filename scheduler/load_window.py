"""Demand of the last steps, summed: what statistics-based policies see. Letters: L layers, E experts."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.target import Target


class LoadWindow:
    """The sum over the last ``steps`` completed steps, whatever their microbatch. A step that is given up never counts."""

    def __init__(self, steps: int, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self._open: dict[int, tuple[int, NDArray[np.int32]]] = {}
        """Microbatch → its step and what has come of it."""
        self._closed: deque[NDArray[np.int32]] = deque()
        self._steps = steps
        self.load_LE: NDArray[np.int64] = np.zeros(self._shape, np.int64)
        """Pairs of each expert and layer."""
        self.completed = 0
        """Steps so far, also those that have left the window."""

    def add(self, target: Target, demand_E: NDArray[np.integer[Any]]) -> None:
        """A target's demand is known."""
        step = self._open.get(target.microbatch)
        if step is None or step[0] != target.step:
            step = self._open[target.microbatch] = (target.step, np.zeros(self._shape, np.int32))
        step[1][target.layer] = demand_E

    def close(self, microbatch: int) -> None:
        """The microbatch's step is complete."""
        step = self._open.pop(microbatch, None)
        if step is None:
            return
        self.completed += 1
        self._closed.append(step[1])
        self.load_LE += step[1]
        if len(self._closed) > self._steps:
            self.load_LE -= self._closed.popleft()
