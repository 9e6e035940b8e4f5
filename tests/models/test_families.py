"""Every family, layer by layer over a paged cache with experts computed plainly: the tokens of ``generate`` at batch 1."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from afore.core.errors import CheckpointError
from afore.models.checkpoint import SINGLE_FILE, Checkpoint, ExpertReader
from afore.models.config import read_spec
from afore.models.expert_form import Activation, ExpertForm
from afore.models.families import FAMILIES, Family, no_shared_experts, no_windows
from afore.models.fused_forms import KernelChoice
from afore.models.loading import load_dense_model, load_whole_model, verify_checkpoint
from afore.models.local import LocalDecoder
from afore.models.prefill_modules import TransformersPrefill
from afore.models.random_families import RANDOM_FAMILIES, random_family_checkpoint, small_config
from afore.models.reference import Reference

FUSED = sorted(set(FAMILIES) - {"deepseek_v2", "deepseek_v3", "gpt_oss"})
"""Families that run fused."""
EXACT = 1e-4
"""Below this margin the reference itself hangs on the order of float32 sums."""

Maker = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A small random checkpoint of a family, made once. Tests must not change it."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            directory = tmp_path_factory.mktemp(model_type)
            made[model_type] = random_family_checkpoint(directory, model_type, seed=len(model_type))
        return made[model_type]

    return make


def prompts_of(seed: int, count: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, size=int(rng.integers(1, 32))).tolist() for _ in range(count)]


def decode(
    path: Path,
    prompts: list[list[int]],
    tokens: int,
    families: dict[str, Family] | None = None,
    kernels: KernelChoice = "modules",
) -> list[list[int]]:
    """Requests join every second step and leave when they are done."""
    with Checkpoint(path, families=families or FAMILIES) as checkpoint:
        decoder = LocalDecoder.load(checkpoint, block_tokens=5, kernels=kernels)
    return decoder.generate(prompts, [tokens] * len(prompts), join_every=2)


def test_every_family_has_a_maker() -> None:
    assert set(RANDOM_FAMILIES) == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kernels"),
    [*((model_type, "modules") for model_type in FAMILIES), *((model_type, "fused") for model_type in FUSED)],
)
def test_a_family_writes_what_generate_writes(model_of: Maker, model_type: str, kernels: KernelChoice) -> None:
    path = model_of(model_type)
    with Checkpoint(path) as checkpoint:
        verify_checkpoint(checkpoint)
        assert checkpoint.tensors_read == 0, "headers only"
    prompts, reference = prompts_of(seed=3), Reference(path)
    compared = 0
    for prompt, ours in zip(prompts, decode(path, prompts, tokens=12, kernels=kernels), strict=True):
        expected = reference.generate(prompt, 12)
        difference = reference.first_difference(prompt, ours, expected)
        assert difference is None or difference.margin < EXACT, str(difference)
        compared += len(expected) if difference is None else difference.position
    assert compared > 40


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_loaded_by_parts_is_what_transformers_loads(model_of: Maker, model_type: str) -> None:
    """Every tensor of the whole model, and every expert as FFN workers read it, bit for bit."""
    path = model_of(model_type)
    theirs = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True)
    with Checkpoint(path) as checkpoint:
        ours = load_whole_model(checkpoint).module
        reader, spec, family = ExpertReader(checkpoint), checkpoint.spec, checkpoint.family
        dense = load_dense_model(checkpoint).module.state_dict()
        expected = theirs.state_dict()
        assert set(ours.state_dict()) == set(expected)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
        assert set(dense) < set(expected)
        assert not any(".mlp.experts." in name for name in dense)
        for ordinal, layer in enumerate(spec.moe_layers):
            experts = theirs.model.layers[layer].get_submodule(family.experts)
            for expert in (0, spec.num_experts - 1):
                row = _read_row(reader, ordinal, expert)
                for mine, his in zip(row, _canonical(experts, expert), strict=True):
                    assert torch.equal(mine, his)


def _read_row(reader: ExpertReader, ordinal: int, expert: int) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [reader.gate_up_shape, reader.down_shape]
    if reader.has_biases:
        shapes += [reader.gate_up_shape[:1], reader.down_shape[:1]]
    row = [torch.full(shape, torch.nan) for shape in shapes]
    reader.read_expert(ordinal, expert, *row)
    return row


def _canonical(experts: Any, expert: int) -> list[torch.Tensor]:
    """[2I, D] with gate first, [D, I], and biases in the same order."""
    if not hasattr(experts, "gate_up_proj_bias"):
        return [experts.gate_up_proj[expert], experts.down_proj[expert]]
    gate_up, bias = experts.gate_up_proj[expert].T, experts.gate_up_proj_bias[expert]
    return [
        torch.cat([gate_up[0::2], gate_up[1::2]]),
        experts.down_proj[expert].T,
        torch.cat([bias[0::2], bias[1::2]]),
        experts.down_proj_bias[expert],
    ]


def other_limit(config: Any) -> ExpertForm:
    return ExpertForm(activation=Activation.CLAMPED, biases=True, alpha=config.swiglu_alpha, limit=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("dots1", {"windows": no_windows}),
        ("qwen2_moe", {"windows": no_windows}),
        ("qwen2_moe", {"shared": no_shared_experts}),
        ("mixtral", {"windows": no_windows}),
        ("gpt_oss", {"windows": no_windows}),
        ("gpt_oss", {"expert_form": other_limit}),
        ("ernie4_5_moe", {"shared": no_shared_experts}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_adapter_that_forgets_something_writes_other_tokens(
    model_of: Maker, model_type: str, change: dict[str, Any]
) -> None:
    """The small models are not so small that it would go unnoticed."""
    path, prompts = model_of(model_type), prompts_of(seed=3)
    family = dataclasses.replace(FAMILIES[model_type], **change)
    assert decode(path, prompts, 12, {model_type: family}) != decode(path, prompts, 12)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_half_precision_runs_and_keeps_float32_where_the_router_wants_it(tmp_path: Path, model_type: str) -> None:
    """Whatever stays float32, every module takes what it is given, and the logits are those of transformers' own bfloat16."""
    path = random_family_checkpoint(tmp_path, model_type, dtype=torch.bfloat16)
    reference, prompt = Reference(path, torch.bfloat16), prompts_of(seed=1)[0]
    with Checkpoint(path) as checkpoint:
        prefill = TransformersPrefill(load_whole_model(checkpoint, torch.bfloat16))
        kept = {
            name: tensor.dtype
            for name, tensor in load_dense_model(checkpoint, torch.bfloat16).module.state_dict().items()
            if tensor.dtype == torch.float32
        }
    assert all(name.endswith(FAMILIES[model_type].keep_float32) for name in kept)
    logits_V = torch.from_numpy(prefill.run(prompt).logits_V)
    torch.testing.assert_close(logits_V, reference.logits(prompt), atol=0.15, rtol=0.05)


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, Checkpoint(path) as checkpoint:
        verify_checkpoint(checkpoint)
    assert "\n" not in str(caught.value), "one line"
    return caught.value


def edited(path: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another configuration."""
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / SINGLE_FILE).symlink_to(path / SINGLE_FILE)
    return directory


@pytest.mark.parametrize(
    ("model_type", "quantisation", "named"),
    [
        ("deepseek_v3", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8, e4m3"),
        ("minimax_m2", {"quant_method": "fp8", "fmt": "float8_e4m3fn"}, "fp8, float8_e4m3fn"),
        ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    ],
)
def test_quantised_checkpoints_are_refused_by_name(
    model_of: Maker, tmp_path: Path, model_type: str, quantisation: dict[str, Any], named: str
) -> None:
    error = refusal(edited(model_of(model_type), tmp_path, quantization_config=quantisation))
    assert f"quantised ({named})" in error.problem
    assert "bfloat16" in error.remedy


@pytest.mark.parametrize(
    ("model_type", "old", "new", "named"),
    [
        ("gpt_oss", "experts.gate_up_proj", "experts.gate_up_proj_blocks", "mxfp4"),
        ("deepseek_v3", "experts.0.up_proj.weight", "experts.0.up_proj.weight_scale_inv", "fp8"),
    ],
)
def test_quantised_tensors_are_named_when_the_configuration_keeps_silent(
    model_of: Maker, tmp_path: Path, model_type: str, old: str, new: str, named: str
) -> None:
    path = edited(model_of(model_type), tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    name = next(name for name in sorted(tensors) if name.endswith(old))
    tensors[name.removesuffix(old) + new] = tensors.pop(name)
    (path / SINGLE_FILE).unlink()
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    assert f"quantised ({named}: " in refusal(path).problem


def test_fused_experts_of_another_shape_are_refused(model_of: Maker, tmp_path: Path) -> None:
    error = refusal(edited(model_of("gpt_oss"), tmp_path, intermediate_size=24))
    assert "experts.down_proj has shape (8, 16, 32), the configuration says (8, 24, 32)" in error.problem


def test_a_third_choice_of_phimoe_is_refused(model_of: Maker, tmp_path: Path) -> None:
    assert "router chooses 2" in refusal(edited(model_of("phimoe"), tmp_path, num_experts_per_tok=3)).problem


def test_sequences_end_where_the_long_rotary_table_begins(model_of: Maker, tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    }
    path = edited(model_of("phimoe"), tmp_path, rope_parameters=rope)
    assert read_spec(path).max_positions == 64
    prompts = prompts_of(seed=4, count=3)
    reference = Reference(path)
    assert decode(path, prompts, 10) == [reference.generate(prompt, 10) for prompt in prompts]


def test_layers_of_the_next_tokens_prediction_are_ignored(model_of: Maker, tmp_path: Path) -> None:
    path = edited(model_of("ernie4_5_moe"), tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    tensors["model.mtp_block.0.mlp.gate.weight"] = torch.zeros(2)
    (path / SINGLE_FILE).unlink()
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    with Checkpoint(path) as checkpoint:
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {}) for model_type in FAMILIES),
        ("qwen3_moe", {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen2_moe", {"num_hidden_layers": 8, "decoder_sparse_step": 3, "mlp_only_layers": [5]}),
        ("ernie4_5_moe", {"num_hidden_layers": 8, "moe_layer_start_index": 2, "moe_layer_interval": 2}),
        ("ernie4_5_moe", {"num_hidden_layers": 8, "moe_layer_end_index": 5}),
        ("deepseek_v2", {"num_hidden_layers": 5, "first_k_dense_replace": 0}),
    ],
)
def test_sparse_layers_are_those_that_the_modules_make(model_type: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **{**small_config(model_type), **changes})
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    sparse = tuple(index for index, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert FAMILIES[model_type].moe_layers(config) == sparse
    assert len(FAMILIES[model_type].windows(config)) == len(layers)
