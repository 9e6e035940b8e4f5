"""The families of MoE models that can be served: one adapter of a few lines each.

An adapter says how a family's routed experts lie on disk and what they compute, which layers are sparse, how a layer routes, what
``Cache.update`` receives and how far each layer looks back. Everything else is the family's own ``transformers`` code, called layer
by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from afore.models.expert_files import PER_EXPERT, ExpertFiles, InterleavedFiles, PerExpertFiles
from afore.models.expert_form import SILU_GATED, Activation, ExpertForm

if TYPE_CHECKING:
    import torch

HeadsAndDim = tuple[int, int]
Windows = tuple[int | None, ...]


# Routing: (the layer's mlp module, rows [T, D]) → weights [T, K] and the ids [T, K] of K distinct experts.


def by_gate(mlp: Any, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``mlp.gate`` knows all it needs."""
    _, weights_TK, ids_TK = mlp.gate(hidden_TD)
    return weights_TK, ids_TK


def by_router(mlp: Any, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate is called ``mlp.router`` (GptOss, Phimoe)."""
    _, weights_TK, ids_TK = mlp.router(hidden_TD)
    return weights_TK, ids_TK


def by_gate_with_bias_beside(mlp: Any, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The correction bias lies beside ``mlp.gate`` and is passed to it (MiniMaxM2)."""
    _, weights_TK, ids_TK = mlp.gate(hidden_TD, mlp.e_score_correction_bias)
    return weights_TK, ids_TK


# Shared experts: (the layer's mlp module, hidden) → rows to add to the routed sum.


def no_shared_experts(mlp: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """For families whose MoE layers hold routed experts only."""
    return None


def summed_shared_experts(mlp: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Adds ``mlp.shared_experts(hidden)`` as it is, where there are any (Glm4Moe, DeepSeek, Dots1, Ernie4_5_Moe)."""
    if mlp.shared_experts is None:
        return None
    shared: torch.Tensor = mlp.shared_experts(hidden)
    return shared


def gated_shared_expert(mlp: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Adds ``mlp.shared_expert(hidden)`` times a sigmoid gate of its own (Qwen2Moe)."""
    shared: torch.Tensor = mlp.shared_expert_gate(hidden).sigmoid() * mlp.shared_expert(hidden)
    return shared


# From the configuration


def grouped_query_kv(config: Any) -> tuple[HeadsAndDim, HeadsAndDim]:
    """(heads, dim) of the keys and of the values that ``Cache.update`` receives in grouped-query attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (int(config.num_key_value_heads), int(head_dim))
    return shape, shape


def latent_kv(config: Any) -> tuple[HeadsAndDim, HeadsAndDim]:
    """Multi-head latent attention caches one latent and one rotary key a token, for all heads (DeepSeek)."""
    return (1, int(config.kv_lora_rank)), (1, int(config.qk_rope_head_dim))


def every_layer(config: Any) -> tuple[int, ...]:
    """All layers are sparse."""
    return tuple(range(config.num_hidden_layers))


def sparse_after_first(config: Any) -> tuple[int, ...]:
    """Layers from ``first_k_dense_replace`` on are sparse (Glm4Moe, DeepSeek, Dots1)."""
    return tuple(range(config.first_k_dense_replace, config.num_hidden_layers))


def sparse_steps(config: Any) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer that is not listed as dense (Qwen)."""
    return tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )


def sparse_interval(config: Any) -> tuple[int, ...]:
    """Every ``moe_layer_interval``-th layer between two bounds (Ernie4_5_Moe)."""
    last = min(config.moe_layer_end_index, config.num_hidden_layers - 1)
    layers = range(config.moe_layer_start_index, last + 1)
    return tuple(layer for layer in layers if (layer + 1) % config.moe_layer_interval == 0)


def no_windows(config: Any) -> Windows:
    """Every layer sees all positions, whatever else the configuration says."""
    return (None,) * int(config.num_hidden_layers)


def one_window(config: Any) -> Windows:
    """``sliding_window`` holds for all layers, where it is set (Mixtral, Phimoe, Qwen3Moe)."""
    return (config.sliding_window,) * int(config.num_hidden_layers)


def windows_by_layer_type(config: Any) -> Windows:
    """``layer_types`` says which layers slide (GptOss, Qwen2Moe, Dots1)."""
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def never(config: Any) -> bool:
    """For families that have none of it."""
    return False


def always(config: Any) -> bool:
    """For families that always have it."""
    return True


def silu_gated(config: Any) -> ExpertForm:
    """Three matrices and silu."""
    return SILU_GATED


def clamped_with_biases(config: Any) -> ExpertForm:
    """GptOss' own activation, and biases."""
    return ExpertForm(
        activation=Activation.CLAMPED, biases=True, alpha=float(config.swiglu_alpha), limit=float(config.swiglu_limit)
    )


def nothing_else(config: Any) -> str | None:
    """For families of which nothing is refused."""
    return None


def two_choices(config: Any) -> str | None:
    """Phimoe's sparse mixer always chooses two experts, whatever the configuration says."""
    chosen = config.num_experts_per_tok
    return None if chosen == 2 else f"num_experts_per_tok is {chosen}, but this family's router chooses 2"


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
    expert_size: str = "moe_intermediate_size"
    """Attribute of the configuration that holds I."""
    kv_parts: Callable[[Any], tuple[HeadsAndDim, HeadsAndDim]] = grouped_query_kv
    """(heads, dim) of the two tensors that ``Cache.update`` receives."""
    windows: Callable[[Any], Windows] = no_windows
    """Of each layer, how many positions a token sees with its own, or ``None`` for all."""
    route: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = by_gate
    """A MoE layer's choice: (mlp module, rows [T, D]) → weights [T, K] and ids [T, K]."""
    shared: Callable[[Any, torch.Tensor], torch.Tensor | None] = no_shared_experts
    """What a MoE layer adds besides the routed sum: (mlp module, hidden) → rows, or ``None``."""
    has_shared: Callable[[Any], bool] = never
    """Whether there are such experts, from the configuration."""
    expert_form: Callable[[Any], ExpertForm] = silu_gated
    """What a routed expert holds and computes, from the configuration."""
    expert_files: ExpertFiles = PER_EXPERT
    """How the routed experts lie on disk."""
    renames: tuple[tuple[str, str], ...] = ()
    """(in the file, in the module) parts of the names of tensors that are called otherwise in memory."""
    ignored: tuple[str, ...] = ()
    """Parts of the names of tensors that published files hold and nobody uses, beside layers behind the last."""
    keep_float32: tuple[str, ...] = ()
    """Endings of tensors that stay float32 whatever the model's dtype, where the router computes in it: rounding them
    changes which experts are chosen."""
    refusal: Callable[[Any], str | None] = nothing_else
    """Why a configuration of this family cannot be served, or ``None``."""
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    experts: str = "mlp.experts"
    """Module within a layer that holds the fused parameters ``gate_up_proj`` [E, 2I, D] and ``down_proj`` [E, D, I], or those of
    the file where that is fused."""

    def disk_name(self, module_name: str) -> str:
        """What the file calls the tensor that the module calls ``module_name``."""
        for on_disk, in_module in self.renames:
            module_name = module_name.replace(in_module, on_disk)
        return module_name


_ROUTER_FLOAT32 = (".gate.weight", ".e_score_correction_bias")
_BLOCK_SPARSE = PerExpertFiles(
    prefix="model.layers.{layer}.block_sparse_moe.experts.{expert}.", gate="w1.weight", up="w3.weight", down="w2.weight"
)

_TABLE = (
    Family(
        model_type="glm4_moe",
        title="Glm4Moe (GLM-4.5, GLM-4.6, GLM-4.5-Air)",
        moe_layers=sparse_after_first,
        num_experts="n_routed_experts",
        shared=summed_shared_experts,
        has_shared=always,
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="deepseek_v3",
        title="DeepseekV3 (DeepSeek-V3, DeepSeek-R1)",
        moe_layers=sparse_after_first,
        num_experts="n_routed_experts",
        kv_parts=latent_kv,
        shared=summed_shared_experts,
        has_shared=always,
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="deepseek_v2",
        title="DeepseekV2 (DeepSeek-V2, DeepSeek-V2-Lite)",
        moe_layers=sparse_after_first,
        num_experts="n_routed_experts",
        kv_parts=latent_kv,
        shared=summed_shared_experts,
        has_shared=always,
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="dots1",
        title="Dots1 (dots.llm1)",
        moe_layers=sparse_after_first,
        num_experts="n_routed_experts",
        windows=windows_by_layer_type,
        shared=summed_shared_experts,
        has_shared=always,
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="ernie4_5_moe",
        title="Ernie4_5_Moe (ERNIE-4.5)",
        moe_layers=sparse_interval,
        num_experts="moe_num_experts",
        shared=summed_shared_experts,
        has_shared=lambda config: bool(config.moe_num_shared_experts),
        renames=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        ignored=(".mtp_",),
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="qwen3_moe",
        title="Qwen3Moe (Qwen3-30B-A3B, Qwen3-235B-A22B)",
        moe_layers=sparse_steps,
        num_experts="num_experts",
        windows=one_window,
    ),
    Family(
        model_type="qwen2_moe",
        title="Qwen2Moe (Qwen1.5-MoE, Qwen2-57B-A14B)",
        moe_layers=sparse_steps,
        num_experts="num_experts",
        windows=windows_by_layer_type,
        shared=gated_shared_expert,
        has_shared=always,
    ),
    Family(
        model_type="olmoe",
        title="Olmoe (OLMoE)",
        moe_layers=every_layer,
        num_experts="num_experts",
        expert_size="intermediate_size",
    ),
    Family(
        model_type="mixtral",
        title="Mixtral (Mixtral 8x7B, 8x22B)",
        moe_layers=every_layer,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        windows=one_window,
        expert_files=_BLOCK_SPARSE,
        renames=((".block_sparse_moe.", ".mlp."),),
    ),
    Family(
        model_type="phimoe",
        title="Phimoe (Phi-3.5-MoE)",
        moe_layers=every_layer,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        windows=one_window,
        route=by_router,
        expert_files=_BLOCK_SPARSE,
        renames=((".block_sparse_moe.gate.", ".mlp.router."),),
        refusal=two_choices,
    ),
    Family(
        model_type="minimax_m2",
        title="MiniMaxM2 (MiniMax-M2)",
        moe_layers=every_layer,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        route=by_gate_with_bias_beside,
        expert_files=_BLOCK_SPARSE,
        renames=((".block_sparse_moe.", ".mlp."),),
        keep_float32=_ROUTER_FLOAT32,
    ),
    Family(
        model_type="gpt_oss",
        title="GptOss (gpt-oss-20b, gpt-oss-120b)",
        moe_layers=every_layer,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        windows=windows_by_layer_type,
        route=by_router,
        expert_form=clamped_with_biases,
        expert_files=InterleavedFiles(),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _TABLE})
"""Every family that can be served, by ``model_type``."""
