"""From a policy's answer to ring entries: generations of bindings, refusals, aborts. Owns the ring's writing side.

The projected state of a slot is what the last entry that bound it says; its generation is that entry's sequence. When a worker
refuses an entry (its own table disagrees), everyone ran that target on primaries, so the whole layer's projection is void: it is
forgotten here and the policy starts anew with empty slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from afore.core.errors import PlanError
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share, Verdict
from afore.core.record import record
from afore.core.target import Phase, Target
from afore.scheduler.bindings import Bindings, CellBindings, DictBindings, Slot
from afore.transport.ring import RingWriter


@record
class Published:
    """What is remembered of a published target while workers are at it."""

    sequence: int
    target: Target
    tokens_A: tuple[int, ...]


@dataclass(slots=True)
class _Unjudged:
    sequence: int
    layer: int


class Publisher:
    """Writes entries in the one execution order."""

    def __init__(
        self,
        ring: RingWriter,
        *,
        epoch: int,
        num_layers: int,
        now_ns: Callable[[], int],
        cells: CellBindings | None = None,
    ) -> None:
        """``now_ns`` stamps entries: readers' leases are counted from there. ``cells``: bindings that a compiled writer shares."""
        self._ring = ring
        self._now_ns = now_ns
        self._epoch = epoch
        self._bindings: Bindings = DictBindings(num_layers) if cells is None else cells
        self._unjudged: deque[_Unjudged] = deque()
        self._refused: set[int] = set()
        """Layers of refused entries that ``newly_refused`` has not told yet."""
        self.refusals = 0
        """Entries that at least one worker refused."""

    @property
    def next_sequence(self) -> int:
        """The sequence that the next entry gets."""
        return self._ring.sequence

    def room(self) -> bool:
        """Whether the ring can take an entry now."""
        return self._ring.room()

    def plan(
        self,
        target: Target,
        tokens_A: tuple[int, ...],
        demand_crc: int,
        shares: Iterable[tuple[int, int, int, int]],
        copies: Iterable[tuple[int, int, int]],
        start: CopyStart,
    ) -> PlanEntry:
        """Publishes a target. ``shares``: (expert, worker, slot, count); ``copies``: (expert, worker, slot).

        Raises ``PlanError`` when a share names a slot that neither holds its expert nor gets it by these copies: nothing is
        published and nothing changes.
        """
        self._hear_verdicts()
        sequence = self._ring.sequence
        bound = self._bindings.table(target.layer)
        copy_records = self._bind(bound, target.layer, copies, sequence)
        share_records = []
        for expert, worker, slot, count in shares:
            holder = bound.get((worker, slot))
            if holder is None or holder[0] != expert:
                raise PlanError(
                    f"plan for {target}: expert {expert} has no replica in slot {slot} of ffn-{worker}"
                    f" ({'empty' if holder is None else f'expert {holder[0]} is there'})"
                )
            share_records.append(Share(expert, worker, slot, count, holder[1]))
        entry = self._entry(
            EntryKind.PLAN, target, tokens_A, demand_crc, tuple(share_records), copy_records, start, cancels=-1
        )
        self._publish(entry, bound)
        return entry

    @property
    def most_copies(self) -> int:
        """Of one entry."""
        return self._ring.layout.max_copies

    def copies(
        self, target: Target, layer: int, copies: Iterable[tuple[int, int, int]], start: CopyStart = CopyStart.NOW
    ) -> PlanEntry:
        """Publishes copies ahead of any target of ``layer`` (a policy that predicts). ``target`` is what led to them.

        Those that start on arrival do so when all targets before this entry have had their turn.
        """
        self._hear_verdicts()
        sequence = self._ring.sequence
        bound = self._bindings.table(layer)
        records = self._bind(bound, layer, copies, sequence)
        at_layer = Target(layer, target.microbatch, target.step)
        nobody_A = (0,) * self._ring.layout.num_attention
        entry = self._entry(EntryKind.COPIES, at_layer, nobody_A, 0, (), records, start, cancels=-1)
        self._publish(entry, bound)
        return entry

    def published(self, layer: int, stamp_ns: int, *, binds: bool) -> None:
        """A compiled writer has published the next entry, of ``layer``; ``binds``: it has shares or copies."""
        if binds:
            self._unjudged.append(_Unjudged(self._ring.sequence, layer))
        self._ring.published(stamp_ns)

    def abort(self, entry: PlanEntry | Published) -> PlanEntry:
        """Publishes the cancellation of ``entry``'s compute and reply; its copies and bindings stay."""
        self._hear_verdicts()
        abort = self._entry(
            EntryKind.ABORT, entry.target, entry.tokens_A, 0, (), (), CopyStart.NOW, cancels=entry.sequence
        )
        self._ring.publish(abort, stamp_ns=self._now_ns())
        return abort

    def newly_refused(self) -> list[int]:
        """Layers whose entries were refused since the last call; their projection is already forgotten here."""
        self._hear_verdicts()
        layers = sorted(self._refused)
        self._refused.clear()
        return layers

    def _hear_verdicts(self) -> None:
        """Before each entry: the slot that it takes may be that of an entry whose verdicts nobody has looked at."""
        while self._unjudged:
            oldest = self._unjudged[0]
            verdicts = self._ring.verdicts(oldest.sequence)
            if any(v not in (Verdict.NONE, Verdict.ACCEPTED) for v in verdicts):
                self.refusals += 1
                self._bindings.keep(oldest.layer, {})
                self._refused.add(oldest.layer)
            elif Verdict.NONE in verdicts:
                break
            self._unjudged.popleft()

    @staticmethod
    def _bind(
        bound: dict[Slot, tuple[int, int]], layer: int, copies: Iterable[tuple[int, int, int]], sequence: int
    ) -> tuple[Copy, ...]:
        records = []
        for expert, worker, slot in copies:
            bound[worker, slot] = (expert, sequence)
            records.append(Copy(layer, expert, worker, slot))
        return tuple(records)

    def _entry(
        self,
        kind: EntryKind,
        target: Target,
        tokens_A: tuple[int, ...],
        crc: int,
        shares: tuple[Share, ...],
        copies: tuple[Copy, ...],
        start: CopyStart,
        *,
        cancels: int,
    ) -> PlanEntry:
        return PlanEntry(
            kind=kind,
            epoch=self._epoch,
            sequence=self._ring.sequence,
            target=target,
            phase=Phase.DECODE,
            tokens_A=tokens_A,
            demand_crc=crc,
            shares=shares,
            copies=copies,
            start=start,
            cancels=cancels,
        )

    def _publish(self, entry: PlanEntry, bound: dict[Slot, tuple[int, int]]) -> None:
        self._ring.publish(entry, stamp_ns=self._now_ns())
        self._bindings.keep(entry.target.layer, bound)
        if entry.shares or entry.copies:
            self._unjudged.append(_Unjudged(entry.sequence, entry.target.layer))
