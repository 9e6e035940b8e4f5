"""Training of a small Glm4Moe model with auxiliary-loss-free balancing.

After every step each router's correction bias moves towards equal use of its experts (up where an expert got less than the
mean, down where it got more), by a step that decays: without it routing collapses onto few experts, with a constant one it
oscillates late in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from afore.core.errors import AforeError
from afore.tools.train_corpus import BOS_ID, EOS_ID, PAD_ID, Domain

_WARMUP_STEPS = 50
_FINAL_RATE = 0.05
_FINAL_BIAS_STEP = 0.1


class TrainingDiverged(AforeError):
    """The loss is not a number any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train."""

    batch: int = 16
    """Windows a step, drawn from the domains in turn."""
    window: int = 256
    """Tokens of a window."""
    learning_rate: float = 3e-3
    """Peak; warmed up over 50 steps, then a cosine down to 5 %."""
    weight_decay: float = 0.1
    """On matrices, the embedding excepted."""
    bias_step: float = 0.01
    """First step of the correction bias; decays linearly to a tenth."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did."""

    step: int
    loss: float
    """Nats per token of this step's windows."""
    balance: tuple[float, ...]
    """Max/mean tokens per expert of each MoE layer."""


def new_model(config: dict[str, Any], seed: int) -> Any:
    """A Glm4Moe model with random weights; ``config`` as ``Glm4MoeConfig`` takes it."""
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **config,
            use_qk_norm=True,
            tie_word_embeddings=True,
            num_nextn_predict_layers=0,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )
    for layer in moe_layers(model):
        layer.mlp.experts.forward = MethodType(sorted_experts, layer.mlp.experts)
    return model


def moe_layers(model: Any) -> list[Any]:
    """The sparse layers in order."""
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def sorted_experts(self: Any, hidden: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The routed experts with pairs sorted by expert: equal to the module's own, a third faster to train on one core.

    The module's eager form indexes one fused parameter per expert, and its backward makes a full-size gradient for each.
    """
    choices = ids_TK.shape[1]
    flat_P = ids_TK.reshape(-1)
    order_P = torch.argsort(flat_P, stable=True)
    counts = torch.bincount(flat_P, minlength=self.num_experts).tolist()
    rows_P = torch.div(order_P, choices, rounding_mode="floor")
    gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
    parts = torch.split(hidden.index_select(0, rows_P), counts)
    gate, up = torch.cat([functional.linear(x, gate_up[e]) for e, x in enumerate(parts)]).chunk(2, dim=-1)
    inner = functional.silu(gate) * up * weights_TK.reshape(-1).index_select(0, order_P)[:, None].to(gate.dtype)
    out = torch.cat([functional.linear(x, down[e]) for e, x in enumerate(torch.split(inner, counts))])
    return torch.zeros_like(hidden).index_add(0, rows_P, out)


def train(
    model: Any,
    domains: Sequence[Domain],
    options: TrainOptions,
    progress: Callable[[int], float],
    report: Callable[[StepReport], None],
) -> int:
    """Trains until ``progress(step)`` reaches 1; returns the steps done. Ctrl-C ends it early, keeping what was learnt.

    Raises ``TrainingDiverged``.
    """
    rng = np.random.default_rng(options.seed)
    routers = [layer.mlp.gate for layer in moe_layers(model)]
    used = [torch.zeros(router.num_experts) for router in routers]
    hooks = [router.register_forward_hook(_counter(counts)) for router, counts in zip(routers, used, strict=True)]
    optimiser = _optimiser(model, options)
    model.train()
    step = 0
    try:
        while (done := progress(step)) < 1.0:
            for group in optimiser.param_groups:
                group["lr"] = options.learning_rate * _rate(step, done)
            for counts in used:
                counts.zero_()
            loss = window_loss(model, _draw(domains, options, rng))
            if not math.isfinite(value := float(loss.detach())):
                raise TrainingDiverged(f"step {step}: the loss is {value}; lower --learning-rate")
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            bias_step = options.bias_step * (_FINAL_BIAS_STEP + (1.0 - _FINAL_BIAS_STEP) * (1.0 - done))
            for router, counts in zip(routers, used, strict=True):
                router.e_score_correction_bias.add_(bias_step * torch.sign(counts.mean() - counts))
            report(StepReport(step, value, tuple(float(counts.max() / counts.mean()) for counts in used)))
            step += 1
    except KeyboardInterrupt:
        pass
    finally:
        for hook in hooks:
            hook.remove()
        model.eval()
    return step


def held_out_losses(model: Any, domains: Sequence[Domain], window: int, windows: int = 8) -> dict[str, float]:
    """Nats per token of every domain's held-out part, over evenly spaced windows."""
    losses = {}
    with torch.no_grad():
        for domain in domains:
            starts = np.linspace(0, len(domain.held_out_n) - window - 1, windows).astype(int)
            rows = np.stack([domain.held_out_n[s : s + window + 1] for s in starts])
            losses[domain.name] = float(window_loss(model, torch.from_numpy(rows)))
    return losses


def window_loss(model: Any, tokens_BW: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of every next token of windows [B, W + 1]."""
    logits = model(input_ids=tokens_BW[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), tokens_BW[:, 1:].reshape(-1))


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Rounds what is saved to ``dtype``, the correction biases excepted: rounding them changes which experts are chosen."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _counter(counts_E: torch.Tensor) -> Callable[[Any, Any, Any], None]:
    def count(module: Any, inputs: Any, output: Any) -> None:
        counts_E.add_(torch.bincount(output[2].reshape(-1), minlength=counts_E.numel()))

    return count


def _draw(domains: Sequence[Domain], options: TrainOptions, rng: np.random.Generator) -> torch.Tensor:
    rows = []
    for index in range(options.batch):
        tokens_n = domains[index % len(domains)].train_n
        start = int(rng.integers(0, len(tokens_n) - options.window))
        rows.append(tokens_n[start : start + options.window + 1])
    return torch.from_numpy(np.stack(rows))


def _rate(step: int, done: float) -> float:
    cosine = _FINAL_RATE + (1.0 - _FINAL_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))
    return min(1.0, (step + 1) / _WARMUP_STEPS) * cosine


def _optimiser(model: Any, options: TrainOptions) -> torch.optim.Optimizer:
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() >= 2 and "embed" not in name else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
