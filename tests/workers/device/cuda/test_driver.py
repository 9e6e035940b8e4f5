"""The driver's calls: what errors say, batches and their fall-back, and that the real bindings take our arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from afore.core.errors import HostError
from afore.workers.device.cuda.driver import Driver, Span, load_driver
from afore.workers.device.cuda.errors import CudaError, meaning
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.device.cuda.presence import missing_gpu


def opened(calls: FakeCalls) -> Driver:
    driver = Driver(calls)
    driver.retain_context(0)
    return driver


def test_an_error_names_the_mistake_and_the_remedy() -> None:
    driver = opened(FakeCalls(Machine(room_nbytes=100)))
    with pytest.raises(
        CudaError, match=r"allocate 200 bytes on the GPU: the GPU's memory is full \(CUDA_ERROR_OUT_OF_MEMORY\); lower"
    ):
        driver.allocate(200)
    with pytest.raises(CudaError, match="there is no such GPU") as caught:
        driver.device_name(3)
    assert caught.value.code == "CUDA_ERROR_INVALID_DEVICE"
    assert meaning("CUDA_ERROR_OF_TOMORROW")[0] == "the driver refused"


def test_memory_needs_a_context() -> None:
    with pytest.raises(CudaError, match="without the device's context"):
        Driver(FakeCalls()).allocate(8)


def test_a_driver_that_cannot_start() -> None:
    calls = FakeCalls()
    calls.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(HostError, match="no GPU is visible"):
        Driver(calls)


def copied(calls: FakeCalls, count: int) -> None:
    """Copies ``count`` pieces of one allocation into another, the other way round."""
    driver = opened(calls)
    source, destination = driver.allocate(count * 4), driver.allocate(count * 4)
    stream = driver.create_stream(0)
    host = driver.allocate_pinned(count * 4)
    there = (ctypes.c_int32 * count).from_address(host)
    there[:] = list(range(1, count + 1))
    driver.copy([Span(source, host, count * 4)], stream)
    driver.copy([Span(destination + 4 * i, source + 4 * (count - 1 - i), 4) for i in range(count)], stream)
    driver.copy([Span(host, destination, count * 4)], stream)
    assert list(there) == list(range(count, 0, -1))
    assert calls.mistakes == []


def test_many_copies_are_one_call() -> None:
    calls = FakeCalls()
    copied(calls, 5)
    assert [name for name, _ in calls.named("cuMemcpyBatchAsync", "cuMemcpyAsync")] == [
        "cuMemcpyAsync",
        "cuMemcpyBatchAsync",
        "cuMemcpyAsync",
    ]


def old(calls: FakeCalls) -> None:
    calls.machine.version = 12040


def without(calls: FakeCalls) -> None:
    calls.missing.add("cuMemcpyBatchAsync")


def refusing(calls: FakeCalls) -> None:
    calls.failing["cuMemcpyBatchAsync"] = CUresult.CUDA_ERROR_NOT_SUPPORTED


def picky(calls: FakeCalls) -> None:
    calls.failing["cuMemcpyBatchAsync"] = CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("prepare", [old, without, refusing, picky])
def test_a_driver_without_batches_copies_one_by_one(prepare: Callable[[FakeCalls], None]) -> None:
    calls = FakeCalls()
    prepare(calls)
    copied(calls, 4)
    assert len(calls.named("cuMemcpyAsync")) == 6
    assert calls.named("cuMemcpyBatchAsync") == []


def test_a_batch_that_fails_for_another_reason_is_an_error() -> None:
    calls = FakeCalls()
    calls.failing["cuMemcpyBatchAsync"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="a kernel touched memory that is not its own"):
        copied(calls, 4)
    assert calls.named("cuMemcpyBatchAsync") == []


def test_memory_of_another_process() -> None:
    machine = Machine()
    mine, theirs = FakeCalls(machine), FakeCalls(machine)
    owner, user = opened(mine), opened(theirs)
    address = owner.allocate(64)
    exported = owner.export(address)
    assert len(exported) == 64
    with pytest.raises(CudaError, match="without the device's context"):
        owner.open(exported)  # CUDA opens nothing in the process that exported it
    assert user.open(exported) == address
    owner.free(address)
    assert mine.mistakes == ["64 bytes were freed while another process has them mapped"]
    with pytest.raises(CudaError, match="used after it was closed"):
        user.open(exported)


def test_peer_access_twice_is_no_mistake() -> None:
    calls = FakeCalls(Machine(gpus=2, reachable={(0, 1)}))
    driver = opened(calls)
    assert driver.can_reach(0, 1)
    assert not driver.can_reach(1, 0)
    for _ in range(2):
        driver.reach(0x101)
    assert len(calls.named("cuCtxEnablePeerAccess")) == 1


def test_a_host_function_is_enqueued_by_the_library_itself() -> None:
    calls = FakeCalls()
    asked: list[tuple[int, int, int]] = []

    def launch(stream: int, function: int, argument: int) -> int:
        asked.append((stream, function, argument))
        return 0 if len(asked) == 1 else 400

    driver = Driver(calls, launch=launch)
    driver.call(1, 2, 3)
    assert asked == [(1, 2, 3)]
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        driver.call(1, 2, 3)
    assert calls.named("cuLaunchHostFunc") == []


def test_without_a_gpu_one_line_says_so() -> None:
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    with pytest.raises(HostError, match=r"^GPU: .*(cuda-python is not installed|no NVIDIA driver|shows no GPU)"):
        load_driver()
