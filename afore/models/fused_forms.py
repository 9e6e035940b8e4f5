"""What the fused attention path can compute, family by family, and why it cannot where it cannot.

Decided from the configuration alone, so that a run is refused before anything is loaded. A family that is not listed is not
capable: a guess about somebody's attention would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from afore.core.errors import ConfigError
from afore.models.families import Family, gated_shared_expert, no_shared_experts, summed_shared_experts

KernelChoice = Literal["auto", "modules", "fused"]
KernelPath = Literal["modules", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateForm:
    """How a router chooses K of E experts from its scores, and what the chosen ones weigh."""

    sigmoid: bool
    """Scores are sigmoids of the logits; otherwise their softmax."""
    groups: int = 1
    """Experts come in so many groups of equal size; a group's score is the sum of its two best."""
    kept_groups: int = 1
    """Only experts of the best so many groups can be chosen."""
    normalised: bool = True
    """Weights are divided by their sum, which counts as ``least_sum`` when it is smaller."""
    least_sum: float = 0.0
    scale: float = 1.0
    """Weights are multiplied with it, last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedForm:
    """What a family's layers compute beside matrices; sizes, biases and norms are read off its modules."""

    gate: GateForm | None
    """``None``: the family's own router is called."""
    interleaved_rotary: bool = False
    """Rotary pairs are neighbours; otherwise they lie half the rotary width apart."""
    clip_qkv: float | None = None
    """Queries, keys and values are limited to ± this, after their norm."""


def _softmax_gate(normalised: bool) -> GateForm:
    return GateForm(sigmoid=False, normalised=normalised)


def _grouped_sigmoid(config: Any) -> FusedForm:
    return FusedForm(
        gate=GateForm(
            sigmoid=True,
            groups=config.n_group,
            kept_groups=config.topk_group,
            normalised=config.norm_topk_prob,
            least_sum=1e-20,
            scale=config.routed_scaling_factor,
        )
    )


def _ernie(config: Any) -> FusedForm:
    return FusedForm(gate=GateForm(sigmoid=False, least_sum=config.moe_norm_min), interleaved_rotary=True)


def _qwen(config: Any) -> FusedForm:
    return FusedForm(gate=_softmax_gate(config.norm_topk_prob))


def _olmoe(config: Any) -> FusedForm:
    return FusedForm(gate=_softmax_gate(config.norm_topk_prob), clip_qkv=config.clip_qkv)


def _mixtral(config: Any) -> FusedForm:
    return FusedForm(gate=_softmax_gate(True))


def _phimoe(config: Any) -> FusedForm:
    return FusedForm(gate=None)


def _minimax(config: Any) -> FusedForm:
    return FusedForm(gate=GateForm(sigmoid=True))


_FORMS: Mapping[str, Callable[[Any], FusedForm]] = MappingProxyType(
    {
        "glm4_moe": _grouped_sigmoid,
        "dots1": _grouped_sigmoid,
        "ernie4_5_moe": _ernie,
        "qwen3_moe": _qwen,
        "qwen2_moe": _qwen,
        "olmoe": _olmoe,
        "mixtral": _mixtral,
        "phimoe": _phimoe,
        "minimax_m2": _minimax,
    }
)
_LATENT = "multi-head latent attention: its cache holds latents, not keys and values"
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "gpt_oss": "attention sinks, which the fused softmax does not have",
    }
)


def why_not_fused(family: Family, config: Any, dtype: str = "float32") -> str | None:
    """Why ``family`` with this ``transformers`` configuration cannot run fused; ``None`` when it can."""
    if family.model_type not in _FORMS:
        return _REASONS.get(family.model_type, "nobody has written down what its attention computes")
    if dtype != "float32":
        return f"weights in {dtype}: the fused kernels compute in float32"
    if family.shared not in (no_shared_experts, summed_shared_experts, gated_shared_expert):
        return "shared experts of a kind that no kernel computes"
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    if heads % kv_heads:
        return f"{heads} query heads do not share {kv_heads} key heads evenly"
    form = _FORMS[family.model_type](config)
    if form.clip_qkv is not None and form.clip_qkv <= 0:
        return f"clip_qkv {form.clip_qkv}, which leaves nothing of queries, keys and values"
    gate = form.gate
    if gate is not None:
        experts, per_token = getattr(config, family.num_experts), config.num_experts_per_tok
        if experts % gate.groups or experts // gate.groups < min(2, gate.groups):
            return f"{experts} experts in {gate.groups} groups"
        if gate.kept_groups * (experts // gate.groups) < per_token:
            return f"{per_token} experts a token of {gate.kept_groups} groups of {experts // gate.groups}"
    return None


def fused_form(family: Family, config: Any) -> FusedForm:
    """What the fused path computes for a family that is capable."""
    return _FORMS[family.model_type](config)


def kernel_path(choice: KernelChoice, family: Family, config: Any, dtype: str = "float32") -> KernelPath:
    """Which path an attention worker takes. Raises ``ConfigError`` when it must be fused and cannot be."""
    reason = why_not_fused(family, config, dtype)
    if choice == "fused" and reason is not None:
        raise ConfigError("kernels", f"{family.title} cannot run fused: {reason}", "use auto or modules")
    return "fused" if choice != "modules" and reason is None else "modules"


def describe_path(choice: KernelChoice, family: Family, config: Any, dtype: str = "float32") -> str:
    """One phrase for people: the path, and why it is not the faster one. Raises like ``kernel_path``."""
    if kernel_path(choice, family, config, dtype) == "fused":
        return "fused kernels"
    reason = why_not_fused(family, config, dtype)
    return f"transformers' modules ({'as asked for' if reason is None or choice == 'modules' else reason})"
