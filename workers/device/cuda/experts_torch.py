"""The experts by torch's grouped matrix product: vendor kernels for bfloat16 on recent GPUs, plain loops elsewhere.

For float32, and on GPUs that the grouped product was not written for, torch looks at the groups on the host and so stops it; there
the Triton kernel is the one to take. Letters as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from afore.models.expert_form import Activation, ExpertForm


def launch(
    hidden_TD: Any,
    weight_TK: Any,
    pair_P: Any,
    place_P: Any,
    start_S1: Any,
    gate_up_SFD: Any,
    down_SDI: Any,
    biases: tuple[Any, Any] | None,
    act_PI: Any,
    y_PD: Any,
    out_TD: Any,
    form: ExpertForm,
    tile_tokens: int,
) -> None:
    """Enqueues them on torch's current stream; see ``experts_kernel.launch``. Tiles and scratch are the vendor's business."""
    num_tokens, top_k = weight_TK.shape
    places = num_tokens * top_k
    pair_P, place_P = pair_P[:places].long(), place_P[:places].long()
    end_S = start_S1[1:].to(torch.int32)
    grouped = _grouped()
    x_PD = hidden_TD[pair_P // top_k].to(gate_up_SFD.dtype)
    row_P = torch.searchsorted(end_S, torch.arange(places, device=end_S.device, dtype=torch.int32), right=True)
    row_P = row_P.clamp(max=down_SDI.shape[0] - 1)
    gate_up_PF = grouped(x_PD, gate_up_SFD.transpose(-2, -1), offs=end_S).float()
    if form.biases and biases is not None:
        gate_up_PF = gate_up_PF + biases[0][row_P].float()
    gate_PI, up_PI = gate_up_PF.chunk(2, dim=-1)
    hidden_PI = _activated(gate_PI, up_PI, form).to(gate_up_SFD.dtype)
    rows_PD = grouped(hidden_PI, down_SDI.transpose(-2, -1), offs=end_S).float()
    if form.biases and biases is not None:
        rows_PD = rows_PD + biases[1][row_P].float()
    rows_PD = rows_PD * weight_TK.reshape(-1)[pair_P][:, None]
    # Behind the last group lies whatever was there: it may be no number, and must not even be multiplied with 0.
    chosen_PD = torch.where((place_P >= 0)[:, None], rows_PD[place_P.clamp(min=0)], 0.0)
    torch.sum(chosen_PD.view(num_tokens, top_k, -1), dim=1, out=out_TD)


def _activated(gate_PI: torch.Tensor, up_PI: torch.Tensor, form: ExpertForm) -> torch.Tensor:
    if form.activation is Activation.CLAMPED:
        gate_PI, up_PI = gate_PI.clamp(max=form.limit), up_PI.clamp(-form.limit, form.limit)
        return gate_PI * torch.sigmoid(form.alpha * gate_PI) * (up_PI + 1)
    return functional.silu(gate_PI) * up_PI


def _grouped() -> Any:
    """The product, under whichever name this torch has it."""
    return getattr(functional, "grouped_mm", None) or torch._grouped_mm
