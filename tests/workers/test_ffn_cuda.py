"""FFN workers on GPUs, over the strict driver: host memory plays the GPU's, every worker is a process of its own.

Everything but the silicon is the product's: streams, events, handles between processes, batched copies, the plan's upload, the
partition and the experts. Replies equal a float64 reference, and nothing may have been done that CUDA would swallow in silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from afore.core.clock import WallClock
from afore.core.config import DeviceOptions, PlannerOptions, RunConfig
from afore.core.errors import ConfigError, WireError
from afore.core.target import Target
from afore.transport.api import RegionKey
from afore.transport.exchange import ExchangeLayout
from afore.transport.loopback import LoopbackNetwork
from afore.transport.session import RoleContext
from afore.workers.cuda_store import CudaStore
from afore.workers.device.cuda.driver import Driver, load_driver
from afore.workers.device.cuda.kernels import Implementation, torch_implementation, triton_implementation
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.places import ROWS, ROWS_NBYTES
from afore.workers.device.cuda.probe import gpu_of
from afore.workers.ffn_cuda import CudaFfn
from afore.workers.gpu_rows import GpuRows, OpenedRows
from afore.workers.group.base import Meet
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.device.cuda.presence import need_gpu
from tests.workers.ffn_parts import F32, I32, AttentionSide, Plans, Shape
from tests.workers.ffn_rig import Rig
from tests.workers.random_plans import NoPlans, PlannerPlans, RandomPlans
from tests.workers.test_ffn_cpu import RandomExperts

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape(attention=2, ffn=3, microbatches=3, slots=2, layers=2, steps=4, experts=8, top_k=3, hidden=8, expert=12)


class FakeGpuFfn(CudaFfn):
    """The product's parts over the strict driver; the weights come from elsewhere."""

    def __init__(
        self,
        ctx: RoleContext,
        rig: Rig,
        calls: FakeCalls,
        experts: RandomExperts,
        process: int | None = None,
        implementation: Implementation | None = None,
    ) -> None:
        super().__init__(
            Driver(calls, name=ctx.name),
            ctx.clock,
            ctx.config,
            rig.spec,
            implementation or torch_implementation(),
            name=ctx.name,
            ordinal=ctx.rank % calls.machine.gpus,
            on_gpu=False,
            current=lambda handle: contextlib.nullcontext(),
            process=1000 + ctx.rank if process is None else process,
        )
        self._experts = experts

    def _read(self, store: CudaStore) -> Iterator[tuple[int, int]]:
        yield from store.load_each(self._experts.read)


class GpuSide(AttentionSide):
    """An attention worker whose rows lie in its GPU's memory, in a process of its own to the driver."""

    def __init__(
        self, network: LoopbackNetwork, layout: ExchangeLayout, rank: int, driver: Driver, *, on_gpu: bool = False
    ) -> None:
        super().__init__(network, layout, rank)
        self._driver = driver
        self._ordinal = 0 if on_gpu else rank % driver.device_count()
        self._driver.retain_context(self._ordinal)
        self._memory = DeviceMemory(self._driver, self._ordinal if on_gpu else None)
        self._region = self.fabric.register(ROWS_NBYTES, label=ROWS)
        process = None if on_gpu else 500 + rank
        self.rows = GpuRows(self._driver, self._memory, self._ordinal, layout, self._region.buffer, process)

    @property
    def keys(self) -> dict[str, RegionKey]:
        return {**super().keys, ROWS: self._region.key}

    def put(self, target: Target, hidden_TD: F32, ids_TK: I32, weights_TK: F32) -> None:
        tokens = hidden_TD.shape[0]
        for slot, values in zip(self.rows.inputs_M[target.microbatch], (hidden_TD, ids_TK, weights_TK), strict=True):
            slot[:tokens].copy_(torch.from_numpy(values))
        self.inputs.retract(target.microbatch)
        self.inputs.publish(target, tokens)

    def spoil(self, microbatch: int) -> None:
        for slot in self.rows.inputs_M[microbatch]:
            slot.fill_(99)

    def replied_rows(self, target: Target, worker: int, count: int, here_TD: F32) -> F32:
        assert here_TD.shape[0] == 0, "rows that came through the host"
        rows_TD: F32 = self.rows.replies_MN[target.microbatch][worker][:count].cpu().numpy()
        return rows_TD

    def close(self) -> None:
        self._memory.close()
        self._driver.release_context(self._ordinal)


def configured(**device: Any) -> RunConfig:
    plain = SHAPE.config()
    options = DeviceOptions(name="cuda", **device)
    return dataclasses.replace(plain, device=options, planner=PlannerOptions(tile_tokens=16))


async def served(
    seed: int, plans: Plans, machine: Machine, prepare: str = "", *, on_gpu: bool = False
) -> tuple[Rig, list[FakeCalls]]:
    """Serves on one process's driver for each worker; afterwards nothing is left of any of them.

    ``on_gpu``: the attention workers' rows are in their GPUs' memory.
    """
    experts = RandomExperts(SHAPE)
    processes = [FakeCalls(machine) for _ in range(SHAPE.ffn)]
    if prepare == "unpinnable":
        for calls in processes:
            calls.failing["cuMemHostRegister"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    config = configured(attention="cuda" if on_gpu else "cpu", group="direct")
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), seed, config)
    rig.expert = experts.out
    rig.aborts = 0.3 if prepare == "aborts" else 0.0
    sides = [FakeCalls(machine) for _ in range(SHAPE.attention if on_gpu else 0)]
    if on_gpu:
        rig.make_side = lambda network, layout, rank: GpuSide(network, layout, rank, Driver(sides[rank]))
    await rig.open(lambda ctx: FakeGpuFfn(ctx, rig, processes[ctx.rank], experts))
    try:
        await rig.serve(plans)
    finally:
        await rig.close()
    for calls in (*processes, *sides):
        assert calls.mistakes == []
        assert set(calls.live.values()) == {0}, calls.live
    return rig, processes


def machine(**options: Any) -> Machine:
    """GPUs that work as fast as this machine's clock runs."""
    clock = WallClock()
    return Machine(now_us=clock.now_ns() / 1e3, tick=lambda now_us: max(now_us + 0.01, clock.now_ns() / 1e3), **options)


@pytest.mark.slow
async def test_static() -> None:
    rig, processes = await served(0, NoPlans(), machine())
    assert rig.seen.copies == 0
    assert all(calls.named("cuIpcOpenMemHandle") for calls in processes)


@pytest.mark.slow
@pytest.mark.parametrize("plans", ["random", "planner"])
async def test_one_gpu_shared_by_all(plans: str) -> None:
    """Weights of other processes are opened by their handles and copied in batches behind the last use of each slot."""
    for seed in range(2):
        make = RandomPlans(SHAPE, seed) if plans == "random" else PlannerPlans(SHAPE)
        rig, processes = await served(seed, make, machine())
        assert rig.seen.copies > 0
        assert sum(record.replica_pairs for record in rig.records) > 0
        assert all(record.tiles >= 0 for record in rig.records)
        assert any(calls.named("cuMemcpyBatchAsync") for calls in processes)


@pytest.mark.slow
async def test_gpus_that_reach_each_other() -> None:
    rig, _ = await served(1, RandomPlans(SHAPE, 1), machine(gpus=3))
    assert rig.seen.copies > 0


@pytest.mark.slow
async def test_gpus_that_do_not(caplog: pytest.LogCaptureFixture) -> None:
    """Copies go through host memory, which is said, and what they take is measured like any other copy's time."""
    rig, _ = await served(1, RandomPlans(SHAPE, 1), machine(gpus=3, reachable=set()))
    assert rig.seen.copies > 0
    assert "GPU 0 cannot reach GPU 1: copies from ffn-1 go through host memory" in caplog.text
    assert any(record.copy_us > 0 for record in rig.records)


@pytest.mark.slow
async def test_an_old_driver_and_regions_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    rig, processes = await served(2, RandomPlans(SHAPE, 2), machine(version=12040), "unpinnable")
    assert rig.seen.copies > 0
    assert not any(calls.named("cuMemcpyBatchAsync") for calls in processes)
    assert "inputs cannot be pinned where they lie" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 3])
async def test_rows_that_never_leave_the_gpu(gpus: int) -> None:
    """Attention workers' rows are opened by their handles, read in place, and partial rows written back there."""
    for seed in range(2):
        rig, processes = await served(seed, RandomPlans(SHAPE, seed), machine(gpus=gpus), on_gpu=True)
        assert rig.seen.copies > 0
        for calls in processes:
            assert calls.named("cuMemHostRegister") == [], "no input came from the host"
            assert len(calls.named("cuIpcOpenMemHandle")) >= SHAPE.attention


@pytest.mark.slow
async def test_aborted_targets_leave_nothing_behind_in_gpu_memory() -> None:
    rig, _ = await served(3, RandomPlans(SHAPE, 3), machine(), "aborts", on_gpu=True)
    assert any(epoch.sequencer.counts.skipped for epoch in rig.epochs)


class Gathering(FakeGpuFfn):
    """Comes together with the others, and then reads all rows by itself."""

    met: tuple[str, int] = ("", 0)

    @property
    def meets(self) -> bool:
        return True

    async def join(self, meet: Meet, *, rank: int, epoch: int, listen_at: str) -> None:
        self.met = await meet(4711 if rank == 0 else None)
        assert listen_at == ("127.0.0.1" if rank == 0 else "")


@pytest.mark.slow
async def test_workers_are_told_where_they_come_together() -> None:
    experts = RandomExperts(SHAPE)
    processes = [FakeCalls(machine()) for _ in range(SHAPE.ffn)]
    for calls in processes[1:]:
        calls.machine = processes[0].machine
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), 4, configured(attention="cpu", group="direct"))
    rig.expert = experts.out
    made: list[Gathering] = []

    def make(ctx: RoleContext) -> Gathering:
        made.append(Gathering(ctx, rig, processes[ctx.rank], experts))
        return made[-1]

    await rig.open(make)
    try:
        await rig.serve(NoPlans())
    finally:
        await rig.close()
    assert [parts.met for parts in made] == [("127.0.0.1", 4711)] * SHAPE.ffn


def test_a_row_without_a_handle_is_a_typed_error() -> None:
    calls = FakeCalls(Machine())
    driver = Driver(calls)
    layout = ExchangeLayout(num_microbatches=1, num_ffn=1, max_tokens=1, hidden=1, top_k=1)
    with pytest.raises(WireError, match="attention-3: it has published no GPU memory"):
        OpenedRows(driver, DeviceMemory(driver, None), layout, 3, memoryview(bytearray(ROWS_NBYTES)))


class GpuFfn(CudaFfn):
    """The product's parts on this machine's GPU; the weights come from elsewhere."""

    def __init__(self, ctx: RoleContext, rig: Rig, experts: RandomExperts) -> None:
        super().__init__(
            load_driver(name=ctx.name),
            ctx.clock,
            ctx.config,
            rig.spec,
            triton_implementation(),
            name=ctx.name,
            ordinal=0,
        )
        self._experts = experts

    def _read(self, store: CudaStore) -> Iterator[tuple[int, int]]:
        yield from store.load_each(self._experts.read)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["host", "gpu"])
@pytest.mark.parametrize("plans", ["random", "planner"])
async def test_on_a_gpu(plans: str, rows: str) -> None:
    """``rows``: where attention workers have them; in one process they need no handle."""
    need_gpu()
    experts = RandomExperts(SHAPE)
    config = configured(group="direct", attention="cuda" if rows == "gpu" else "cpu")
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), 0, config)
    rig.expert = experts.out
    if rows == "gpu":
        rig.make_side = lambda network, layout, rank: GpuSide(network, layout, rank, load_driver(), on_gpu=True)
    await rig.open(lambda ctx: GpuFfn(ctx, rig, experts))
    try:
        await rig.serve(RandomPlans(SHAPE, 0) if plans == "random" else PlannerPlans(SHAPE))
    finally:
        await rig.close()
    assert rig.seen.copies > 0


def test_workers_take_the_gpus_in_turn() -> None:
    assert [gpu_of((), rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [gpu_of((3, 1), rank, 4) for rank in range(3)] == [3, 1, 3]
    with pytest.raises(ConfigError, match=r"device.gpus: there is no GPU 3: 2 are visible"):
        gpu_of((3, 1), 0, 2)
