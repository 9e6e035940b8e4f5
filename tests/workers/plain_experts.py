"""What FFN workers compute, by the formula and nothing else: the reference for attention tests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint, ExpertReader
from afore.models.config import ModelSpec


class Experts(Protocol):
    """What the FFN workers compute."""

    @property
    def spec(self) -> ModelSpec: ...

    def partial_rows(self, layer: int, mine: set[int], hidden_TD: Any, ids_TK: Any, weights_TK: Any) -> Any:
        """Sum over the pairs of the experts in ``mine``: float32 [T, D]."""
        ...


class ExpertsOfCheckpoint:
    """The routed experts of the bundled model, computed by the formula."""

    def __init__(self) -> None:
        with Checkpoint(bundled_model_path()) as checkpoint:
            spec = checkpoint.spec
            reader = ExpertReader(checkpoint)
            self.spec = spec
            self.gate_up_LEFD = torch.empty((spec.num_moe_layers, spec.num_experts, *reader.gate_up_shape))
            self.down_LEDI = torch.empty((spec.num_moe_layers, spec.num_experts, *reader.down_shape))
            for layer in range(spec.num_moe_layers):
                for expert in range(spec.num_experts):
                    reader.read_expert(layer, expert, self.gate_up_LEFD[layer, expert], self.down_LEDI[layer, expert])

    def partial_rows(self, layer: int, mine: set[int], hidden_TD: Any, ids_TK: Any, weights_TK: Any) -> Any:
        """See ``Experts``."""
        hidden, weights = torch.from_numpy(np.array(hidden_TD)), torch.from_numpy(np.array(weights_TK))
        out_TD = torch.zeros_like(hidden)
        for expert in mine & set(np.unique(ids_TK).tolist()):
            rows, choices = np.nonzero(ids_TK == expert)
            gate, up = (hidden[rows] @ self.gate_up_LEFD[layer, expert].T).chunk(2, dim=-1)
            result = (torch.nn.functional.silu(gate) * up) @ self.down_LEDI[layer, expert].T
            out_TD.index_add_(0, torch.from_numpy(rows), result * weights[rows, choices][:, None])
        return out_TD.numpy()


class IdentityExperts:
    """Every expert returns its rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def partial_rows(self, layer: int, mine: set[int], hidden_TD: Any, ids_TK: Any, weights_TK: Any) -> Any:
        """See ``Experts``."""
        weight_T = (np.isin(ids_TK, sorted(mine)) * weights_TK).sum(axis=1)
        return hidden_TD * weight_T[:, None]
