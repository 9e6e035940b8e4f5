"""Plan entries for tests."""

from __future__ import annotations

from collections.abc import Iterable

from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share
from afore.core.target import Phase, Target


def entry(
    sequence: int,
    *,
    kind: EntryKind = EntryKind.PLAN,
    layer: int = 0,
    microbatch: int = 0,
    step: int = 0,
    shares: Iterable[tuple[int, int, int, int, int]] = (),
    copies: Iterable[tuple[int, int, int]] = (),
    start: CopyStart = CopyStart.NOW,
    tokens_A: tuple[int, ...] = (1,),
    demand_crc: int = 0,
    cancels: int = -1,
    epoch: int = 1,
) -> PlanEntry:
    """``shares``: (expert, worker, slot, count, generation); ``copies``: (expert, worker, slot), of the target's layer."""
    return PlanEntry(
        kind=kind,
        epoch=epoch,
        sequence=sequence,
        target=Target(layer, microbatch, step),
        phase=Phase.DECODE,
        tokens_A=tokens_A,
        demand_crc=demand_crc,
        shares=tuple(Share(*share) for share in shares),
        copies=tuple(Copy(layer, *copy) for copy in copies),
        start=start,
        cancels=cancels,
    )
