"""``python -m tests.scheduler.million --cases 1000000 --seed 1``: the core against the reference, for as long as one likes.

Every case is one plan; sequences carry state, so that a difference names (seed, step). Most are small, so that a million take
minutes; one sequence in ``LARGE_EVERY`` is of a model's size. Exit status 1 at the first difference.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator

import numpy as np

from afore.scheduler.planner import compile_planner
from tests.scheduler.plan_cases import Situation, equal_plans

STEPS = 8
LARGE_EVERY = 64
REPORT_S = 10.0
SEEDS_AT_ONCE = 32
"""Sequences that a process takes at a time."""


def run_sequence(seed: int) -> int:
    """Plans of one seed, each equal and accepted by the validator; returns how many. Raises ``AssertionError`` naming the step."""
    rng = np.random.default_rng(seed)
    large = seed % LARGE_EVERY == LARGE_EVERY - 1
    situation = Situation.large(rng) if large else Situation.random(rng)
    return sum(1 for _ in equal_plans(situation, STEPS))


def run_sequences(first: int) -> tuple[int, str]:
    """``SEEDS_AT_ONCE`` sequences from ``first``: (plans, what went wrong)."""
    done = 0
    for seed in range(first, first + SEEDS_AT_ONCE):
        try:
            done += run_sequence(seed)
        except Exception as error:
            return done, f"seed {seed}: {type(error).__name__}: {error}"
    return done, ""


def results(first: int, jobs: int) -> Iterator[tuple[int, str]]:
    """Batches of sequences without end, in this process or in ``jobs`` of them."""
    firsts = itertools.count(first, SEEDS_AT_ONCE)
    if jobs == 1:
        yield from map(run_sequences, firsts)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        while True:
            yield from pool.imap_unordered(run_sequences, itertools.islice(firsts, 4 * jobs))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.million", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="plans to compare (1,000,000)")
    parser.add_argument("--seed", type=int, default=1, help="the first sequence's; others follow (1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    options = parser.parse_args()
    compile_planner()
    done = 0
    began, began_cpu = time.monotonic(), time.process_time()
    told = began
    for plans, problem in results(options.seed * 1_000_000_000, options.jobs):
        done += plans
        if problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        if done >= options.cases:
            break
        now = time.monotonic()
        if now - told > REPORT_S:
            told = now
            sys.stdout.write(f"{done:,} of {options.cases:,} plans equal; {done / (now - began):.0f} a second\n")
            sys.stdout.flush()
    took_s = time.monotonic() - began
    alone = f", {done / (time.process_time() - began_cpu):.0f} a second of CPU time" if options.jobs == 1 else ""
    sys.stdout.write(f"{done:,} plans equal, in {took_s:.0f} s: {done / took_s:.0f} a second{alone}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
