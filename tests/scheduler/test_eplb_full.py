"""EPLB with movable primaries: layouts, what moving them costs, the assignment under them; and that nothing serves it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.policy_options import EplbOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.policies.eplb_full import EplbFull, assign_evenly
from afore.scheduler.policies.registry import check_policy, make_policy
from tests.scheduler.baseline_cases import context, counts


def full(mode: str = "stop", interval: int = 1, **shape: Any) -> EplbFull:
    options = EplbOptions(mode=mode, window_steps=1, interval_steps=interval)  # type: ignore[arg-type]
    return EplbFull(context(options=PolicyOptions(eplb=options), **shape))


def test_it_begins_with_the_primaries() -> None:
    policy = full(slots=1)
    assert policy.layout_NS(0).tolist() == [[0, 1, -1], [2, 3, -1]]
    assert policy.on_demand(Target(0, 0, 0), counts(5, 1, 2, 0)).tolist() == [[5, 0], [1, 0], [0, 2], [0, 0]]


def test_a_new_layout_by_hand() -> None:
    """80, 20 | 10, 10 with 3 slots each: two replicas of expert 0 (27 each). By load: 27, 27, 27, 20, 10, 10 → worker 0, 1, 0, 1,
    1, and the last has room on worker 0 alone. So worker 0 gets 0, 0, 3 and worker 1 gets 0, 1, 2: what stays is in its slot."""
    policy = full(slots=1)
    policy.on_demand(Target(0, 0, 0), counts(80, 20, 10, 10))
    (layout,) = policy.on_step_end(0, 0)
    assert layout.experts_NS.tolist() == [[0, 3, 0], [2, 1, 0]]
    assert layout.moved == ((3, 0, 1), (0, 0, 2), (1, 1, 1), (0, 1, 2))
    assert layout.start == "arrival"
    # 80 over three: 27, 27, 26.
    assert policy.on_demand(Target(0, 0, 1), counts(80, 20, 10, 10)).tolist() == [[54, 26], [0, 20], [0, 10], [10, 0]]


def test_async_changes_one_layer_a_step() -> None:
    policy = full("async", interval=2, slots=1, layers=2)
    changed = []
    for step in range(4):
        for layer in range(2):
            policy.on_demand(Target(layer, 0, step), counts(80, 20, 10, 10))
        changed.append([(layout.layer, layout.start) for layout in policy.on_step_end(0, step)])
    assert changed == [[], [(0, "now")], [(1, "now")], [(0, "now")]]


@given(
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_every_pair_has_one_place_and_every_expert_a_slot(
    first: list[int], second: list[int], slots: int, workers: int
) -> None:
    policy = full(experts=8, workers=workers, slots=slots)
    before = policy.layout_NS(0)
    policy.on_demand(Target(0, 0, 0), counts(*first))
    (layout,) = policy.on_step_end(0, 0)
    assert set(layout.experts_NS[layout.experts_NS >= 0].tolist()) == set(range(8))
    assert int((layout.experts_NS >= 0).sum()) == 8 + workers * slots
    assert all(layout.experts_NS[w, s] == e != before[w, s] for e, w, s in layout.moved)
    assert len(layout.moved) == int((layout.experts_NS != before).sum())
    assign_EN = policy.on_demand(Target(0, 0, 1), counts(*second))
    assert assign_EN.sum(axis=1).tolist() == second
    holds_EN = np.zeros((8, workers), bool)
    for w, s in np.argwhere(layout.experts_NS >= 0).tolist():
        holds_EN[layout.experts_NS[w, s], w] = True
    assert not assign_EN[~holds_EN].any()
    assert np.array_equal(assign_EN, assign_evenly(layout.experts_NS, counts(*second)))


def test_a_running_system_refuses_it() -> None:
    for refuse in (lambda: check_policy("eplb-full"), lambda: make_policy("eplb-full", context())):
        with pytest.raises(ConfigError, match=r"policy: eplb-full moves primaries.*give eplb"):
            refuse()
