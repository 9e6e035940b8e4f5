"""Every interleaving of one writer and two readers on a tiny plan ring, with the ring's own code.

The code runs over instrumented primitives: each load, store and fence is one atomic step, and an entry's bytes are read and written
in several. A process is paused before its next step by re-running its current operation on the results so far, so no thread is
needed and states can be compared. Stores go through a store buffer: drained in order (x86), or in any order within one publication
(a mirror fed by one-sided writes, or the writer's stores without release).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share, Verdict
from afore.core.target import Phase, Target
from afore.transport import ring as ring_module
from afore.transport.entry import Refusal
from afore.transport.records import CACHE_LINE
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout

WRITER, READERS = 0, (1, 2)
BLOCKED = object()
CUTS = (0, 16, 72)
"""An entry moves in three pieces: magic and CRCs, the rest of the header, the plan."""


def make_entry(sequence: int) -> PlanEntry:
    return PlanEntry(
        kind=EntryKind.PLAN,
        epoch=7,
        sequence=sequence,
        target=Target(layer=sequence, microbatch=0, step=3),
        phase=Phase.DECODE,
        tokens_A=(sequence + 1,),
        demand_crc=1000 + sequence,
        shares=(Share(expert=sequence, worker=1, slot=0, count=sequence + 1, generation=sequence),),
        copies=(Copy(layer=sequence, expert=sequence, worker=1, slot=0),),
        start=CopyStart.NOW,
        cancels=-1,
    )


class Pause(Exception):
    """The running operation needs one more step than it was given."""


class NotEnabled(Exception):
    """The step cannot be taken in this state."""


class Violation(Exception):
    """The ring broke a promise."""


@dataclass(frozen=True)
class Process:
    step: int
    """Operations finished."""
    log: tuple[Any, ...]
    """Results of the current operation's steps."""
    private: tuple[int, ...]
    """What the object remembers beyond that."""
    ring: Any = field(compare=False)


@dataclass(frozen=True)
class State:
    memory: bytes
    pending: tuple[tuple[tuple[int, bytes], ...], ...]
    """Each process's stores that others do not see yet."""
    processes: tuple[Process, ...]
    rung: frozenset[int]
    """Sequences whose verdicts somebody saw complete."""


class Machine:
    """Shared memory, and the one process that takes one step."""

    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes)
        self.view = memoryview(self.memory)
        self.running = -1
        self.pending: list[tuple[int, bytes]] = []
        self.log: list[Any] = []
        self.position = 0
        self.budget = 0
        self.on_store: Callable[[], None] = lambda: None
        self.owned: dict[int, range] = {}

    def step(self, kind: str, offset: int, data: Any) -> Any:
        if self.running < 0:
            return self.perform(kind, offset, data)
        if self.position < len(self.log):
            self.position += 1
            return self.log[self.position - 1]
        if self.budget == 0:
            raise Pause
        self.budget -= 1
        result = self.perform(kind, offset, data)
        self.log.append(result)
        self.position += 1
        return result

    def perform(self, kind: str, offset: int, data: Any) -> Any:
        if kind == "store":
            self.on_store()
            if self.running < 0:
                self.view[offset : offset + len(data)] = data
            else:
                self.pending.append((offset, bytes(data)))
            return None
        if kind == "fence":
            if self.pending:
                raise NotEnabled
            return None
        value = bytearray(self.view[offset : offset + data])
        for start, stored in self.pending:
            if start <= offset < start + len(stored):
                value[:] = stored[offset - start : offset - start + data]
        return bytes(value)


class InstrumentedWords:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getitem__(self, index: int) -> int:
        return int.from_bytes(self.machine.step("load", index * 8, 8), "little")

    def __setitem__(self, index: int, value: int) -> None:
        self.machine.step("store", index * 8, value.to_bytes(8, "little"))

    def __len__(self) -> int:
        return len(self.machine.memory) // 8


class Explorer:
    """Visits every state once; ``run`` raises ``Violation`` or returns how many there are."""

    def __init__(self, *, num_slots: int, num_entries: int, any_order: bool, tolerate_torn: bool) -> None:
        self.layout = RingLayout(num_readers=2, num_slots=num_slots, num_attention=1, max_shares=1, max_copies=1)
        self.entries = [make_entry(sequence) for sequence in range(num_entries)]
        self.any_order = any_order
        self.tolerate_torn = tolerate_torn
        self.machine = Machine(self.layout.nbytes)
        self.torn = 0
        self.look_again = True
        """Whether a reader that was woken checks the verdicts itself."""

    def start(self) -> State:
        self.machine.view[:] = bytes(len(self.machine.view))
        rings: list[Any] = [RingWriter(self.machine.view, self.layout, 7, pid=1)]
        rings += [RingReader(self.machine.view, self.layout, rank, 7) for rank in (0, 1)]
        processes = tuple(Process(0, (), self.private(ring), ring) for ring in rings)
        return State(bytes(self.machine.memory), ((), (), ()), processes, frozenset())

    @staticmethod
    def private(ring: Any) -> tuple[int, ...]:
        return (ring._next, getattr(ring, "_lowest", 0))

    def done(self, who: int, process: Process) -> bool:
        return process.step == len(self.entries) * (1 if who == WRITER else 4)

    def operation(self, state: State, who: int, ring: Any) -> object:
        """Runs the current operation of ``who``: BLOCKED, or the sequence whose verdicts it saw complete, or None."""
        step = state.processes[who].step
        if who == WRITER:
            if self.any_order and state.pending[WRITER] and not state.processes[WRITER].log:
                raise NotEnabled  # writes of one link arrive in order: only the bytes of one are unordered
            if not ring.room():
                return BLOCKED
            ring.publish(self.entries[step])
            return None
        sequence, phase = divmod(step, 4)
        if phase == 0:
            entry = ring.peek()
            if isinstance(entry, Refusal):
                if not self.tolerate_torn:
                    raise Violation(f"reader {who} refuses {sequence}: {entry.reason}")
                self.torn += 1
            elif entry is not None:
                if entry != self.entries[sequence]:
                    raise Violation(f"reader {who} accepts {entry} as {sequence}")
                return None
            return BLOCKED
        if phase == 1:
            return sequence if ring.store_verdict(sequence, Verdict.ACCEPTED) else None
        if phase == 2:
            if sequence not in state.rung:
                raise NotEnabled
            if self.look_again and set(ring.verdicts(sequence)) != {Verdict.ACCEPTED}:
                raise Violation(f"reader {who} goes on with {sequence} before all have judged it")
            return None
        ring.advance(0)
        return None

    def step(self, state: State, who: int) -> State | None:
        """The state after one step of ``who``; None where it cannot take one."""
        process, machine = state.processes[who], self.machine
        if self.done(who, process):
            return None
        machine.memory[:] = state.memory
        machine.running, machine.position, machine.budget = who, 0, 1
        machine.log, machine.pending = list(process.log), list(state.pending[who])
        ring = copy.copy(process.ring)
        machine.on_store = (lambda: self.check_reuse(state)) if who == WRITER else (lambda: None)
        rung = state.rung
        try:
            outcome = self.operation(state, who, ring)
        except Pause:
            after = Process(process.step, tuple(machine.log), process.private, process.ring)
        except NotEnabled:
            return None
        else:
            if outcome is BLOCKED:
                after = Process(process.step, (), self.private(ring), ring)
            else:
                after = Process(process.step + 1, (), self.private(ring), ring)
                rung = rung | {outcome} if isinstance(outcome, int) else rung
        finally:
            machine.running = -1
        processes = (*state.processes[:who], after, *state.processes[who + 1 :])
        pending = (*state.pending[:who], tuple(machine.pending), *state.pending[who + 1 :])
        return State(state.memory, pending, processes, rung)

    def check_reuse(self, state: State) -> None:
        """The writer stores into the slot of its next entry: both readers must have moved past what the slot held."""
        replaced = state.processes[WRITER].step - self.layout.num_slots
        for who in READERS:
            if state.processes[who].step // 4 <= replaced:
                raise Violation(f"the slot of {replaced} is written while reader {who} is at it")

    def drains(self, state: State) -> Iterator[State]:
        for who, pending in enumerate(state.pending):
            choices = range(len(pending)) if self.any_order and who == WRITER else range(min(1, len(pending)))
            for index in choices:
                offset, data = pending[index]
                memory = state.memory[:offset] + data + state.memory[offset + len(data) :]
                rest = (*state.pending[:who], pending[:index] + pending[index + 1 :], *state.pending[who + 1 :])
                yield State(memory, rest, state.processes, state.rung)

    def run(self) -> int:
        first = self.start()
        numbers = {first: 0}
        before: list[list[int]] = [[]]
        finished: list[int] = []
        frontier = [first]
        while frontier:
            state = frontier.pop()
            number = numbers[state]
            if all(self.done(who, process) for who, process in enumerate(state.processes)) and not any(state.pending):
                finished.append(number)
            stepped = (self.step(state, who) for who in (WRITER, *READERS))
            for successor in (*(s for s in stepped if s is not None), *self.drains(state)):
                if successor not in numbers:
                    numbers[successor] = len(before)
                    before.append([])
                    frontier.append(successor)
                before[numbers[successor]].append(number)
        # From every state the end must be reachable: otherwise somebody waits for a wake that never comes.
        live, todo = set(finished), list(finished)
        while todo:
            for number in before[todo.pop()]:
                if number not in live:
                    live.add(number)
                    todo.append(number)
        if len(live) != len(before):
            raise Violation(f"{len(before) - len(live)} of {len(before)} states never reach the end")
        return len(before)


@pytest.fixture
def explore(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Explorer]:
    def make(**settings: Any) -> Explorer:
        explorer = Explorer(**settings)
        machine = explorer.machine

        def pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
            ends = [cut for cut in CUTS if cut < nbytes] + [nbytes]
            for start, end in pairwise(ends):
                yield offset + start, end - start

        def copy_in(buffer: memoryview, offset: int, data: memoryview) -> None:
            for start, size in pieces(offset, len(data)):
                machine.step("store", start, data[start - offset : start - offset + size])

        def copy_out(buffer: memoryview, offset: int, nbytes: int) -> bytes:
            return b"".join(machine.step("load", start, size) for start, size in pieces(offset, nbytes))

        monkeypatch.setattr(ring_module, "publishing_words", lambda buffer: InstrumentedWords(machine))
        monkeypatch.setattr(ring_module, "copy_in", copy_in)
        monkeypatch.setattr(ring_module, "copy_out", copy_out)
        monkeypatch.setattr(ring_module, "full_fence", lambda: machine.step("fence", 0, 0))
        return explorer

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "num_entries"), [(1, 3), (2, 4)])
def test_in_order_stores_every_interleaving_keeps_every_promise(
    explore: Callable[..., Explorer], num_slots: int, num_entries: int
) -> None:
    explorer = explore(num_slots=num_slots, num_entries=num_entries, any_order=False, tolerate_torn=False)
    assert explorer.run() > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "num_entries"), [(1, 3), (2, 3)])
def test_bytes_in_any_order_are_refused_while_torn_and_accepted_whole(
    explore: Callable[..., Explorer], num_slots: int, num_entries: int
) -> None:
    explorer = explore(num_slots=num_slots, num_entries=num_entries, any_order=True, tolerate_torn=True)
    assert explorer.run() > 1_000
    assert explorer.torn > 0, "no reader ever saw a torn entry: the model tests nothing"


def test_without_the_fence_a_wake_is_lost(explore: Callable[..., Explorer], monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = explore(num_slots=1, num_entries=1, any_order=False, tolerate_torn=False)
    monkeypatch.setattr(ring_module, "full_fence", lambda: None)
    with pytest.raises(Violation, match="before all have judged it"):
        explorer.run()
    explorer.look_again = False
    with pytest.raises(Violation, match="never reach the end"):
        explorer.run()


def test_without_the_room_check_a_slot_is_reused_too_early(
    explore: Callable[..., Explorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = explore(num_slots=1, num_entries=2, any_order=False, tolerate_torn=False)
    monkeypatch.setattr(RingWriter, "room", lambda ring: True)
    with pytest.raises(Violation, match="is written while reader"):
        explorer.run()


def test_a_word_that_is_published_before_its_entry_is_noticed(
    explore: Callable[..., Explorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = explore(num_slots=1, num_entries=2, any_order=False, tolerate_torn=False)

    def published_first(ring: RingWriter, raw: memoryview, stamp_ns: int) -> None:
        slot = ring._slot_word(ring._next)
        ring._words[slot] = ring._next + 1
        ring_module.copy_in(ring._buffer, slot * 8 + CACHE_LINE, raw)
        ring._next += 1

    monkeypatch.setattr(RingWriter, "_store", published_first)
    with pytest.raises(Violation, match="refuses"):
        explorer.run()


def test_without_checksums_a_wrong_entry_is_accepted(
    explore: Callable[..., Explorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = explore(num_slots=1, num_entries=2, any_order=True, tolerate_torn=True)
    monkeypatch.setattr(zlib, "crc32", lambda data, start=0: 0)
    with pytest.raises(Violation, match="accepts"):
        explorer.run()
