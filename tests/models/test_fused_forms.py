"""Which families run fused is decided by name, and a refusal says why."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoConfig

from afore.core.errors import ConfigError
from afore.models.families import FAMILIES
from afore.models.fused_forms import describe_path, kernel_path, why_not_fused
from afore.models.random_families import small_config

NOT_FUSED = {"deepseek_v2": "latents", "deepseek_v3": "latents", "gpt_oss": "sinks"}
_CAPABLE = [model_type for model_type in FAMILIES if model_type not in NOT_FUSED]


def config_of(model_type: str, **changes: object) -> object:
    return AutoConfig.for_model(model_type, **{**small_config(model_type), **changes})


@pytest.mark.parametrize("model_type", _CAPABLE)
def test_capable_families_run_fused_unless_modules_are_asked_for(model_type: str) -> None:
    family, config = FAMILIES[model_type], config_of(model_type)
    assert why_not_fused(family, config) is None
    assert kernel_path("auto", family, config) == kernel_path("fused", family, config) == "fused"
    assert kernel_path("modules", family, config) == "modules"
    assert describe_path("auto", family, config) == "fused kernels"
    assert describe_path("modules", family, config) == "transformers' modules (as asked for)"


@pytest.mark.parametrize(("model_type", "reason"), NOT_FUSED.items())
@pytest.mark.filterwarnings("ignore")
def test_others_run_modules_and_are_refused_by_name(model_type: str, reason: str) -> None:
    family, config = FAMILIES[model_type], config_of(model_type)
    assert kernel_path("auto", family, config) == kernel_path("modules", family, config) == "modules"
    assert reason in describe_path("auto", family, config)
    with pytest.raises(ConfigError, match=reason) as caught:
        kernel_path("fused", family, config)
    assert caught.value.field == "kernels"
    assert family.title in caught.value.problem


def test_nobody_guesses_what_an_unknown_family_computes() -> None:
    family = dataclasses.replace(FAMILIES["mixtral"], model_type="mixtral_of_tomorrow")
    assert why_not_fused(family, config_of("mixtral")) == "nobody has written down what its attention computes"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mixtral", {"num_attention_heads": 3}, "3 query heads"),
        ("olmoe", {"clip_qkv": 0.0}, "clip_qkv 0.0"),
        ("dots1", {"n_group": 3}, "8 experts in 3 groups"),
        ("dots1", {"n_group": 8}, "8 experts in 8 groups"),
        ("dots1", {"n_group": 4}, "3 experts a token of 1 groups of 2"),
    ],
)
def test_shapes_that_the_kernels_do_not_have(model_type: str, changes: dict[str, float], reason: str) -> None:
    assert reason in str(why_not_fused(FAMILIES[model_type], config_of(model_type, **changes)))


def test_shared_experts_of_another_kind() -> None:
    family = dataclasses.replace(FAMILIES["dots1"], shared=lambda mlp, hidden: hidden)
    assert "shared experts" in str(why_not_fused(family, config_of("dots1")))


def test_other_dtypes_are_named() -> None:
    assert "bfloat16" in str(why_not_fused(FAMILIES["mixtral"], config_of("mixtral"), "bfloat16"))
