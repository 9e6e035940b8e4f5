"""Random and mutated bytes at every place where AFORE reads what others wrote. Seeded: a case can be run again.

    python -m tests.transport.fuzz --cases 1000000

Control messages, handshakes, keys, segment headers, frames, the rings of immediates, mailbox, plan ring, feedback. What must hold
of each: no other exception than the typed ones; what is accepted is what a writer could have written; no more memory than a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.transport.fuzz_memory import Entries, Exchanges, Headers, Immediates, Mirrors, Reports, Vectors
from tests.transport.fuzz_wire import Frames, Hellos, Keys, Messages, News, Preambles

MEMORY_LIMIT = 1 << 30
"""Bytes that the whole loop may take beyond what it began with."""
SURFACES: dict[str, Callable[[], Callable[[random.Random], bool]]] = {
    "messages": Messages,
    "preambles": Preambles,
    "hellos": Hellos,
    "keys": Keys,
    "headers": Headers,
    "frames": Frames,
    "news": News,
    "immediates": Immediates,
    "mailbox": Vectors,
    "ring": Entries,
    "feedback": Reports,
    "exchange": Exchanges,
    "mirror": Mirrors,
}


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    cases: Counter[str]
    accepted: Counter[str]
    seconds: float
    grown_bytes: int


def run(cases: int, seed: int, only: str | None = None) -> Outcome:
    """Runs ``cases`` cases, the surfaces in turn. Raises what a case raises, which names its surface, seed and number."""
    with contextlib.ExitStack() as stack:
        surfaces = {name: make() for name, make in SURFACES.items() if only in (None, name)}
        for surface in surfaces.values():
            if isinstance(surface, Hellos | Immediates):
                stack.callback(surface.close)
        return _run(surfaces, cases, seed)


def _run(surfaces: dict[str, Callable[[random.Random], bool]], cases: int, seed: int) -> Outcome:
    names = list(surfaces)
    done: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    before = _resident_bytes()
    start = time.perf_counter()
    for number in range(cases):
        name = names[number % len(names)]
        chance = random.Random(f"{seed}/{number}")
        try:
            accepted[name] += surfaces[name](chance)
        except BaseException as error:
            error.add_note(f"surface {name!r}, seed {seed}, case {number}")
            raise
        done[name] += 1
    grown = _resident_bytes() - before
    assert grown < MEMORY_LIMIT, f"memory grew by {grown:,} bytes"
    return Outcome(done, accepted, time.perf_counter() - start, grown)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Feed random and mutated bytes to everything that reads them.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SURFACES)
    options = parser.parse_args()
    # A length that is believed before it is checked ends in a MemoryError here, and not in a slow machine.
    size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, resource.RLIM_INFINITY))
    outcome = run(options.cases, options.seed, options.only)
    rate = options.cases / outcome.seconds
    sys.stdout.write(
        f"{options.cases:,} cases in {outcome.seconds:.1f} s ({rate:,.0f}/s); peak memory grew by "
        f"{outcome.grown_bytes / 1e6:.1f} MB\n"
    )
    for name, count in outcome.cases.items():
        sys.stdout.write(f"  {name:<11} {count:>9,} cases, {outcome.accepted[name]:>9,} accepted and right\n")


if __name__ == "__main__":
    main()
