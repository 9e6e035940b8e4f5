from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from afore.core.errors import CheckpointError
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import INDEX_FILE, Checkpoint, ExpertReader
from afore.models.loading import load_dense_model, verify_checkpoint
from afore.models.reference import random_checkpoint


@pytest.fixture
def sharded(random_model: Path, tmp_path: Path) -> Path:
    """A copy of the random checkpoint that a test may spoil."""
    return Path(shutil.copytree(random_model, tmp_path / "model"))


def shards(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.safetensors"))
    assert len(found) > 3
    return found


EXPERT = "model.layers.2.mlp.experts.5.gate_proj.weight"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Changes the tensors of the shard that holds ``EXPERT``; returns its file."""
    weight_map = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    file = directory / str(weight_map[EXPERT])
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, Checkpoint(directory) as checkpoint:
        verify_checkpoint(checkpoint)
    assert "\n" not in str(caught.value), "one line"
    assert caught.value.remedy, "says what mends it"
    return caught.value


def test_shards_and_multi_token_prediction_layers_are_accepted(random_model: Path) -> None:
    with Checkpoint(random_model) as checkpoint:
        verify_checkpoint(checkpoint)
        assert any(name.startswith("model.layers.4.") for name in checkpoint.names), "the layer behind the last"
        assert checkpoint.tensors_read == 0, "headers only"


def test_a_missing_index_is_refused(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    error = refusal(sharded)
    assert error.path.endswith(INDEX_FILE)
    assert "shards is missing" in error.problem


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    assert "not a safetensors index" in refusal(sharded).problem


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = shards(sharded)[1]
    lost.unlink()
    assert refusal(sharded).path == str(lost)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_that_is_cut_short_is_named(sharded: Path, keep: int) -> None:
    cut = shards(sharded)[2]
    cut.write_bytes(cut.read_bytes()[:keep])
    error = refusal(sharded)
    assert error.path == str(cut)
    assert "cut short" in error.problem


def test_a_single_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    shutil.copytree(bundled_model_path(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(1_000_000)
    assert refusal(tmp_path / "model").path == str(file)


def test_missing_tensors_are_counted_and_the_first_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    lost = [name for name in sorted(index["weight_map"]) if ".layers.2.mlp.experts.5." in name]
    for name in lost:
        del index["weight_map"][name]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    error = refusal(sharded)
    assert "3 tensors" in error.problem
    assert all(name in error.problem for name in lost)


def test_an_index_that_names_what_a_shard_lacks_is_refused(sharded: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EXPERT]

    file = rewrite(sharded, drop)
    error = refusal(sharded)
    assert error.path == str(file)
    assert EXPERT in error.problem


def test_a_tensor_of_another_shape_is_refused(sharded: Path) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT][:-1].contiguous()

    rewrite(sharded, shorten)
    assert f"{EXPERT} has shape" in refusal(sharded).problem


def test_a_tensor_stored_in_eight_bits_is_refused(sharded: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)

    rewrite(sharded, quantise)
    assert "F8_E4M3" in refusal(sharded).problem


def test_tensors_that_the_configuration_does_not_know_are_refused(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    config["use_qk_norm"] = False
    (sharded / "config.json").write_text(json.dumps(config))
    assert "q_norm" in refusal(sharded).problem or "k_norm" in refusal(sharded).problem


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", None])
def test_a_directory_without_safetensors_is_refused(tmp_path: Path, name: str | None) -> None:
    shutil.copy(bundled_model_path() / "config.json", tmp_path)
    if name is not None:
        (tmp_path / name).touch()
    assert "safetensors" in str(refusal(tmp_path))


def test_an_expert_is_read_as_gate_over_up_rows_and_down(random_model: Path) -> None:
    with Checkpoint(random_model) as checkpoint:
        reader = ExpertReader(checkpoint)
        gate_up, down = torch.empty(reader.gate_up_shape), np.empty(reader.down_shape, dtype=np.float32)
        reader.read_expert(1, 7, gate_up, down)
        assert checkpoint.tensors_read == 3
        prefix = "model.layers.2.mlp.experts.7."
        expected = [checkpoint.read(prefix + f"{part}_proj.weight") for part in ("gate", "up", "down")]
    assert torch.equal(gate_up, torch.cat(expected[:2]))
    assert torch.equal(torch.from_numpy(down), expected[2])


def test_an_expert_is_converted_into_the_buffers_dtype(tmp_path: Path) -> None:
    with Checkpoint(random_checkpoint(tmp_path, dtype=torch.bfloat16)) as checkpoint:
        reader = ExpertReader(checkpoint)
        gate_up, down = torch.empty(reader.gate_up_shape), torch.empty(reader.down_shape)
        reader.read_expert(0, 0, gate_up, down)
        stored = checkpoint.read("model.layers.1.mlp.experts.0.down_proj.weight")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(down, stored.float())


def test_what_is_read_outside_the_index_is_an_error_not_a_crash(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        with pytest.raises(CheckpointError, match="tensor nothing is missing"):
            checkpoint.read("nothing")
        for file in shards(sharded):
            file.write_bytes(b"")
        with pytest.raises(CheckpointError, match="cut short"):
            load_dense_model(checkpoint)
