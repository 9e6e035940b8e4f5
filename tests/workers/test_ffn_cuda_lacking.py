"""FFN workers on GPUs where something is lacking: memory that other processes can open, a compiler for our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from afore.core.clock import WallClock
from afore.transport.loopback import LoopbackNetwork
from afore.workers.device.cuda.kernels import Implementation
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.ffn_rig import Rig
from tests.workers.random_plans import PlannerPlans
from tests.workers.test_ffn_cpu import RandomExperts
from tests.workers.test_ffn_cuda import SHAPE, FakeGpuFfn, configured

pytestmark = pytest.mark.usefixtures("one_thread")


async def alike(calls_of: Callable[[int], FakeCalls], **options: Any) -> Rig:
    """Serves a few targets, rows on the host; ``options`` are those of each worker's parts."""
    experts = RandomExperts(SHAPE)
    rig = Rig(SHAPE, LoopbackNetwork(WallClock()), 0, configured(attention="cpu", group="direct"))
    rig.expert = experts.out
    try:
        await rig.open(lambda ctx: FakeGpuFfn(ctx, rig, calls_of(ctx.rank), experts, **options))
        await rig.serve(PlannerPlans(SHAPE))
    finally:
        await rig.close()
    return rig


async def test_workers_of_one_process_need_no_handles() -> None:
    """Where the driver exports no memory, experts still move between tasks of one process."""
    calls = FakeCalls()
    calls.failing["cuIpcGetMemHandle"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    rig = await alike(lambda rank: calls, process=7)
    assert rig.seen.copies > 0
    assert calls.named("cuIpcOpenMemHandle") == []
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}


async def test_workers_of_other_processes_are_told_why_they_cannot() -> None:
    machine = Machine()
    processes = [FakeCalls(machine) for _ in range(SHAPE.ffn)]
    for calls in processes:
        calls.failing["cuIpcGetMemHandle"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # of a group of roles
        await alike(lambda rank: processes[rank])
    assert "lets no other process open its GPU memory (CUDA IPC)" in repr(flat(caught.value))


def flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [one for each in error.exceptions for one in flat(each)]
    return [error]


async def test_kernels_that_do_not_run_here_give_way_to_torchs(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    calls = [FakeCalls() for _ in range(SHAPE.ffn)]
    rig = await alike(lambda rank: calls[0], process=7, implementation=Implementation("triton", fail, fail))
    assert rig.seen.copies > 0
    assert "kernels triton do not work here, torch's are taken: RuntimeError: Failed to find C compiler" in caplog.text
