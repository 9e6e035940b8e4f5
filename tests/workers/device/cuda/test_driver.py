"""The driver's calls: what errors say, batches and their fall-back, and that the real bindings take our arguments."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable

import pytest

from afore.core.errors import HostError
from afore.workers.device.cuda.driver import Driver, Span, load_driver
from afore.workers.device.cuda.errors import CudaError, meaning
from tests.workers.device.cuda.fake_driver import FakeCalls, Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.device.cuda.presence import missing_gpu, need


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


@pytest.mark.parametrize("prepare", [old, without, refusing])
def test_a_driver_without_batches_copies_one_by_one(prepare: Callable[[FakeCalls], None]) -> None:
    calls = FakeCalls()
    prepare(calls)
    copied(calls, 4)
    assert len(calls.named("cuMemcpyAsync")) == 6
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


CALLS: dict[str, Callable[[Driver], object]] = {
    "cuDeviceGetCount": lambda d: d.device_count(),
    "cuDeviceGet": lambda d: d.device_name(0),
    "cuCtxGetStreamPriorityRange": lambda d: d.priority_range(),
    "cuStreamCreateWithPriority": lambda d: d.create_stream(-1),
    "cuStreamDestroy": lambda d: d.destroy_stream(1),
    "cuEventCreate": lambda d: d.create_event(),
    "cuEventDestroy": lambda d: d.destroy_event(1),
    "cuEventRecord": lambda d: d.record(1, 2),
    "cuStreamWaitEvent": lambda d: d.wait(1, 2),
    "cuEventQuery": lambda d: d.reached(1),
    "cuEventSynchronize": lambda d: d.synchronise(1),
    "cuEventElapsedTime": lambda d: d.elapsed_us(1, 2),
    "cuLaunchHostFunc": lambda d: d.call(1, 0x1000, 7),
    "cuMemAlloc": lambda d: d.allocate(1 << 40),
    "cuMemFree": lambda d: d.free(0x1000),
    "cuMemHostAlloc": lambda d: d.allocate_pinned(1 << 33),
    "cuMemFreeHost": lambda d: d.free_pinned(0x1000),
    "cuMemHostRegister": lambda d: d.register(0x1000, 4096, read_only=True),
    "cuMemHostUnregister": lambda d: d.unregister(0x1000),
    "cuMemcpyAsync": lambda d: d.copy([Span(0x1000, 0x2000, 1 << 33)], 1),
    "cuIpcGetMemHandle": lambda d: d.export(0x1000),
    "cuIpcOpenMemHandle": lambda d: d.open(b"x" * 64),
    "cuIpcCloseMemHandle": lambda d: d.shut(0x1000),
    "cuCtxEnablePeerAccess": lambda d: d.reach(1),
}


class Uninitialised:
    """The real bindings, behind an initialisation that says it went well."""

    def __init__(self, calls: object) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> object:
        return getattr(self._calls, name)

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return (0, 13010)


@pytest.mark.parametrize("name", CALLS)
def test_the_bindings_take_our_arguments(name: str) -> None:
    """They check types before they look for the library, which is not there: nothing else may be what they object to."""
    need("cuda")
    if missing_gpu() == "" or "no NVIDIA driver" not in missing_gpu():
        pytest.skip("there is a driver here, which would act on these made-up handles")
    from cuda.bindings import driver as calls

    assert hasattr(calls, name)
    with pytest.raises(RuntimeError, match="driver library"):
        CALLS[name](Driver(Uninitialised(calls)))


def test_the_bindings_take_a_batch() -> None:
    need("cuda")
    if "no NVIDIA driver" not in missing_gpu():
        pytest.skip("there is a driver here, which would act on these made-up addresses")
    from cuda.bindings import driver as calls

    driver = Driver(Uninitialised(calls))
    with pytest.raises(
        RuntimeError, match="driver library"
    ):  # from the copies one by one, after the batch failed alike
        driver.copy([Span(0x1000, 0x2000, 8), Span(0x3000, 0x4000, 8)], 1)
    assert not driver.batches


def test_the_stand_in_takes_what_the_bindings_take() -> None:
    """The same names in the same order, as the bindings' own documentation has them."""
    need("cuda")
    from cuda.bindings import driver as calls

    for name, fake in inspect.getmembers(FakeCalls, inspect.isfunction):
        if re.match("cu[A-Z]", name):
            (documented,) = re.findall(rf"^{name}\((.*)\)$", getattr(calls, name).__doc__.splitlines()[0])
            theirs = [re.split(r":", part)[0].split()[-1] for part in documented.split(",") if part.strip()]
            ours = list(inspect.signature(fake).parameters)[1:]
            assert [word.lower() for word in ours] == [word.lower() for word in theirs], name


def test_every_code_that_has_a_meaning_exists() -> None:
    need("cuda")
    from cuda.bindings.driver import CUresult as codes

    from afore.workers.device.cuda.errors import _MEANINGS

    known = {code.name for code in codes}
    assert set(_MEANINGS) <= known
    assert {code.name for code in CUresult} <= known
    assert all(int(code) == int(getattr(codes, code.name)) for code in CUresult)


def test_without_a_gpu_one_line_says_so() -> None:
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    with pytest.raises(HostError, match=r"^GPU: .*(cuda-python is not installed|no NVIDIA driver|shows no GPU)"):
        load_driver()
