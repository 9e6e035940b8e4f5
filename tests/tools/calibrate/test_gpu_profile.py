"""The profile of a GPU, from what was measured: read back, made again from the raw file, and used by the evaluation.

The numbers here are made up: no GPU has been measured.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import ConfigError
from afore.tools.calibrate.command import main
from afore.tools.calibrate.gpu_profile import profile_of_gpu, yaml_of
from afore.tools.calibrate.raw import read_raw
from afore.tools.evaluate.command import main as evaluate
from afore.workers.device.hardware import Chip, read_profile

SAID = "GPU 0: made up, 2026-11-30, afore 0.1.0, torch 2.11"


def tile(tokens: int, kernel: str, tile_us: float, row_us: float = 9.0, experts_us: float = 12.5) -> dict[str, Any]:
    return {
        "tile_tokens": tokens,
        "kernel": kernel,
        "tile_us": tile_us,
        "tile_fit_error": 0.03,
        "row_us": row_us,
        "row_fit_error": 0.02,
        "experts_us": experts_us,
        "most_us": 100.0,
        "points": [],
    }


RAW: dict[str, Any] = {
    "machine": "GPU 0: made up",
    "gpu": {"name": "made up", "memory_gb": 96.0, "driver_version": 13010},
    "date": "2026-11-30",
    "versions": {"afore": "0.1.0", "torch": "2.11"},
    "experts": {"name": "GLM-4.5-Air", "hidden_size": 4096, "expert_size": 1408, "dtype": "bfloat16", "store_rows": 36},
    "tiles": [
        tile(16, "triton", 4.0, row_us=8.0, experts_us=11.0),
        tile(64, "grouped", 5.0),
        tile(64, "triton", -1.0, row_us=-2.0),
    ],
    "partition": {"kernel": "triton", "tokens": 64, "top_k": 8, "partition_us": 6.5},
    "copy": {"copy_latency_us": 7.5, "copy_gb_per_s": 1800.0, "fit_error": 0.01},
    "host": {"enqueue_experts_us": 21.0, "record_event_us": 1.0},
}
"""As ``calibrate.gpu.measure_gpu`` has it."""
MEASURED = {
    "memory_gb",
    "memory_efficiency",
    "tile_tokens",
    "gemm_efficiency",
    "layer_host_us",
    "launch_us",
    "partition_us",
}


def test_every_measured_number_says_so_and_every_other_says_whose_it_is(tmp_path: Path) -> None:
    base = read_profile("h200")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml_of(profile_of_gpu(RAW, base, name="mine")), encoding="utf-8")
    again = read_profile(str(path))
    assert again.costs(workers=8).tile_us == pytest.approx(5.0)
    assert again.costs(workers=8).expert_us == pytest.approx(8.0), "the least time of one more expert"
    chip = again.chip
    assert (chip.tile_tokens.value, chip.layer_host_us.value, chip.partition_us.value) == (64, 12.5, 6.5)
    assert (chip.memory_gb.value, chip.launch_us.value, again.wires.copy_us.value) == (96.0, 21.0, 7.5)
    for name in Chip.__dataclass_fields__:
        number = getattr(chip, name)
        assert (number.kind == "measured") == (name in MEASURED), name
        assert SAID in number.source if name in MEASURED else number.source.startswith("kept from profile h200: "), name
    assert again.wires.copy_us.kind == "measured"
    assert again.wires.link_gb_per_s.value == base.wires.link_gb_per_s.value, "one GPU shows no links"
    assert again.wires.link_gb_per_s.source.startswith("kept from profile h200")
    assert all(number.source.startswith("kept from") for number in again.planner_us.values())
    assert "H200" not in again.about, "another GPU's name is not this one's"
    assert SAID in again.about
    assert again.shape == base.shape


@pytest.mark.slow
@pytest.mark.parametrize("report", [False, True], ids=["raw", "gpu_check"])
def test_a_profile_from_a_raw_file_is_used_by_the_evaluation(report: bool, tmp_path: Path) -> None:
    """The same profile that is made where it is measured, out of the raw file or out of a check's report."""
    raw, out = tmp_path / "raw.json", tmp_path / "gpu.yaml"
    raw.write_text(json.dumps({"parts": {"calibration": {"outcome": "passed", "result": RAW}}} if report else RAW))
    assert main(["--from-raw", str(raw), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == yaml_of(profile_of_gpu(RAW, read_profile("h200"), name="gpu"))
    if report:
        return
    asked = ["--quick", "--only", "fig8", "--workloads", "chat", "--layers", "2", "--steps", "1", "--no-pictures"]
    sizes = ["--attention", "1", "--ffn", "2", "--prefill", "1", "--rows", "4", "--slots", "2"]
    assert evaluate([*asked, *sizes, "--profile", str(out), "--out", str(tmp_path / "results")]) == 0
    page = (tmp_path / "results" / "evaluation.md").read_text(encoding="utf-8")
    assert "GPU 0: made up" in page, "every number is told with its source"


def changed(path: str, value: Any) -> dict[str, Any]:
    """``RAW`` with another value, or without it."""
    raw = copy.deepcopy(RAW)
    at: Any = raw
    *groups, name = path.split(".")
    for group in groups:
        at = at[int(group)] if isinstance(at, list) else at[group]
    if value is None:
        del at[name]
    else:
        at[name] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("machine", None, "raw.machine: None is no text"),
        ("versions", {}, "raw.versions: {} is no mapping"),
        ("tiles", [], "raw.tiles: \\[\\] is no list"),
        ("tiles.0.tile_us", float("nan"), "raw.tiles.0.tile_us: nan is no finite number"),
        ("tiles.0.tile_us", 10**400, "raw.tiles.0.tile_us: 10+… is no finite number"),
        ("machine", "\x1b[31m\ud800", "raw.machine: .* is no text"),
        ("tiles.1.tile_tokens", 0.5, "raw.tiles.1.tile_tokens: 0.5 is no number of pairs"),
        ("gpu.memory_gb", -1, "raw.gpu.memory_gb: -1 is less than 0"),
        ("host.enqueue_experts_us", True, "raw.host.enqueue_experts_us: True is no finite number"),
        ("partition.partition_us", None, "raw.partition.partition_us: None"),
        ("experts.hidden_size", 128, "raw.experts: .*give a --base of the same model"),
        ("experts.dtype", "float32", "raw.experts"),
    ],
)
def test_a_raw_file_that_is_none_is_refused_by_field(path: str, value: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        profile_of_gpu(changed(path, value), read_profile("h200"), name="mine")


def test_noise_makes_no_profile() -> None:
    with pytest.raises(ConfigError, match="no tile's time grew"):
        profile_of_gpu({**RAW, "tiles": RAW["tiles"][2:]}, read_profile("h200"), name="mine")
    kept = profile_of_gpu({**RAW, "tiles": [tile(64, "triton", 5.0, row_us=-1.0)]}, read_profile("h200"), name="mine")
    assert kept.chip.memory_efficiency.kind == "inferred"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "holds no mapping"),
        ("[" * 200_000, "is no JSON"),
        ('{"parts": {"calibration": {"outcome": "failed", "why": "x"}}}', "whose calibration did not pass"),
    ],
)
def test_files_that_hold_nothing_are_named(
    text: str | None, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raw.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=names):
        read_raw(str(path))
    assert main(["--from-raw", str(path), "--out", str(tmp_path / "x.yaml")]) == 2
    assert names in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()
    assert main(["--from-raw", str(path), "--gpu", "--out", str(tmp_path / "x.yaml")]) == 2
