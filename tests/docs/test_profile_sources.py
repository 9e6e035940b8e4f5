"""A profile's number that a page of the documentation is the source of stands there."""

from __future__ import annotations

import re

import pytest

from afore.workers.device.hardware import profile_names, read_profile
from tests.docs.pages import Page

_ROW = re.compile(r"^\| (\d+) \| 8 \| ([\d.]+), ", re.M)


@pytest.mark.parametrize("name", profile_names())
def test_times_of_a_plan_are_those_of_the_page(name: str) -> None:
    found = {int(workers): float(median) for workers, median in _ROW.findall(Page("docs/benchmarks.md").text)}
    assert len(found) == 7
    for workers, number in read_profile(name).planner_us.items():
        if "docs/benchmarks.md" in number.source:
            assert (number.value, number.kind) == (found[workers], "measured")
            assert "R = 8" in number.source


def test_a_page_is_named_for_times_of_a_plan_alone() -> None:
    for name in profile_names():
        profile = read_profile(name)
        for group in (profile.shape, profile.chip, profile.wires):
            for field in type(group).__dataclass_fields__:
                assert "docs/" not in getattr(group, field).source, f"{name}, {field}: hold it against its page here"
    assert any("docs/benchmarks.md" in number.source for number in read_profile("h200").planner_us.values())
