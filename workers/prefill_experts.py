"""The routed experts of a whole model by the kernel of the FFN workers: what a prefill worker computes them with.

``transformers``' best form on a CPU multiplies expert by expert, two small matrix products each: on a model of 128 small experts
that was half of a prompt's time. The kernel takes the same fused weights, in place, in one call.

Letters: T tokens, K experts per token, E experts, D hidden size, I expert hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from afore.models.expert_form import SILU_GATED
from afore.models.loading import LoadedModel
from afore.workers.device.base import Pairs
from afore.workers.flight import NO_SHARES
from afore.workers.kernels import CpuKernels


class KernelExperts(nn.Module):
    """Stands for a family's own experts module and holds its parameters: ``gate_up_proj`` [E, 2I, D], ``down_proj`` [E, D, I]."""

    def __init__(self, experts: nn.Module, kernels: CpuKernels) -> None:
        super().__init__()
        gate_up_EFD, down_EDI = experts.gate_up_proj, experts.down_proj
        assert isinstance(gate_up_EFD, nn.Parameter)
        assert isinstance(down_EDI, nn.Parameter)
        self.gate_up_proj, self.down_proj = gate_up_EFD, down_EDI
        self._kernels = kernels
        self._gate_up_EFD = gate_up_EFD.detach().numpy()
        self._down_EDI = down_EDI.detach().numpy()
        self._row_E = np.arange(gate_up_EFD.shape[0], dtype=np.int32)

    def forward(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Routed sum [T, D]; what the modules of transformers take and return."""
        num_experts = self._row_E.size
        pairs = Pairs.empty(ids_TK.numel(), num_experts)
        ids = ids_TK.to(torch.int32).contiguous().numpy()
        self._kernels.partition(ids, NO_SHARES, self._row_E, 0, num_experts, num_experts, pairs)
        out_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format)
        self._kernels.grouped_mlp(
            hidden_TD.contiguous().numpy(),
            weights_TK.to(torch.float32).contiguous().numpy(),
            pairs,
            self._gate_up_EFD,
            self._down_EDI,
            out_TD.numpy(),
        )
        return out_TD


def use_kernel(model: LoadedModel) -> bool:
    """Puts ``KernelExperts`` in the place of a whole model's experts, where the kernel can read them; returns whether it could.

    It reads float32 in the layout of ``KernelExperts`` and knows silu; other dtypes, and families that fuse in their own way, keep
    the modules of transformers.
    """
    family = model.family
    if model.spec.expert_form != SILU_GATED or family.expert_files.fused or model.module.dtype != torch.float32:
        return False
    kernels = CpuKernels()
    for layer_index in model.spec.moe_layers:
        layer = model.module.model.layers[layer_index]
        layer.set_submodule(family.experts, KernelExperts(layer.get_submodule(family.experts), kernels))
    return True
