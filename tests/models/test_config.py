from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import CheckpointError
from afore.models.bundle import bundled_model_path
from afore.models.config import read_spec
from afore.models.families import FAMILIES


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """The bundled model's configuration in a directory of its own."""
    shutil.copy(bundled_model_path() / "config.json", tmp_path)
    return tmp_path


def edit(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))
    return directory


def test_the_spec_holds_the_models_numbers() -> None:
    spec = read_spec(bundled_model_path())
    assert (spec.family, spec.num_layers, spec.moe_layers) == ("glm4_moe", 4, (1, 2, 3))
    assert (spec.num_experts, spec.experts_per_token, spec.hidden_size, spec.expert_size) == (128, 8, 128, 32)
    assert (spec.vocab_size, spec.max_positions, spec.num_heads) == (4096, 2048, 4)
    assert spec.kv_parts == ((2, 32), (2, 32))
    assert (spec.expert_dtype, spec.has_shared_experts) == ("bfloat16", True)
    assert spec.expert_elements == 3 * 32 * 128


def test_end_tokens_come_from_the_generation_configuration_first(config_only: Path) -> None:
    edit(config_only, eos_token_id=7)
    assert read_spec(config_only).eos_ids == (7,)
    (config_only / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_spec(config_only).eos_ids == (5, 6)
    (config_only / "generation_config.json").write_text(json.dumps({}))
    edit(config_only, eos_token_id=None)
    assert read_spec(config_only).eos_ids == ()


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_spec(path)
    assert "\n" not in str(caught.value), "one line"
    assert caught.value.remedy, "says what mends it"
    return caught.value


def test_a_missing_directory_is_refused_without_looking_elsewhere() -> None:
    error = refusal(Path("zai-org/GLM-4.5-Air"))
    assert "no such directory" in str(error)
    assert "nothing is downloaded" in error.remedy


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert "file is missing" in str(refusal(tmp_path))


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", "\xff"])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(tmp_path).path


@pytest.mark.parametrize("model_type", ["llama", "", None, 3])
def test_another_family_is_refused_and_the_supported_ones_are_named(config_only: Path, model_type: object) -> None:
    error = refusal(edit(config_only, model_type=model_type))
    assert repr(model_type) in error.problem
    assert all(name in error.remedy for name in FAMILIES)


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8, e4m3"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors, float-quantized"),
        ({"quant_method": "gptq", "bits": 4}, "gptq, 4"),
        ({}, "unnamed method"),
    ],
)
def test_quantised_weights_are_refused_by_name(config_only: Path, quantisation: dict[str, object], named: str) -> None:
    error = refusal(edit(config_only, quantization_config=quantisation))
    assert named in error.problem
    assert "bfloat16" in error.remedy


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"first_k_dense_replace": 4}, "no MoE layer"),
        ({"num_experts_per_tok": 129}, "129 experts per token"),
        ({"num_experts_per_tok": 0}, "0 experts per token"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": "wide"}, "transformers refuses it"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    config_only: Path, changes: dict[str, object], problem: str
) -> None:
    assert problem in refusal(edit(config_only, **changes)).problem
