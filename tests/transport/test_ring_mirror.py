"""The ring on several nodes: the same entries in order, verdicts on which all copies agree, torn words that mislead nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.errors import PlanError, WireError
from afore.core.plan import Verdict
from afore.transport import bells
from afore.transport.api import Lane, Region
from afore.transport.bells import BellKind, decode
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.records import VERDICT_BITS, WORD
from afore.transport.ring import ReaderLag, RingReader, RingWriter
from afore.transport.ring_mirror import RingCopies, RingMirror, word_bytes
from tests.transport.test_ring import EPOCH, LAYOUT, make_entry

TIMEOUT_US = 1e6
PLACES = (0, 0, 1)
"""The node of each of three readers."""


class TwoNodes:
    """The scheduler's ring, and a copy on each of two nodes; readers 0 and 1 share the first one's."""

    def __init__(self) -> None:
        network = LoopbackNetwork(WallClock())
        self.scheduler = LoopbackFabric(network, "scheduler")
        self.workers = [LoopbackFabric(network, f"ffn-{rank}") for rank in range(3)]
        self.ring = self.scheduler.register(LAYOUT.nbytes, label="ring")
        self.writer = RingWriter(self.ring.buffer, LAYOUT, EPOCH)
        self.regions: list[Region] = [self.workers[lead].register(LAYOUT.nbytes, label="ring") for lead in (0, 2)]
        self.mirrors = [RingMirror(region.buffer, LAYOUT, EPOCH, pid=1) for region in self.regions]
        self.readers = [RingReader(self.regions[PLACES[rank]].buffer, LAYOUT, rank, EPOCH) for rank in range(3)]
        self.copies: list[RingCopies] = []

    async def open(self) -> None:
        self.doors = [
            (await self.scheduler.connect(f"ffn-{lead}", Lane.DEMAND, timeout_us=TIMEOUT_US), region.key)
            for lead, region in zip((0, 2), self.regions, strict=True)
        ]
        for rank, worker in enumerate(self.workers):
            other = 1 - PLACES[rank]
            ring = await worker.connect("scheduler", Lane.DEMAND, timeout_us=TIMEOUT_US)
            mirror = await worker.connect(f"ffn-{(0, 2)[other]}", Lane.DEMAND, timeout_us=TIMEOUT_US)
            written = (ring, self.ring.key)
            self.copies.append(
                RingCopies(rank, LAYOUT, written, [(mirror, self.regions[other].key)], timeout_us=TIMEOUT_US)
            )

    async def publish(self, sequence: int) -> None:
        """The scheduler publishes, and writes the entry to both nodes."""
        self.writer.publish(make_entry(sequence), stamp_ns=1_000 * (sequence + 1))
        for link, key in self.doors:
            await link.write(
                key,
                LAYOUT.entry_offset(sequence),
                self.writer.raw_entry(sequence),
                notify=bells.PLAN(sequence),
                timeout_us=TIMEOUT_US,
            )

    async def hear(self, node: int) -> list[BellKind]:
        """The node's lead takes what has come."""
        kinds = []
        for notification in await self.regions[node].notified(timeout_us=TIMEOUT_US):
            bell = decode(notification.immediate)
            kinds.append(bell.kind)
            if bell.kind is BellKind.PLAN:
                self.mirrors[node].publish(bell)
        return kinds

    async def judge(self, rank: int, sequence: int, verdict: Verdict) -> None:
        self.readers[rank].store_verdict(sequence, verdict)
        await self.copies[rank].verdict(sequence, verdict)


@pytest.fixture
async def nodes() -> TwoNodes:
    made = TwoNodes()
    await made.open()
    return made


async def test_entries_are_read_once_their_lead_has_published_them(nodes: TwoNodes) -> None:
    await nodes.publish(0)
    assert [reader.peek() for reader in nodes.readers] == [None] * 3
    assert await nodes.hear(0) == [BellKind.PLAN]
    assert [reader.peek() for reader in nodes.readers] == [make_entry(0), make_entry(0), None]
    await nodes.hear(1)
    assert nodes.readers[2].peek() == make_entry(0)


async def test_verdicts_of_all_nodes_meet_on_each_and_at_the_scheduler(nodes: TwoNodes) -> None:
    await nodes.publish(0)
    await nodes.hear(0)
    await nodes.hear(1)
    await nodes.judge(2, 0, Verdict.BINDING_DISAGREES)
    assert await nodes.hear(0) == [BellKind.VERDICTS]
    await nodes.judge(0, 0, Verdict.ACCEPTED)
    await nodes.judge(1, 0, Verdict.ACCEPTED)
    expected = (Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.BINDING_DISAGREES)
    assert nodes.writer.verdicts(0) == expected
    assert [reader.verdicts(0) for reader in nodes.readers] == [expected] * 3


async def test_a_slot_is_written_again_only_after_every_node_has_moved_past_it(nodes: TwoNodes) -> None:
    for sequence in range(LAYOUT.num_slots):
        await nodes.publish(sequence)
    await nodes.hear(0)
    await nodes.hear(1)
    for rank in (0, 1):
        await nodes.judge(rank, 0, Verdict.ACCEPTED)
        nodes.readers[rank].advance(5)
        await nodes.copies[rank].cursor(1)
    assert not nodes.writer.room()
    with pytest.raises(PlanError, match=r"ffn-2 is 4 entries behind"):
        nodes.writer.publish(make_entry(LAYOUT.num_slots))
    await nodes.judge(2, 0, Verdict.ACCEPTED)
    nodes.readers[2].advance(5)
    await nodes.copies[2].cursor(1)
    assert nodes.writer.room()
    await nodes.publish(LAYOUT.num_slots)
    await nodes.hear(1)
    nodes.readers[2].store_verdict(1, Verdict.ACCEPTED)
    assert nodes.readers[2].peek() == make_entry(1)


async def test_a_reader_of_another_node_is_timed_by_its_moves_not_by_its_clock(nodes: TwoNodes) -> None:
    for sequence in range(3):
        await nodes.publish(sequence)
    assert nodes.writer.lagging(10_000)[0] == ReaderLag(0, 3, 9_000)
    await nodes.copies[1].cursor(1)
    await nodes.copies[2].cursor(3)
    # Whoever moved since the last look moved just now, for all that can be known.
    assert nodes.writer.lagging(20_000) == [ReaderLag(0, 3, 19_000), ReaderLag(1, 2, 0)]
    assert nodes.writer.lagging(50_000) == [ReaderLag(0, 3, 49_000), ReaderLag(1, 2, 30_000)]


def test_an_entry_out_of_turn_is_refused() -> None:
    mirror = RingMirror(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT, EPOCH, pid=1)
    with pytest.raises(WireError, match=r"scheduler-0.*announces plan 1 where 0 is due"):
        mirror.publish(decode(bells.PLAN(1)))
    with pytest.raises(WireError, match="the layout needs"):
        RingMirror(memoryview(bytearray(LAYOUT.nbytes - 8)), LAYOUT, EPOCH, pid=1)


@given(st.integers(0, 1 << 48), st.integers(0, 1 << 20), st.sampled_from(Verdict), st.integers(1, WORD - 1))
def test_a_torn_word_never_passes_for_a_later_one(earlier: int, further: int, verdict: Verdict, landed: int) -> None:
    """Bytes land from the lowest up: what stands there meanwhile is the old word, or names a sequence that is neither."""
    later = earlier + further
    old = word_bytes((earlier + 1) << VERDICT_BITS | Verdict.ACCEPTED)
    new = word_bytes((later + 1) << VERDICT_BITS | verdict)
    torn = int.from_bytes(new[:landed] + old[landed:], "little")
    if torn >> VERDICT_BITS == later + 1:
        assert torn == int.from_bytes(new, "little")
    cursor = int.from_bytes(word_bytes(later)[:landed] + word_bytes(earlier)[landed:], "little")
    assert cursor <= later
