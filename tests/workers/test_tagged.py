"""The store of tags: it must convict every kind of misuse, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from afore.core.errors import SlotError
from afore.core.slots import EMPTY, StoreLayout, contiguous_primaries
from afore.workers.store_shape import StoreShape
from afore.workers.tagged import TaggedPeer, TaggedStore


class _Rig:
    """Worker 0 of two, with experts 0 and 1 and two slots; experts 2 and 3 come from worker 1."""

    def __init__(self) -> None:
        primaries_E = contiguous_primaries(4, 2)
        layouts = [StoreLayout(primaries_E, rank, 2) for rank in range(2)]
        shapes = [StoreShape.of(layout, num_layers=2, hidden_size=8, expert_size=4) for layout in layouts]
        self.now = (0, 0)
        self.store = TaggedStore(shapes[0], layouts[0], lambda: self.now)
        self.store.load()
        self.peer = TaggedPeer(shapes[1], layouts[1])

    def write(self, start_ns: int, end_ns: int, expert: int, *, slot: int = 0, layer: int = 0) -> None:
        self.now = (start_ns, end_ns)
        nbytes, do = self.store.copy_closure(layer, expert, slot, self.peer, generation=start_ns)
        assert nbytes == 3 * 8 * 4 * 4
        do()

    def read(self, start_ns: int, end_ns: int, expert: int, *, row: int = 2, layer: int = 0) -> None:
        self.now = (start_ns, end_ns)
        expert_S = np.full(4, -1, dtype=np.int32)
        expert_S[row] = expert
        self.store.gate_up[layer].read(expert_S)


def test_use_then_copy_then_use_is_innocent() -> None:
    rig = _Rig()
    assert rig.store.content(0, 0) == (EMPTY, EMPTY)
    rig.write(0, 10, 2)
    rig.read(10, 20, 2)
    rig.write(20, 30, 3)
    rig.read(30, 40, 3)
    rig.write(25, 45, 2, slot=1)  # other slots and layers do not matter
    rig.write(25, 45, 2, layer=1)
    rig.read(0, 50, 1, row=1)
    report = rig.store.check()
    assert (report.reads, report.writes, report.replica_reads) == (3, 4, 2)
    assert rig.store.content(0, 0) == (3, 20)


def test_the_devices_times_count_not_the_order_of_the_calls() -> None:
    rig = _Rig()
    rig.read(30, 40, 3)
    rig.write(20, 30, 3)
    rig.read(10, 20, 2)
    rig.write(0, 10, 2)
    assert rig.store.check().reads == 2


@pytest.mark.parametrize(
    ("read", "write"),
    [((10, 20), (19, 25)), ((10, 20), (5, 11)), ((10, 20), (12, 13)), ((10, 20), (0, 30)), ((10, 20), (10, 20))],
)
def test_a_read_during_a_write_is_convicted(read: tuple[int, int], write: tuple[int, int]) -> None:
    rig = _Rig()
    rig.write(-5, -4, 2)
    rig.write(*write, 2)
    rig.read(*read, 2)
    with pytest.raises(SlotError, match=r"ffn-0: layer 0 slot 0: .* began during"):
        rig.store.check()


def test_a_read_of_another_expert_is_convicted() -> None:
    rig = _Rig()
    rig.write(0, 10, 2)
    rig.read(20, 30, 3)
    with pytest.raises(
        SlotError, match=r"slot 0: read of expert 3 in \[20, 30\] ns found the content of write of expert 2"
    ):
        rig.store.check()


def test_a_read_before_anything_was_written_is_convicted() -> None:
    rig = _Rig()
    rig.read(0, 10, 2)
    rig.write(10, 20, 2)
    with pytest.raises(SlotError, match="found nothing that was ever written"):
        rig.store.check()


def test_a_primary_read_as_another_expert_is_convicted() -> None:
    rig = _Rig()
    rig.read(0, 10, 1, row=0)
    with pytest.raises(SlotError, match="primary 0: read of expert 1"):
        rig.store.check()


def test_two_writes_at_once_are_convicted() -> None:
    rig = _Rig()
    rig.write(0, 10, 2)
    rig.write(9, 20, 3)
    with pytest.raises(SlotError, match=r"generation 9.* began during write of expert 2"):
        rig.store.check()


def test_work_that_takes_no_time_is_judged_in_the_order_in_which_it_ran() -> None:
    rig = _Rig()
    rig.write(5, 5, 2)
    rig.read(5, 5, 2)
    rig.write(5, 5, 3)
    rig.read(5, 5, 3)
    assert rig.store.check().reads == 2


def test_a_copy_from_someone_who_does_not_own_the_expert_is_refused() -> None:
    rig = _Rig()
    with pytest.raises(SlotError, match="ffn-1 does not own expert 0"):
        rig.store.copy_closure(0, 0, 0, rig.peer)
