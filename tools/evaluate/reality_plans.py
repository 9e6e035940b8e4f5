"""Plans of a real run, made again from what its scheduler was sent: by the same role in virtual time, and by the plain reference.

Demand, feedback (and with it costs) and the order of both are the recorded ones; U_t follows from the plans before. What is
compared are the entries of the ring, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afore.scheduler.policies.afore import Afore
from afore.scheduler.reference import ReferencePlanner
from afore.scheduler.repeat import repeat
from afore.scheduler.traces import TraceReader
from afore.serving.roles import RealWorld
from afore.tools.wire_recorded import read_directory
from afore.tools.wire_replay import replay


class ReferenceAfore(Afore):
    """``afore`` by the literal Algorithm 1, through the scheduler's plain way: nothing compiled."""

    planner = ReferencePlanner  # type: ignore[assignment]  # the same interface, without its checks


REFERENCE = f"{__name__}:{ReferenceAfore.__name__}"


def plans_again(wire: Path, scratch: Path, policy: str) -> dict[str, Any]:
    """By world: how many plans of the recording in ``wire`` came out the same. Raises what a replay does."""
    worlds = {"virtual time": policy}
    if policy == Afore.name:
        worlds["plain reference"] = REFERENCE
    found = {}
    for number, (world, name) in enumerate(worlds.items()):
        again = replay(read_directory(wire), RealWorld(), scratch / str(number), policy=name)
        found[world] = {
            "plans": again.recorded,
            "made": again.replayed,
            "identical": again.identical,
            "same": again.same,
            "first": _first(again.first_difference, again.problems),
        }
    return found


def rows_again(trace: Path) -> dict[str, Any]:
    """The rows of a recorded trace (demand, U_t, costs) through its policy anew: answers and U_t. Raises ``TraceError``."""
    result = repeat(TraceReader(trace))
    return {
        "plans": result.targets,
        "copies": result.copies,
        "identical": result.targets - result.different,
        "same": not result.different and result.targets > 0,
        "first": result.first,
    }


def _first(sequence: int | None, problems: list[str]) -> str:
    if problems:
        return problems[0]
    return "" if sequence is None else f"the entry of sequence {sequence} differs, or is missing"
