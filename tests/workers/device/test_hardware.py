"""Hardware profiles: every number says where it is from, and costs follow from them."""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from afore.core.errors import ConfigError
from afore.workers.device.base import Work
from afore.workers.device.hardware import parse_profile, profile_names, read_profile
from afore.workers.device.profile import CostProfile


def raw(name: str = "a100-glm45air") -> dict[str, Any]:
    folder = resources.files("afore.workers.device") / "data"
    content = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", profile_names())
def test_the_packages_profiles_can_be_read(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    costs = profile.costs(workers=8)
    assert costs.expert_bytes == 3 * 4096 * 1408 * 2
    assert costs.copy_ns(1) > costs.expert_bytes / profile.wires.link_gb_per_s.value


def test_a_file_is_read_as_the_packages_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw() | {"name": "mine"}))
    assert read_profile(str(path)).costs(workers=8).tile_us == read_profile("a100-glm45air").costs(workers=8).tile_us


def _without(path: str) -> dict[str, Any]:
    content = copy.deepcopy(raw())
    group, _, name = path.partition(".")
    if name:
        del content[group][name]
    else:
        del content[group]
    return content


def _with(path: str, value: Any) -> dict[str, Any]:
    content = copy.deepcopy(raw())
    *groups, name = path.split(".")
    place: Any = content
    for group in groups:
        place = place[group]
    place[int(name) if name.isdecimal() else name] = value
    return content


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (None, "no mapping"),
        (_without("wires"), "lacks wires"),
        (_without("chip.tflops"), "lacks tflops"),
        (_with("chip.d_us", {"value": 1, "kind": "given", "source": "x"}), "d_us"),
        (_with("chip.tflops", 312), "no mapping"),
        (_with("chip.tflops.value", -1), "no finite number"),
        (_with("chip.tflops.value", float("nan")), "no finite number"),
        (_with("chip.tflops.value", True), "no finite number"),
        (_with("chip.tflops.kind", "guessed"), "kind and source"),
        (_with("chip.tflops.source", ""), "kind and source"),
        (_with("planner_us", {}), "planner_us"),
        (_with("planner_us", {"eight": 1}), "planner_us"),
        (_with("about", ""), "about"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(content: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_profile(content, "test")


def test_no_such_profile() -> None:
    with pytest.raises(ConfigError, match="a100-glm45air"):
        read_profile("a100")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile("/nowhere/at/all.yaml")


def test_planning_time_is_between_its_neighbours() -> None:
    profile = read_profile("a100-glm45air")
    assert profile.plan_us(8) == 14.63
    assert profile.plan_us(12) == pytest.approx((14.63 + 25.46) / 2)
    assert profile.plan_us(1) == 8.23
    assert profile.plan_us(500) == 245.81


def test_faster_hardware_costs_less() -> None:
    slow, fast = (read_profile(name).costs(workers=8) for name in ("a100-glm45air-roofline", "h200"))
    works = (Work("attention", None, tokens=300, context=90_000), Work("prefill", None, tokens=300, context=45_000))
    for work in (*works, Work("gather", None, tokens=1300), Work("sample", None, tokens=300)):
        assert fast.work_ns(work) < slow.work_ns(work)
    assert fast.copy_ns(0) < slow.copy_ns(0)


def test_an_expert_costs_its_tiles_but_at_least_its_weights() -> None:
    costs = read_profile("a100-glm45air-roofline").costs(workers=8)
    assert costs.tile_us < costs.expert_us < 3 * costs.tile_us

    def us(*pairs: int) -> float:
        return costs.rows_us(np.cumsum([0, *pairs]).astype(np.int32))

    assert us(0, 0) == 0
    assert us(1, 0) == us(64, 0) == costs.expert_us
    assert us(64 * 3) == pytest.approx(3 * costs.tile_us)
    assert us(1, 64 * 3) == pytest.approx(costs.expert_us + 3 * costs.tile_us)


def test_what_a_policy_puts_on_the_path_is_a_work_of_its_own() -> None:
    plain: CostProfile = read_profile("a100-glm45air").costs(workers=8)
    charged = read_profile("a100-glm45air").costs(workers=8, redistribute_us=100.0)
    work = Work("redistribute", None)
    assert charged.work_ns(work) - plain.work_ns(work) == 100_000
