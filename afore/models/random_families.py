"""Small random checkpoints of every family that can be served, to compare with ``transformers`` on.

``reference.random_checkpoint`` writes Glm4Moe ones with all that published files bring along; here is one maker for all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from afore.models.quiet import no_progress_bar, one_thread

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_SPARSE_AFTER_FIRST: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_LOCAL: dict[str, Any] = {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}

RANDOM_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4_moe": {**_SPARSE_AFTER_FIRST, "head_dim": 8, "use_qk_norm": True},
        "deepseek_v3": {**_SPARSE_AFTER_FIRST, **_LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
        "deepseek_v2": {
            **_SPARSE_AFTER_FIRST,
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
        "dots1": {**_SPARSE_AFTER_FIRST, "head_dim": 8, "sliding_window": 6, "max_window_layers": 1},
        "ernie4_5_moe": {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "qwen3_moe": {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        "qwen2_moe": {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
        "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0},
        "mixtral": {**_LOCAL, "sliding_window": 8},
        "phimoe": {**_LOCAL, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1},
        "minimax_m2": {**_LOCAL, "num_experts_per_tok": 3, "head_dim": 8},
        "gpt_oss": {**_LOCAL, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 6},
    }
)
"""What is special about each family's small configuration, by ``model_type``: everything that its adapter has to know is on."""


def small_config(model_type: str) -> dict[str, Any]:
    """All values of a family's small configuration."""
    return {**_COMMON, **RANDOM_FAMILIES[model_type]}


def random_family_checkpoint(
    directory: str | Path, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Writes a small random checkpoint of a family into ``directory`` (made if need be) and returns it.

    Routers are drawn from N(0, 0.3) and correction biases from N(0, 0.05); biases, norms and attention sinks are drawn too, since
    those that are zero or one could be forgotten without a trace. ``config`` overrides values of the family's configuration.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    values = {**small_config(model_type), **config}
    with one_thread(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values, dtype=dtype))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            _draw(name, tensor)
        with no_progress_bar():
            model.save_pretrained(str(path))
    return path


def _draw(name: str, tensor: torch.Tensor) -> None:
    """Draws anew what initialisation leaves at a constant, and routers."""
    if name.endswith((".gate.weight", ".router.weight", ".router.bias")):
        tensor.normal_(0.0, 0.3)
    elif name.endswith("e_score_correction_bias"):
        tensor.normal_(0.0, 0.05)
    elif name.endswith(("bias", ".sinks")):
        tensor.normal_(0.0, 0.2)
    elif "norm" in name:
        tensor.normal_(1.0, 0.2)
