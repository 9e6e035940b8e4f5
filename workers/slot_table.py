"""One FFN worker's redundant slots: what is bound where, who still uses it, and which copies may start. Pure, no I/O.

Two times meet here. *Reading* order: plan entries are judged and applied as they are published, far ahead of execution.
*Execution* order: a target lets go of its slots when its compute is enqueued (or when it is skipped). A copy may start once
every target that was read before it and uses its slot has let go, and every earlier copy into that slot has started.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from afore.core.errors import SlotError
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Verdict
from afore.core.slots import EMPTY, PrimariesVector
from afore.core.target import Target


class SlotState(enum.IntEnum):
    """Where the newest binding of a slot stands."""

    EMPTY = 0
    HELD = 1
    COPYING = 2
    READY = 3


@dataclass(slots=True)
class HeldCopy:
    """A copy into a slot of this worker. ``generation`` is the sequence of the entry that asked for it."""

    layer: int
    slot: int
    expert: int
    generation: int
    target: Target
    """Of the entry that asked for it."""
    released: bool
    """False while a start=arrival copy waits for its target's turn."""
    ahead: bool = False
    """It came in an entry of its own, ahead of any target."""


@dataclass(slots=True)
class _Slot:
    """Bookkeeping of one (layer, redundant slot)."""

    layer: int
    slot: int
    expert: int = EMPTY
    generation: int = EMPTY
    state: SlotState = SlotState.EMPTY
    uses: set[int] = field(default_factory=set)
    """Sequences of targets that were read, use this slot, and have not let go."""
    last_use: int = -1
    """Newest sequence that let go of this slot after enqueueing compute."""
    held: deque[HeldCopy] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class SlotReport:
    """A redundant slot whose content is complete: what a new epoch's slot table is rebuilt from."""

    layer: int
    slot: int
    expert: int
    generation: int


@dataclass(frozen=True, slots=True)
class BindingRules:
    """What the bindings of every entry of a run keep to: ``PlanRules``."""

    num_layers: int
    num_workers: int
    primary_E: tuple[int, ...]
    """Rank of each expert's primary."""

    def kept_by(self, entry: PlanEntry) -> bool:
        """Ranges and order of all shares and copies, and that no slot and no worker is named twice for one."""
        filled: set[tuple[int, int, int]] = set()
        for copy in entry.copies:
            place = (copy.layer, copy.worker, copy.slot)
            if place in filled or not self._may_copy(copy):
                return False
            filled.add(place)
        if entry.shares and not 0 <= entry.target.layer < self.num_layers:
            return False
        last_expert = last_worker = EMPTY
        taken: set[tuple[int, int]] = set()
        primary_E, num_workers = self.primary_E, self.num_workers
        num_experts = len(primary_E)
        # One test of each share, without a call.
        for share in entry.shares:
            expert, worker, slot = share.expert, share.worker, share.slot
            if not (
                0 <= expert < num_experts
                and 0 <= worker < num_workers
                and share.count > 0
                and slot >= 0
                and primary_E[expert] != worker
                # The partition relies on this order, and on one replica of an expert per worker.
                and (expert > last_expert or (expert == last_expert and worker > last_worker))
                and (worker, slot) not in taken
            ):
                return False
            last_expert, last_worker = expert, worker
            taken.add((worker, slot))
        return True

    def _may_copy(self, copy: Copy) -> bool:
        # A copy of one's own primary would waste a slot, and its source and destination would share a device.
        return (
            0 <= copy.layer < self.num_layers
            and 0 <= copy.expert < len(self.primary_E)
            and 0 <= copy.worker < self.num_workers
            and self.primary_E[copy.expert] != copy.worker
        )


class SlotTable:
    """Bindings of the redundant slots of worker ``rank``: every layer, ``num_slots`` each.

    ``primaries_E``: rank of each expert's primary. The table's answers depend on nothing but the entries that were applied, so
    that it always equals the scheduler's projection of this worker.
    """

    def __init__(
        self, *, rank: int, num_slots: int, num_layers: int, num_workers: int, primaries_E: PrimariesVector
    ) -> None:
        self.rank = rank
        self.num_slots = num_slots
        self._rules = BindingRules(num_layers, num_workers, tuple(primaries_E.tolist()))
        self._slots = [[_Slot(layer, slot) for slot in range(num_slots)] for layer in range(num_layers)]
        self._used_by: dict[int, tuple[_Slot, ...]] = {}
        self._waiting: dict[tuple[int, int], _Slot] = {}
        """Slots with held copies, in the order in which the first of them was read."""

    # Reading

    def judge(self, entry: PlanEntry) -> Verdict:
        """Whether the entry's bindings agree with this table; changes nothing.

        Every worker checks the ranges of all shares and copies (they are the same bytes for everyone) and the bindings of its own.
        """
        if not entry.keeps(self._rules):
            return Verdict.BINDING_DISAGREES
        copied: dict[tuple[int, int], int] = {}
        for copy in entry.copies_of(self.rank):
            if not 0 <= copy.slot < self.num_slots:
                return Verdict.BINDING_DISAGREES
            copied[copy.layer, copy.slot] = copy.expert
        layer = entry.target.layer
        for share in entry.shares_of(self.rank):
            if share.slot >= self.num_slots:
                return Verdict.BINDING_DISAGREES
            bound = self._slots[layer][share.slot]
            copied_expert = copied.get((layer, share.slot))
            expected = (bound.expert, bound.generation) if copied_expert is None else (copied_expert, entry.sequence)
            if (share.expert, share.generation) != expected:
                return Verdict.BINDING_DISAGREES
        return Verdict.ACCEPTED

    def apply(self, entry: PlanEntry) -> None:
        """Takes an entry that all N workers accepted: its shares use slots from now on, its copies are held and bind them."""
        used = []
        layer = entry.target.layer
        for share in entry.shares_of(self.rank):
            slot = self._slots[layer][share.slot]
            slot.uses.add(entry.sequence)
            used.append(slot)
        if used:
            self._used_by[entry.sequence] = tuple(used)
        ahead = entry.kind is EntryKind.COPIES
        for copy in entry.copies_of(self.rank):
            slot = self._slots[copy.layer][copy.slot]
            slot.expert, slot.generation, slot.state = copy.expert, entry.sequence, SlotState.HELD
            released = entry.start is CopyStart.NOW
            held = HeldCopy(copy.layer, copy.slot, copy.expert, entry.sequence, entry.target, released, ahead)
            slot.held.append(held)
            self._waiting.setdefault((copy.layer, copy.slot), slot)

    def needs_agreement(self, entry: PlanEntry) -> bool:
        """Whether the workers' verdicts can change what anyone does with this entry."""
        return entry.kind is not EntryKind.ABORT and bool(entry.shares or entry.copies)

    # Executing

    def arrived(self, sequence: int) -> bool:
        """The entry's turn has come in execution order: its start=arrival copies are released. Whether there were any."""
        released = False
        for slot in self._waiting.values():
            for held in slot.held:
                if held.generation == sequence and not held.released:
                    held.released = released = True
        return released

    def let_go(self, sequence: int, *, enqueued: bool) -> Sequence[tuple[int, int]]:
        """The target has enqueued its compute (or was skipped): returns the (layer, slot) that it used."""
        used = self._used_by.pop(sequence, ())
        for slot in used:
            slot.uses.discard(sequence)
            if enqueued:
                slot.last_use = sequence
        return [(slot.layer, slot.slot) for slot in used]

    def may_start(self, held: HeldCopy) -> bool:
        """Whether every target before the copy's entry has let go of its slot. Later ones use what the copy brings."""
        uses = self._slots[held.layer][held.slot].uses
        return held.released and not any(sequence < held.generation for sequence in uses)

    def take_startable(self) -> list[HeldCopy]:
        """The copies that may start now, oldest entry first; they count as started."""
        started: list[HeldCopy] = []
        for key, slot in list(self._waiting.items()):
            while slot.held and self.may_start(slot.held[0]):
                held = slot.held.popleft()
                if slot.generation == held.generation:
                    slot.state = SlotState.COPYING
                started.append(held)
            if not slot.held:
                del self._waiting[key]
        started.sort(key=lambda held: held.generation)
        return started

    def landed(self, layer: int, slot: int, generation: int) -> None:
        """The copy's bytes are complete."""
        bound = self._slots[layer][slot]
        if bound.generation == generation:
            bound.state = SlotState.READY

    # Looking

    def state(self, layer: int, slot: int) -> tuple[int, int, SlotState]:
        """(expert, generation, state) of the newest binding."""
        bound = self._slots[layer][slot]
        return bound.expert, bound.generation, bound.state

    @property
    def held_copies(self) -> int:
        """Copies that were read and have not started."""
        return sum(len(slot.held) for slot in self._waiting.values())

    def report(self) -> tuple[SlotReport, ...]:
        """Slots with complete content. Raises ``SlotError`` while copies are held: let them land first."""
        if self._waiting:
            raise SlotError(f"ffn-{self.rank}: {self.held_copies} copies are held; report after they have landed")
        return tuple(
            SlotReport(slot.layer, slot.slot, slot.expert, slot.generation)
            for slots in self._slots
            for slot in slots
            if slot.state is SlotState.READY
        )
