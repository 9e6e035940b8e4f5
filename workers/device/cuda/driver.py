"""The few driver calls that AFORE makes, with plain numbers for handles and addresses: the only file that knows cuda-python.

``cuda.bindings`` alone: its names follow the driver's and stay, and what is needed here (IPC of plain allocations, batched copies,
host functions) has no form in ``cuda.core``. Nothing is imported before a driver is asked for. Streams are non-blocking, so that
nothing ever waits for, or is waited for by, the default stream.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from afore.core.errors import HostError
from afore.workers.device.cuda.errors import CudaError
from afore.workers.device.cuda.library import NoDriver, launch_host_function, library_loads

_log = logging.getLogger(__name__)

IPC_HANDLE_NBYTES = 64
_SUCCESS = 0
_BATCH_SINCE = 13000
"""The driver version whose cuMemcpyBatchAsync the bindings of 13.x call."""
_REFUSED_BATCH = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_FOUND", "CUDA_ERROR_INVALID_VALUE"})
"""A batch is pickier than a copy (about pageable memory and its hints, say): it must not cost what copies one by one can do."""


class Span(NamedTuple):
    """One piece of memory to copy: addresses on any device or in host memory."""

    destination: int
    source: int
    nbytes: int


class Driver:
    """The calls of one process. ``calls`` is ``cuda.bindings.driver``; ``name`` is what errors speak of.

    ``launch``: the library's own ``cuLaunchHostFunc``; none: that of ``calls``.
    """

    def __init__(self, calls: Any, *, name: str = "cuda", launch: Callable[[int, int, int], int] | None = None) -> None:
        """Initialises CUDA in this process; children that are forked afterwards cannot use it. Raises ``HostError``."""
        self.name = name
        self._calls = calls
        self._launch = launch
        self._stream_nonblocking = int(calls.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._attributes: Any = None
        try:
            self._do("initialise", calls.cuInit(0))
            self.version = int(self._do("ask for the version", calls.cuDriverGetVersion()))
        except CudaError as error:
            raise HostError("GPU", str(error), "run `python -m afore.tools.doctor`, or use --device cpu") from error
        except Exception as error:  # the bindings' own, when the library is missing: its type differs between releases
            if not library_loads():
                raise NoDriver(
                    "GPU",
                    "this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)",
                    "install it, or use --device cpu",
                ) from error
            problem = f"cuda-python cannot use this machine's driver: {' '.join(str(error).split())}"
            raise HostError(
                "GPU", problem, "install a cuda-python for the driver's CUDA, or update the driver"
            ) from error
        self.batches = self.version >= _BATCH_SINCE and hasattr(calls, "cuMemcpyBatchAsync")
        """Whether copies are handed over in batches; one that is refused turns it off."""

    # Devices

    def device_count(self) -> int:
        """GPUs that this process may use."""
        return int(self._do("count the GPUs", self._calls.cuDeviceGetCount()))

    def device_name(self, ordinal: int) -> str:
        """What the vendor calls it."""
        name: bytes = self._do("name the GPU", self._calls.cuDeviceGetName(96, self._device(ordinal)))
        return bytes(name).split(b"\0", 1)[0].decode(errors="replace")

    def device_uuid(self, ordinal: int) -> bytes:
        """16 bytes, the same in every process whatever it may see."""
        uuid = self._do("identify the GPU", self._calls.cuDeviceGetUuid(self._device(ordinal)))
        return bytes(uuid.bytes)[:16]

    def device_nbytes(self, ordinal: int) -> int:
        """Its memory."""
        return int(self._do("size the GPU", self._calls.cuDeviceTotalMem(self._device(ordinal))))

    def attribute(self, name: str, ordinal: int) -> int:
        """A number that the driver knows, such as ``COMPUTE_CAPABILITY_MAJOR``."""
        code = getattr(self._calls.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._do(f"ask for {name}", self._calls.cuDeviceGetAttribute(code, self._device(ordinal))))

    def retain_context(self, ordinal: int) -> int:
        """The GPU's primary context, which torch uses too, made current in this thread."""
        context = int(self._do("open the GPU", self._calls.cuDevicePrimaryCtxRetain(self._device(ordinal))))
        self.make_current(context)
        return context

    def make_current(self, context: int) -> None:
        """What is made from now on belongs to this context."""
        self._do("make a context current", self._calls.cuCtxSetCurrent(self._calls.CUcontext(context)))

    def release_context(self, ordinal: int) -> None:
        """Gives a retained context back."""
        self._do("close the GPU", self._calls.cuDevicePrimaryCtxRelease(self._device(ordinal)))

    def can_reach(self, ordinal: int, peer: int) -> bool:
        """Whether a GPU can read another one's memory directly."""
        calls = self._calls
        return bool(
            self._do("ask for peer access", calls.cuDeviceCanAccessPeer(self._device(ordinal), self._device(peer)))
        )

    def reach(self, peer_context: int) -> None:
        """Lets the current context use the memory of another GPU's. Once is enough; again is no mistake."""
        calls = self._calls
        code = calls.cuCtxEnablePeerAccess(calls.CUcontext(peer_context), 0)
        if _code_name(code[0]) != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
            self._do("enable peer access", code)

    # Streams and events

    def priority_range(self) -> tuple[int, int]:
        """(least, greatest) priority of a stream; greater ones are smaller numbers."""
        least, greatest = self._do("ask for stream priorities", self._calls.cuCtxGetStreamPriorityRange())
        return int(least), int(greatest)

    def create_stream(self, priority: int) -> int:
        """A stream that neither waits for the default stream nor is waited for by it."""
        calls = self._calls
        return int(self._do("make a stream", calls.cuStreamCreateWithPriority(self._stream_nonblocking, priority)))

    def destroy_stream(self, stream: int) -> None:
        """What is enqueued still runs; the handle must not be used again."""
        self._do("destroy a stream", self._calls.cuStreamDestroy(self._calls.CUstream(stream)))

    def create_event(self) -> int:
        """An event that keeps its time."""
        return int(self._do("make an event", self._calls.cuEventCreate(0)))

    def destroy_event(self, event: int) -> None:
        """The handle must not be used again."""
        self._do("destroy an event", self._calls.cuEventDestroy(self._calls.CUevent(event)))

    def record(self, event: int, stream: int) -> None:
        """The event is reached once all that the stream was given so far is done."""
        calls = self._calls
        self._do("record an event", calls.cuEventRecord(calls.CUevent(event), calls.CUstream(stream)))

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on starts after the event's last record, which must have been made."""
        calls = self._calls
        self._do("wait for an event", calls.cuStreamWaitEvent(calls.CUstream(stream), calls.CUevent(event), 0))

    def reached(self, event: int) -> bool:
        """Whether a recorded event is done. Raises ``CudaError`` where the work before it failed."""
        code = self._calls.cuEventQuery(self._calls.CUevent(event))
        if _code_name(code[0]) == "CUDA_ERROR_NOT_READY":
            return False
        self._do("query an event", code)
        return True

    def synchronise(self, event: int) -> None:
        """Blocks this thread until the event is done: for opening, closing and measuring, never while serving."""
        self._do("await an event", self._calls.cuEventSynchronize(self._calls.CUevent(event)))

    def elapsed_us(self, begin: int, end: int) -> float:
        """Between two events that are done. The driver counts in float32 milliseconds: keep them near each other."""
        calls = self._calls
        return 1e3 * float(self._do("measure", calls.cuEventElapsedTime(calls.CUevent(begin), calls.CUevent(end))))

    def call(self, stream: int, function: int, argument: int) -> None:
        """The stream calls ``void function(void *argument)`` (an address of compiled code) once it is there."""
        calls = self._calls
        if self._launch is not None:
            self._do("enqueue a call", (calls.CUresult(self._launch(stream, function, argument)),))
            return
        self._do("enqueue a call", calls.cuLaunchHostFunc(calls.CUstream(stream), calls.CUhostFn(function), argument))

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Memory of the current GPU, as an allocation of its own: that is what other processes can open."""
        return int(self._do(f"allocate {nbytes} bytes on the GPU", self._calls.cuMemAlloc(nbytes)))

    def free(self, address: int) -> None:
        """Gives device memory back; waits for work that uses it."""
        self._do("free GPU memory", self._calls.cuMemFree(self._calls.CUdeviceptr(address)))

    def allocate_pinned(self, nbytes: int) -> int:
        """Host memory that GPUs copy from and to without the host."""
        return int(self._do(f"allocate {nbytes} pinned bytes", self._calls.cuMemHostAlloc(nbytes, 1)))  # portable

    def free_pinned(self, address: int) -> None:
        """Gives it back."""
        self._do("free pinned memory", self._calls.cuMemFreeHost(address))

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Pins memory that is there already, such as a mapped region. Raises ``CudaError``: many systems refuse some."""
        flags = 1 | (8 if read_only else 0)  # portable, read-only
        self._do(f"register {nbytes} bytes of host memory", self._calls.cuMemHostRegister(address, nbytes, flags))

    def unregister(self, address: int) -> None:
        """Unpins it."""
        self._do("unregister host memory", self._calls.cuMemHostUnregister(address))

    def copy(self, spans: Sequence[Span], stream: int) -> None:
        """Enqueues copies between any two memories, in one call where the driver can, else one call a span.

        Within a batch nothing is ordered: spans must not overlap. Pageable host memory makes the host wait.
        """
        calls = self._calls
        if self.batches and len(spans) > 1 and self._copy_batch(spans, stream):
            return
        handle = calls.CUstream(stream)
        for destination, source, nbytes in spans:
            self._do(
                f"copy {nbytes} bytes",
                calls.cuMemcpyAsync(calls.CUdeviceptr(destination), calls.CUdeviceptr(source), nbytes, handle),
            )

    def _copy_batch(self, spans: Sequence[Span], stream: int) -> bool:
        """Whether the driver took them; one that cannot is not asked again."""
        calls = self._calls
        if self._attributes is None:
            self._attributes = calls.CUmemcpyAttributes()
            self._attributes.srcAccessOrder = calls.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            self._attributes.flags = 1  # rather beside compute
        try:
            code = calls.cuMemcpyBatchAsync(
                [calls.CUdeviceptr(span.destination) for span in spans],
                [calls.CUdeviceptr(span.source) for span in spans],
                [span.nbytes for span in spans],
                len(spans),
                [self._attributes],
                [0],
                1,
                calls.CUstream(stream),
            )
        except (RuntimeError, TypeError, ValueError):
            # The bindings', for a function that this driver does not have; or bindings of another release, which ask otherwise.
            self.batches = False
            return False
        if (refused := _code_name(code[0])) in _REFUSED_BATCH:
            # Of one call for each piece it says whether, and which, piece is wrong: writing the same bytes again does no harm.
            _log.warning("%s: the driver takes no batch of copies (%s): they go one by one", self.name, refused)
            self.batches = False
            return False
        self._do(f"copy {len(spans)} spans", code)
        return True

    # Between processes

    def export(self, address: int) -> bytes:
        """What another process opens an allocation with."""
        handle = self._do("export GPU memory", self._calls.cuIpcGetMemHandle(self._calls.CUdeviceptr(address)))
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)

    def open(self, exported: bytes) -> int:
        """Maps an allocation of another process; every opening needs a ``shut`` of its own."""
        handle = self._calls.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), exported, IPC_HANDLE_NBYTES)
        return int(self._do("open GPU memory of another process", self._calls.cuIpcOpenMemHandle(handle, 1)))

    def shut(self, address: int) -> None:
        """Unmaps it."""
        self._do(
            "close GPU memory of another process", self._calls.cuIpcCloseMemHandle(self._calls.CUdeviceptr(address))
        )

    def _device(self, ordinal: int) -> Any:
        return self._do(f"find GPU {ordinal}", self._calls.cuDeviceGet(ordinal))

    def _do(self, operation: str, answer: tuple[Any, ...]) -> Any:
        """The values behind a call's code. Raises ``CudaError``."""
        code, *values = answer
        if int(code) != _SUCCESS:
            raise CudaError(self.name, operation, _code_name(code))
        return values[0] if len(values) == 1 else tuple(values)


def _code_name(code: Any) -> str:
    return str(getattr(code, "name", code))


def load_driver(*, name: str = "cuda") -> Driver:
    """The driver of this machine, in this process. Raises ``HostError`` where there is none, or no cuda-python."""
    try:
        from cuda.bindings import driver as calls
    except ImportError as error:
        raise HostError(
            "GPU", "the package cuda-python is not installed", "pip install 'afore[cuda]', or use --device cpu"
        ) from error
    driver = Driver(calls, name=name, launch=launch_host_function())
    if driver.device_count() == 0:
        raise HostError(
            "GPU", "the driver shows no GPU", "see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return driver
