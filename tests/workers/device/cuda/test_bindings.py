"""Our calls, and the stand-in's, against the installed cuda-python: names, order, types, and what comes back.

Its bindings ship no type information, so mypy has nothing to check calls by. But they document every call's types, and check those
of handles before they look for the driver's library.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest

from afore.workers.device.cuda.driver import Driver, Span
from tests.workers.device.cuda import fake_types
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.device.cuda.presence import missing_gpu, need

LACKING = r"driver library|dlopen libcuda"
"""What the bindings say where there is no driver: newer releases, older ones."""
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
    with pytest.raises(RuntimeError, match=LACKING):
        CALLS[name](Driver(Uninitialised(calls)))


def test_the_bindings_take_a_batch() -> None:
    need("cuda")
    if "no NVIDIA driver" not in missing_gpu():
        pytest.skip("there is a driver here, which would act on these made-up addresses")
    from cuda.bindings import driver as calls

    driver = Driver(Uninitialised(calls))
    with pytest.raises(RuntimeError, match=LACKING):  # from the copies one by one, after the batch failed alike
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


def section(name: str, title: str) -> list[tuple[str, set[str]]]:
    """(name, words of its type) of what the bindings' documentation of a call lists under a title."""
    from cuda.bindings import driver as calls

    text = getattr(calls, name).__doc__
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", text, re.S | re.M)
    lines = re.findall(r"^(\w+)(?: : (.*))?$", found.group(1), re.M) if found else []
    return [(one, set(re.findall(r"\w+", kind)) - {"py", "obj"}) for one, kind in lines]


def calls_of_the_stand_in() -> list[str]:
    return [name for name, _ in inspect.getmembers(FakeCalls, inspect.isfunction) if re.match("cu[A-Z]", name)]


NUMBERS = {"int", "unsigned", "size_t", "Any"}
"""What plain numbers are called there; addresses of host memory are ``Any``."""


def named(kind: Any) -> set[str]:
    """How the bindings would call a type of the stand-in's."""
    inner = typing.get_args(kind)
    if inner:
        return {"list"} | named(inner[0])
    return {kind.__name__} if kind.__module__ == fake_types.__name__ else NUMBERS


@pytest.mark.parametrize("name", calls_of_the_stand_in())
def test_arguments_have_the_types_that_the_bindings_document(name: str) -> None:
    """The stand-in insists on its own at every call that the product's code makes."""
    need("cuda")
    hints = typing.get_type_hints(getattr(FakeCalls, name), vars(fake_types) | {"t": fake_types, "Any": Any})
    hints.pop("return")
    documented = section(name, "Parameters")
    assert len(documented) == len(hints)
    for (argument, words), (ours, kind) in zip(documented, hints.items(), strict=True):
        for wanted in ({"list"} if "list" in named(kind) else set(), named(kind) - {"list"}):
            assert not wanted or words & wanted, f"{name}({argument}): {words}, not {ours}: {kind}"


class Noting(FakeCalls):
    """Notes how many values each call that went well gave back."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.gave: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not re.match("cu[A-Z]", name):
            return found

        def noting(*arguments: Any) -> Any:
            answer = found(*arguments)
            if answer[0] == CUresult.CUDA_SUCCESS:
                self.gave[name] = len(answer) - 1
            return answer

        return noting


def test_as_many_values_come_back_as_the_bindings_document() -> None:
    need("cuda")
    machine = Machine(gpus=2)
    mine, theirs = Noting(machine), Noting(machine)
    driver, other = Driver(mine), Driver(theirs)
    driver.retain_context(0)
    other.retain_context(1)
    driver.can_reach(0, 1)
    driver.reach(0x101)
    driver.device_count()
    for ask in (driver.device_name, driver.device_uuid, driver.device_nbytes):
        ask(0)
    driver.attribute("MULTIPROCESSOR_COUNT", 0)
    least, _ = driver.priority_range()
    stream, begin, end = driver.create_stream(least), driver.create_event(), driver.create_event()
    device, host = driver.allocate(64), driver.allocate_pinned(64)
    driver.register(host + (1 << 40), 64, read_only=False)
    driver.unregister(host + (1 << 40))
    driver.record(begin, stream)
    driver.wait(stream, begin)
    driver.copy([Span(device, host, 32)], stream)
    driver.copy([Span(device, host, 32), Span(device + 32, host + 32, 32)], stream)
    driver.call(stream, mine.NOTHING, 0)
    driver.record(end, stream)
    driver.reached(end)
    driver.synchronise(end)
    driver.elapsed_us(begin, end)
    address = other.open(driver.export(device))
    other.shut(address)
    driver.destroy_event(begin)
    driver.destroy_stream(stream)
    driver.free(device)
    driver.free_pinned(host)
    driver.release_context(0)
    gave = mine.gave | theirs.gave
    assert set(gave) == set(calls_of_the_stand_in())
    for name, count in gave.items():
        documented = [one for one, _ in section(name, "Returns")]
        assert documented[0] == "CUresult"
        assert count == len(documented) - 1, f"{name} gives {documented[1:]}"


@pytest.mark.parametrize("name", ["CUstream", "CUevent", "CUcontext", "CUdeviceptr", "CUhostFn"])
def test_handles_are_made_of_numbers_and_give_them_back(name: str) -> None:
    need("cuda")
    from cuda.bindings import driver as calls

    assert int(getattr(calls, name)(0x1234)) == 0x1234


def test_a_handle_between_processes_and_the_attributes_of_a_batch() -> None:
    need("cuda")
    from cuda.bindings import driver as calls

    handle = calls.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    assert ctypes.string_at(handle.getPtr(), 64) == bytes(range(64))
    attributes = calls.CUmemcpyAttributes()
    attributes.srcAccessOrder = calls.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.flags = 1
    assert (int(attributes.srcAccessOrder), int(attributes.flags)) == (1, 1)
    assert int(calls.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) == 1
    assert int(calls.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1
