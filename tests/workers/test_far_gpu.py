"""Experts of a GPU's worker on another machine: read one-sided out of its region, copied from there to the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from afore.core.errors import WireError
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.workers.cuda_store import CudaPeer, CudaStore, FarPeer, region_nbytes
from afore.workers.device.cuda.copies import SpanCopy
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.experts import ExpertRow
from afore.workers.store_shape import StoreShape
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine


def nothing() -> None:
    """The GPU has nothing to do."""


def worker(rank: int, *, readable: bool) -> tuple[FakeCalls, Driver, DeviceMemory, CudaStore, memoryview]:
    """A worker of a machine of its own, with its primaries loaded: expert e is full of e + 1."""
    calls = FakeCalls(Machine())
    driver = Driver(calls)
    driver.retain_context(0)
    memory = DeviceMemory(driver, None)
    layout = StoreLayout(contiguous_primaries(4, 2), rank, 1)
    shape = StoreShape.of(layout, num_layers=2, hidden_size=8, expert_size=4)
    buffer = memoryview(bytearray(region_nbytes(shape, readable=readable)))
    stream = driver.create_stream(0)
    store = CudaStore(buffer, shape, layout, driver, memory, bytes([rank]) * 16, stream, process=100 + rank)

    def read(layer: int, expert: int, row: ExpertRow) -> None:
        for part in row.parts:
            part[:] = 10 * layer + expert + 1

    store.load(read)
    return calls, driver, memory, store, buffer


def test_a_copy_from_another_machine() -> None:
    _, _, _, far, far_buffer = worker(1, readable=True)
    calls, driver, _, near, _ = worker(0, readable=True)
    # What a one-sided read of the expert's spans brings here.
    here = memoryview(bytearray(far_buffer.nbytes))
    *spans, _checksum = far.shape.primary_spans(1, 0)
    for offset, nbytes in spans:
        here[offset : offset + nbytes] = far_buffer[offset : offset + nbytes]
    peer = FarPeer(here, far.shape, far.layout, driver, nothing)
    _, copy = near.copy_closure(1, 2, 0, peer)
    assert isinstance(copy, SpanCopy)
    driver.copy(copy.spans, driver.create_stream(0))
    row = near.layout.redundant_row(0)
    assert np.unique(near.gate_up[1][row].numpy()).tolist() == [13.0]
    assert np.unique(near.down[1][row].numpy()).tolist() == [13.0]
    assert calls.mistakes == []
    assert calls.live["registered"] == 1
    peer.close()
    assert calls.live["registered"] == 0


def test_handles_stand_behind_the_weights() -> None:
    _, _, _, _, buffer = worker(1, readable=True)
    _, driver, _, near, _ = worker(0, readable=False)
    layout = StoreLayout(contiguous_primaries(4, 2), 1, 1)
    shape = StoreShape.of(layout, num_layers=2, hidden_size=8, expert_size=4)
    with pytest.raises(WireError, match="ffn-1: it has published no GPU memory"):
        CudaPeer(memoryview(bytearray(64)), shape, layout, driver, ordinal=0, context=0x100, drain=nothing)
    mine = CudaPeer(buffer, shape, layout, driver, ordinal=0, context=0x100, drain=nothing, process=101)
    assert len(mine.spans(1, 3)) == 2
    assert near.shape.num_layers == 2


def test_a_region_without_weights_is_refused() -> None:
    _, driver, _, near, buffer = worker(0, readable=False)
    with pytest.raises(WireError, match=r"ffn-0: its experts cannot be read from other machines; .*topology\.nodes"):
        FarPeer(buffer, near.shape, near.layout, driver, nothing)
