"""The kernel in the place of a whole model's experts: the same logits and keys as transformers' own, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afore.models.checkpoint import Checkpoint
from afore.models.families import FAMILIES
from afore.models.loading import LoadedModel, load_whole_model
from afore.models.prefill_modules import TransformersPrefill
from afore.models.random_families import random_family_checkpoint
from afore.workers.prefill_experts import KernelExperts, use_kernel


def whole(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    with Checkpoint(path) as checkpoint:
        return load_whole_model(checkpoint, dtype)


def experts_of(model: LoadedModel) -> list[torch.nn.Module]:
    layers = model.module.model.layers
    return [layers[index].get_submodule(model.family.experts) for index in model.spec.moe_layers]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_prompt_gives_the_same_logits_and_keys(model_type: str, tmp_path: Path) -> None:
    path = random_family_checkpoint(tmp_path, model_type, seed=3)
    plain, ours = whole(path), whole(path)
    takes = use_kernel(ours)
    assert takes == (model_type != "gpt_oss")
    assert all(isinstance(experts, KernelExperts) == takes for experts in experts_of(ours))
    rng = np.random.default_rng(5)
    for length in (1, 2, 37):
        prompt = rng.integers(3, 256, size=length).tolist()
        expected, got = TransformersPrefill(plain).run(prompt), TransformersPrefill(ours).run(prompt)
        scale = float(np.abs(expected.logits_V).max())
        assert np.abs(got.logits_V - expected.logits_V).max() <= 1e-5 * max(scale, 1.0)
        for theirs, mine in zip(expected.layers, got.layers, strict=True):
            for a, b in zip(theirs, mine, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_other_dtypes_keep_their_modules(tmp_path: Path) -> None:
    model = whole(random_family_checkpoint(tmp_path, "qwen3_moe", seed=3), torch.bfloat16)
    before = experts_of(model)
    assert not use_kernel(model)
    assert experts_of(model) == before
