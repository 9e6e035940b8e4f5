"""``evaluate plan``: shapes that fit, the best of them, and bad input refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import CheckpointError, ConfigError
from afore.models.bundle import bundled_model_path
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import main
from afore.tools.evaluate.model_shape import memory_of, with_model
from afore.tools.evaluate.plan_search import Wish, search, winner
from afore.workers.device.hardware import read_profile

PROFILE = read_profile("a100-glm45air")
BASE = Cell(policy="afore", layers=9, steps=2)


def wish(**changes: Any) -> Wish:
    values: dict[str, Any] = {"gpus": 12, "requests": 600, "output_tokens": 200, "prompt_tokens": 300.0}
    return Wish(**{**values, **changes})


class MadeUp:
    """Cells' results by a formula: afore-plus is best, FFN workers pay, more slots help."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def __call__(self, cells: Sequence[Cell]) -> Mapping[Cell, Mapping[str, Any]]:
        self.cells += cells
        return {cell: self._result(cell) for cell in cells}

    def _result(self, cell: Cell) -> Mapping[str, Any]:
        speed = 1000.0 * min(cell.attention * 2, cell.ffn) + cell.slots + 10 * cell.microbatches
        speed *= {"afore-plus": 1.2, "afore": 1.1}.get(cell.policy, 1.0)
        return {
            "layers": 9,
            "tokens_per_s": speed,
            "counters": {"copies_ahead": 1},
            "itl_p95_ms": 1000.0 * cell.microbatches / speed,
            "targets": 10,
            "copies": {"copies": 5},
        }


def test_ratio_then_m_and_r_then_policy() -> None:
    run = MadeUp()
    offers = search(BASE, PROFILE, wish(), run)
    best = offers[0]
    assert (best.cell.attention, best.cell.ffn) == (4, 8)
    assert (best.cell.microbatches, best.cell.slots, best.cell.policy) == (4, 8, "afore-plus")
    assert winner(offers).startswith("afore-plus, +20.0%")
    assert {cell.policy for cell in run.cells} >= {"static", "eplb-redistribute", "libra", "afore", "afore-plus"}
    assert [offer.tokens_per_s for offer in offers] == sorted((o.tokens_per_s for o in offers), reverse=True)
    # Nine of 45 layers were run: a whole step is five times as long.
    ours = run._result(best.cell)
    assert best.tokens_per_s == pytest.approx(ours["tokens_per_s"] / 5)
    assert best.itl_p95_ms == pytest.approx(ours["itl_p95_ms"] * 5)
    assert all(offer.memory.fits and offer.cell.attention + offer.cell.ffn == 12 for offer in offers)


def test_a_limit_of_latency_comes_before_throughput() -> None:
    limit = search(BASE, PROFILE, wish(itl_ms=1.5), MadeUp())
    assert limit[0].itl_p95_ms <= 1.5
    assert limit[0].cell.microbatches == 2
    assert search(BASE, PROFILE, wish(), MadeUp())[0].tokens_per_s > limit[0].tokens_per_s


def test_devices_without_room_are_refused_with_what_lacks() -> None:
    with pytest.raises(ConfigError, match=r"--gpus: 2 devices have no room: of 74 GB each"):
        search(BASE, PROFILE, wish(gpus=2), MadeUp())


@given(ffn=st.integers(1, 64), slots=st.integers(0, 16), rows=st.integers(1, 400), more=st.integers(1, 100))
def test_memory_grows_with_what_it_holds(ffn: int, slots: int, rows: int, more: int) -> None:
    def of(ffn: int, slots: int, rows: int) -> tuple[float, float]:
        found = memory_of(PROFILE, ffn=ffn, slots=slots, rows=rows, microbatches=3, context_tokens=500)
        return found.attention, found.ffn

    attention, experts = of(ffn, slots, rows)
    assert of(ffn, slots, rows + more)[0] > attention
    assert of(ffn, slots, rows + more)[1] == experts
    assert of(ffn, slots + more, rows)[1] > experts
    assert of(ffn + more, slots, rows)[1] <= experts


def test_glm_air_weighs_what_its_checkpoint_does() -> None:
    held = memory_of(PROFILE, ffn=8, slots=0, rows=0, microbatches=1, context_tokens=0)
    # 110 x 10^9 parameters of two bytes.
    assert 8 * held.ffn + held.attention == pytest.approx(220, rel=0.06)


@pytest.mark.slow
def test_a_users_model_takes_the_profiles_place() -> None:
    profile = with_model(PROFILE, bundled_model_path() / "config.json")
    shape = {
        name: getattr(profile.shape, name).value for name in ("layers", "dense_layers", "experts", "top_k", "expert")
    }
    assert shape == {"layers": 4, "dense_layers": 1, "experts": 128, "top_k": 8, "expert": 32}
    assert profile.shape.shared_experts.value == 1
    assert profile.chip == PROFILE.chip


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--gpus", "1"], "--gpus"),
        (["--gpus", "8", "--traffic", "poems"], "--traffic"),
        (["--gpus", "8", "--profile", "abacus"], "abacus"),
        (["--gpus", "8", "--model", "MODEL/model.json"], "config.json"),
        (["--gpus", "8", "--model", "MODEL"], "config.json"),
        (["--gpus", "8", "--itl-ms", "0"], "--itl-ms"),
        (["--gpus", "2"], "no room"),
    ],
)
def test_bad_input_is_refused_with_its_field(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").write_text("{}")
    given = [argument.replace("MODEL", str(tmp_path)) for argument in arguments]
    assert main(["plan", *given, "--out", str(tmp_path / "out")]) == 2
    assert names in capsys.readouterr().err


TOLD = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"]
)
def test_a_size_that_a_model_leaves_out_is_not_taken_from_another(field: str, tmp_path: Path) -> None:
    """Not from what transformers would put in its place: the shape of the family's first model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TOLD))
    assert with_model(PROFILE, path).shape.experts.value == 16
    path.write_text(json.dumps({name: value for name, value in TOLD.items() if name != field}))
    with pytest.raises(ConfigError, match=f"--model: .* has no {field}; put it there"):
        with_model(PROFILE, path)


def test_another_name_of_a_size_is_one(tmp_path: Path) -> None:
    other = {"num_local_experts" if name == "num_experts" else name: value for name, value in TOLD.items()}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert with_model(PROFILE, tmp_path).shape.experts.value == 16


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse", "folder"])
def test_a_configuration_that_is_no_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        with_model(PROFILE, tmp_path)


@pytest.mark.slow
def test_the_command_ends_with_a_table_and_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--gpus", "3", "--profile", "h200", "--requests", "6", "--layers", "1", "--steps", "1"]
    arguments += ["--traffic", "math", "--out", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "best: " in text
    assert "A:N" in text
    assert main([*arguments, "--json"]) == 0
    found = capsys.readouterr()
    assert found.err == "", "asked again, nothing runs"
    report = json.loads(found.out)
    assert report["offers"][0]["attention"] + report["offers"][0]["ffn"] == 3
    assert report["offers"][0]["attention_gb"] < report["offers"][0]["memory_gb"]
