"""``python -m tests.scheduler.million --cases 1000000 --seed 1``: the core against the reference, for as long as one likes.

Every case is one plan; sequences of eight carry state, so that a difference names (seed, step). Exit status 1 at the first one.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from afore.scheduler.planner import Planner
from afore.scheduler.reference import ReferencePlanner
from afore.scheduler.validate import validate
from tests.scheduler.plan_cases import Situation, differences

STEPS = 8
REPORT_S = 10.0


def run_sequence(seed: int) -> int:
    """Plans of one seed, each equal and accepted by the validator; raises ``AssertionError`` naming the step."""
    rng = np.random.default_rng(seed)
    situation = Situation.random(rng)
    config, primaries_E = situation.config, situation.primaries_E
    planner, reference = Planner(config, primaries_E), ReferencePlanner(config, primaries_E)
    for step, demand_E in enumerate(situation.demands(STEPS)):
        if rng.random() < 0.15:
            slots_NR = situation.slots()
            planner.adopt(slots_NR)
            reference.adopt(slots_NR)
        elif rng.random() < 0.03:
            planner.reset()
            reference.reset()
        before_NR = planner.slots_NR
        protected_NR, costs = situation.protected(), situation.costs()
        plan = planner.plan(demand_E, protected_NR, costs)
        expected = reference.plan(demand_E, protected_NR, costs)
        assert not (found := differences(plan, expected)), (step, found)
        validate(plan, demand_E, before_NR, primaries_E, config, protected_NR)
    return STEPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.million", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="plans to compare (1,000,000)")
    parser.add_argument("--seed", type=int, default=1, help="the first sequence's; others follow (1)")
    options = parser.parse_args()
    done, seed = 0, options.seed * 1_000_000_000
    began = told = time.monotonic()
    while done < options.cases:
        try:
            done += run_sequence(seed)
        except Exception as error:
            sys.stderr.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            return 1
        seed += 1
        now = time.monotonic()
        if now - told > REPORT_S:
            told = now
            sys.stdout.write(f"{done:,} of {options.cases:,} plans equal; {done / (now - began):.0f} a second\n")
            sys.stdout.flush()
    sys.stdout.write(f"{done:,} plans equal, in {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
