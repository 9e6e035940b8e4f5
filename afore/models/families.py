"""The families of MoE models that can be served: one adapter of a few lines each.

An adapter says how a family's routed experts are named on disk, which layers are sparse, what ``Cache.update`` receives, and
what its modules are called in memory. Everything else is the family's own ``transformers`` code, called layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HeadsAndDim = tuple[int, int]


def no_shared_experts(mlp: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """For families whose MoE layers hold routed experts only."""
    return None


def summed_shared_experts(mlp: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """For families that add ``mlp.shared_experts(hidden)`` as it is (Glm4Moe, DeepSeek, Dots1)."""
    shared: torch.Tensor = mlp.shared_experts(hidden)
    return shared


def grouped_query_kv(config: Any) -> tuple[HeadsAndDim, HeadsAndDim]:
    """(heads, dim) of the keys and of the values that ``Cache.update`` receives in grouped-query attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (int(config.num_key_value_heads), int(head_dim))
    return shape, shape


def sparse_after_first(config: Any) -> tuple[int, ...]:
    """Layers from ``first_k_dense_replace`` on are sparse (Glm4Moe, DeepSeek, Dots1)."""
    return tuple(range(config.first_k_dense_replace, config.num_hidden_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family differs from the others; the defaults are what most of them share."""

    model_type: str
    """``model_type`` in config.json."""
    title: str
    """What error messages call it."""
    moe_layers: Callable[[Any], tuple[int, ...]]
    """Model layer indices of the sparse layers, rising, from the configuration."""
    num_experts: str
    """Attribute of the configuration that holds E."""
    kv_parts: Callable[[Any], tuple[HeadsAndDim, HeadsAndDim]] = grouped_query_kv
    """(heads, dim) of the two tensors that ``Cache.update`` receives."""
    shared: Callable[[Any, torch.Tensor], torch.Tensor | None] = no_shared_experts
    """What a MoE layer adds besides the routed sum: (mlp module, hidden) → rows, or ``None``."""
    has_shared: bool = False
    experts_prefix: str = "model.layers.{layer}.mlp.experts.{expert}."
    """On disk, before the three names of an expert's tensors."""
    gate_name: str = "gate_proj.weight"
    up_name: str = "up_proj.weight"
    down_name: str = "down_proj.weight"
    renames: tuple[tuple[str, str], ...] = ()
    """(in the file, in the module) parts of the names of tensors that are called otherwise in memory."""
    keep_float32: tuple[str, ...] = (".gate.weight", ".e_score_correction_bias")
    """Endings of tensors that stay float32 whatever the model's dtype: rounding them changes which experts are chosen."""
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate: str = "mlp.gate"
    """Module within a layer that returns (logits, weights [T, K], ids [T, K])."""
    experts: str = "mlp.experts"
    """Module within a layer that holds the fused parameters ``gate_up_proj`` [E, 2I, D] and ``down_proj`` [E, D, I]."""

    def expert_tensors(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Names on disk of gate [I, D], up [I, D] and down [D, I] of an expert; ``layer`` is the model's layer index."""
        prefix = self.experts_prefix.format(layer=layer, expert=expert)
        return prefix + self.gate_name, prefix + self.up_name, prefix + self.down_name

    def disk_name(self, module_name: str) -> str:
        """What the file calls the tensor that the module calls ``module_name``."""
        for on_disk, in_module in self.renames:
            module_name = module_name.replace(in_module, on_disk)
        return module_name


GLM4_MOE = Family(
    model_type="glm4_moe",
    title="Glm4Moe (GLM-4.5, GLM-4.6, GLM-4.5-Air)",
    moe_layers=sparse_after_first,
    num_experts="n_routed_experts",
    shared=summed_shared_experts,
    has_shared=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in (GLM4_MOE,)})
"""Every family that can be served, by ``model_type``."""
