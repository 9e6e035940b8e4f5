"""Which rank a role that was started by hand gets, as a pure machine: it yields compare-and-set steps and is sent their results.

One cell for each rank holds its holder, or nothing. A step changes a cell only where it still holds what the step expects, so
roles that ask at the same moment never get the same rank. A holder whose process is dead is replaced in one such step; nobody
has to clean up after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from afore.core.errors import ConfigError
from afore.core.topology import member_name

FREE = ""


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Put ``desired`` into the cell of ``rank`` if it holds ``expected`` (or has never been used and that is ``FREE``)."""

    rank: int
    expected: str
    desired: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A rank that was taken."""

    rank: int
    replaces: str
    """The dead holder whose place it is; ``FREE`` where nobody had it."""


Claiming = Generator[CompareAndSet, str, Claim]


def claiming(role: str, size: int, wanted: int | None, me: str, lives: Callable[[str], bool]) -> Claiming:
    """Takes ``wanted``, or the lowest rank that nobody who ``lives`` holds. Each step is answered with what the cell holds then.

    ``me`` is unique. Raises ``ConfigError`` for a rank that is held or does not exist, or when all are held.
    """
    if wanted is not None and not 0 <= wanted < size:
        raise ConfigError("rank", f"{role} has ranks 0 to {size - 1}, not {wanted}", "leave it out to take a free one")
    for rank in range(size) if wanted is None else (wanted,):
        expected = FREE
        while True:
            holder = yield CompareAndSet(rank, expected, me)
            if holder == me:
                return Claim(rank, expected)
            if holder != FREE and lives(holder):
                break
            expected = holder
    if wanted is not None:
        raise ConfigError("rank", f"{member_name(role, wanted)} is taken", "leave it out to take a free one")
    which = f"the only {role} rank of the topology is" if size == 1 else f"all {size} {role} ranks of the topology are"
    raise ConfigError("role", f"{which} taken", f"raise topology.{role} where the cluster is started")


def releasing(claim: Claim, me: str) -> CompareAndSet:
    """The step that gives a rank back; it changes nothing where somebody else has it by now."""
    return CompareAndSet(claim.rank, me, FREE)
