"""Public planners out of their wheels: small real wheels made here, so that no network is needed; and what cannot be had."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from afore.tools.bench import planner
from afore.tools.bench.planner_cores import planner_config
from afore.tools.bench.planner_public import find_public, measure_public

SGLANG = '''
import torch
from sglang.srt.utils import is_cuda, Something

class Base(Something):
    pass

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks, enable_hierarchical=True):
    """Expert e on place e; what is left repeats the hottest."""
    assert not enable_hierarchical and not is_cuda()
    E = weight.shape[1]
    hottest = int(weight[0].argmax())
    places = torch.tensor([list(range(E)) + [hottest] * (num_replicas - E)])
    return places, None, None
'''
VLLM = """
import torch
from .abstract import AbstractEplbPolicy

class DefaultEplbPolicy(AbstractEplbPolicy):
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old=None):
        if num_ranks > 2:
            raise RuntimeError("too many ranks")
        E = weight.shape[1]
        return torch.tensor([[place % E for place in range(num_replicas)]])
"""
AT = {
    "sglang": "sglang/srt/eplb/eplb_algorithms/deepseek.py",
    "vllm": "vllm/distributed/eplb/policy/default.py",
}


def wheel(folder: Path, package: str, content: str, *, path: str = "", version: str = "9.9.9") -> Path:
    folder.mkdir(exist_ok=True)
    made = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(path or AT[package], content)
        archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
    return made


def test_planners_are_loaded_without_their_packages_and_measured(tmp_path: Path) -> None:
    wheel(tmp_path, "sglang", SGLANG)
    wheel(tmp_path, "vllm", VLLM)
    notes: list[str] = []
    found = find_public("sglang,vllm", tmp_path, notes)
    assert [one.name for one in found] == ["sglang 9.9.9 EPLB", "vllm 9.9.9 EPLB"]
    assert notes == [
        "sglang 9.9.9 EPLB: out of sglang-9.9.9-py3-none-any.whl (0 MB)",
        "vllm 9.9.9 EPLB: out of vllm-9.9.9-py3-none-any.whl (0 MB)",
    ]
    config, _ = planner_config(4, 2, 1, 8)
    # Three places a worker: {0, 1, 2} and {3, 0, 0}: expert 0's 24 pairs in three even parts, a tile each.
    figures = measure_public(found, np.array([[24, 8, 8, 8]]), config, notes)
    assert figures["sglang 9.9.9 EPLB"]["tile_imbalance"] == 1.0
    # {0, 1, 2} and {3, 0, 1}: halves of 12 (two tiles each) and of 4 (a tile each): 4 and 4 tiles, of 6 that there must be.
    assert figures["vllm 9.9.9 EPLB"]["tile_imbalance"] == pytest.approx(4 / 3)
    assert figures["vllm 9.9.9 EPLB"]["at_bound"] == 0.0
    assert len(notes) == 2


def test_one_that_cannot_plan_a_setting_costs_that_row_only(tmp_path: Path) -> None:
    wheel(tmp_path, "sglang", SGLANG)
    wheel(tmp_path, "vllm", VLLM)
    notes: list[str] = []
    found = find_public("sglang,vllm", tmp_path, notes)
    config, _ = planner_config(8, 4, 1, 8)
    assert set(measure_public(found, np.full((3, 8), 16), config, notes)) == {"sglang 9.9.9 EPLB"}
    assert notes[-1] == "vllm 9.9.9 EPLB did not plan EP 4, R 1: RuntimeError: too many ranks"


@pytest.mark.parametrize(
    ("content", "path", "why"),
    [
        (SGLANG, "sglang/elsewhere.py", "LookupError: sglang-9.9.9-py3-none-any.whl has its planner somewhere else"),
        ("def rebalance_experts(:", "", "SyntaxError"),
        ("raise RuntimeError('no device')", "", "RuntimeError: no device"),
        ("import no_such_package", "", "ModuleNotFoundError"),
        ("x = 1", "", "AttributeError"),
    ],
)
def test_a_wheel_that_has_no_such_planner_is_a_note(tmp_path: Path, content: str, path: str, why: str) -> None:
    wheel(tmp_path, "sglang", content, path=path)
    notes: list[str] = []
    assert find_public("sglang", tmp_path, notes) == []
    (note,) = notes
    assert note.startswith("sglang's planner could not be had: ")
    assert why in note


def test_a_damaged_wheel_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "vllm-1-py3-none-any.whl").write_bytes(b"half a download")
    notes: list[str] = []
    assert find_public("vllm", tmp_path, notes) == []
    assert "BadZipFile" in notes[0]


@pytest.mark.slow
def test_without_a_network_the_bench_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PIP_CONFIG_FILE", "/dev/null"), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    wheel(tmp_path / "wheels", "vllm", VLLM)
    argv = ["--ep", "2", "--slots", "2", "--tokens", "64", "--rounds", "1", "--targets", "3"]
    assert planner.main([*argv, "--public", "sglang,vllm", "--wheels", str(tmp_path / "wheels")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sglang's planner could not be had: OSError:" in shown
    assert "vllm 9.9.9" in shown
    assert "afore" in shown
