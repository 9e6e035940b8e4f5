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
from afore.core.errors import ConfigError
from afore.transport.loopback import LoopbackNetwork
from afore.transport.session import RoleContext
from afore.workers.cuda_store import CudaStore
from afore.workers.device.cuda.driver import Driver, load_driver
from afore.workers.device.cuda.kernels import torch_implementation, triton_implementation
from afore.workers.device.cuda.probe import gpu_of
from afore.workers.ffn_cuda import CudaFfn
from tests.workers.device.cuda.fake_driver import FakeCalls, Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.device.cuda.presence import need_gpu
from tests.workers.ffn_parts import Plans, Shape
from tests.workers.ffn_rig import Rig
from tests.workers.random_plans import NoPlans, PlannerPlans, RandomPlans
from tests.workers.test_ffn_cpu import RandomExperts

SHAPE = Shape(attention=2, ffn=3, microbatches=3, slots=2, layers=2, steps=4, experts=8, top_k=3, hidden=8, expert=12)


class FakeGpuFfn(CudaFfn):
    """The product's parts over the strict driver; the weights come from elsewhere."""

    def __init__(self, ctx: RoleContext, rig: Rig, calls: FakeCalls, experts: RandomExperts) -> None:
        super().__init__(
            Driver(calls, name=ctx.name),
            ctx.clock,
            ctx.config,
            rig.spec,
            torch_implementation(),
            name=ctx.name,
            ordinal=ctx.rank % calls.machine.gpus,
            on_gpu=False,
            current=lambda handle: contextlib.nullcontext(),
            process=1000 + ctx.rank,
        )
        self._experts = experts

    def _read(self, store: CudaStore) -> Iterator[tuple[int, int]]:
        yield from store.load_each(self._experts.read)


def configured() -> RunConfig:
    plain = SHAPE.config()
    return dataclasses.replace(plain, device=DeviceOptions(name="cuda"), planner=PlannerOptions(tile_tokens=16))


async def served(seed: int, plans: Plans, machine: Machine, prepare: str = "") -> tuple[Rig, list[FakeCalls]]:
    """Serves on one process's driver for each worker; afterwards nothing is left of any of them."""
    experts = RandomExperts(SHAPE)
    processes = [FakeCalls(machine) for _ in range(SHAPE.ffn)]
    if prepare == "unpinnable":
        for calls in processes:
            calls.failing["cuMemHostRegister"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), seed, configured())
    rig.expert = experts.out
    await rig.open(lambda ctx: FakeGpuFfn(ctx, rig, processes[ctx.rank], experts))
    try:
        await rig.serve(plans)
    finally:
        await rig.close()
    for calls in processes:
        assert calls.mistakes == []
        assert set(calls.live.values()) == {0}, calls.live
    return rig, processes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
@pytest.mark.parametrize("plans", ["random", "planner"])
async def test_on_a_gpu(plans: str) -> None:
    need_gpu()
    experts = RandomExperts(SHAPE)
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), 0, configured())
    rig.expert = experts.out
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
