"""What a preload compiles for a policy is all that the policy calls, and nothing of another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from afore.core.slots import contiguous_primaries
from afore.scheduler.core_numba import adopt_core, plan_core
from afore.scheduler.costs import Costs
from afore.scheduler.hot_core import hot_core
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.policies.registry import policy_kernels
from tests.scheduler.hot_rig import Shape, Side

ROOT = Path(__file__).parents[2]
ENTRIES = (plan_core, adopt_core, hot_core)


def serve_one(policy: str) -> None:
    """Run in an interpreter of its own: kernels stay compiled for its life."""
    assert not any(entry.signatures for entry in ENTRIES)
    for compile_group in policy_kernels(policy):
        compile_group()
    compiled = [list(entry.signatures) for entry in ENTRIES]
    assert [len(signatures) for signatures in compiled] == [1, 1, 1]
    config = PlannerConfig(num_experts=8, num_workers=2, slots_per_worker=2, tile_tokens=4)
    shape = Shape(
        config=config,
        primaries_E=contiguous_primaries(8, 2),
        attention=1,
        microbatches=2,
        policy=policy,
        costs=Costs(tile_us=20.0, copy_us=1.0, window_us=100.0),
        adapt=False,
    )
    sides = [Side(shape, hot=hot) for hot in (True, False)]
    assert sides[0].hot is not None
    for side in sides:
        side.policy._planners[0].plan(np.arange(8), costs=shape.costs)  # type: ignore[attr-defined]
    assert [list(entry.signatures) for entry in ENTRIES] == compiled


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["afore", "afore-plus", "tests.scheduler.own_policies:MinePlus"])
def test_what_is_compiled_ahead_is_what_is_called(policy: str) -> None:
    program = f"from tests.scheduler.test_policy_kernels import serve_one; serve_one({policy!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_what_is_no_policy_is_left_to_the_check() -> None:
    assert [group.keywords for group in policy_kernels("no-such")[:2]] == [{"search": False}] * 2  # type: ignore[attr-defined]
