"""The compiled cores that the planner's bench runs, all called through one driver: AFORE's own and the C++ build of ``afore``."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numba import carray, cfunc, types
from numpy.typing import NDArray

import afore.scheduler
from afore.core.errors import HostError
from afore.core.slots import contiguous_primaries
from afore.scheduler.core_numba import compile_planner, plan_core
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner

CXX: Final = "c++"
"""Name of the C++ build among the cores."""
SOURCE: Final = Path(afore.scheduler.__file__).parent / "cpp" / "planner.cpp"
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")

_SIGNATURE = types.float64(
    *(types.CPointer(types.int32), types.int64) * 2,
    types.CPointer(types.int64),
    types.int64,
    types.CPointer(types.boolean),
    types.int64,
    *(types.float64,) * 3,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planner with its compiled core, ready to be driven."""

    buffer: NDArray[np.int32]
    scratch: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """One contestant."""

    prepare: Callable[[PlannerConfig, NDArray[np.int32]], Prepared]
    """A fresh planner's buffers."""
    function: Any
    """Keeps its address alive."""
    address: int


@dataclass(frozen=True, slots=True)
class Driven:
    """What one run of a core gave, target by target."""

    nanoseconds: NDArray[np.int64]
    max_tiles: NDArray[np.int64]
    total_tiles: NDArray[np.int64]


Run = Callable[[CoreSpec, Prepared, NDArray[np.bool_], NDArray[np.int64], Costs], Driven]


def _no_scratch(config: PlannerConfig, primaries_E: NDArray[np.int32]) -> Prepared:
    return Prepared(Planner(config, primaries_E).buffer, np.zeros(1, np.int32))


def _with_scratch(config: PlannerConfig, primaries_E: NDArray[np.int32]) -> Prepared:
    made = PlusPlanner(config, primaries_E)
    assert made.scratch is not None
    return Prepared(made.buffer, made.scratch)


def _afore() -> CoreSpec:
    compile_planner()

    @cfunc(_SIGNATURE)
    def call(  # type: ignore[no-untyped-def]  # numba infers
        buffer, buffer_words, scratch, scratch_words, demand, experts, guarded, cells, tile_us, copy_us, window_us
    ):
        return plan_core(
            carray(buffer, (buffer_words,)),
            None,
            carray(demand, (experts,)),
            carray(guarded, (cells,)),
            tile_us,
            copy_us,
            window_us,
        )

    return CoreSpec(_no_scratch, call, call.address)


def _afore_plus() -> CoreSpec:
    compile_planner(search=True)

    @cfunc(_SIGNATURE)
    def call(  # type: ignore[no-untyped-def]  # numba infers
        buffer, buffer_words, scratch, scratch_words, demand, experts, guarded, cells, tile_us, copy_us, window_us
    ):
        return plan_core(
            carray(buffer, (buffer_words,)),
            carray(scratch, (scratch_words,)),
            carray(demand, (experts,)),
            carray(guarded, (cells,)),
            tile_us,
            copy_us,
            window_us,
        )

    return CoreSpec(_with_scratch, call, call.address)


CORES: Final[Mapping[str, Callable[[], CoreSpec]]] = MappingProxyType({"afore": _afore, "afore-plus": _afore_plus})
"""Name → how it is made. A core more is an entry more."""


class Driver:
    """The C++ library: its own core, and the loop that times any core."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._drive = self._library.drive
        self._drive.restype = None
        pointer, word, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self._drive.argtypes = [
            *(pointer, pointer, word, pointer, word, pointer, word, pointer),
            *(real, real, real),
            *(pointer, pointer, pointer),
        ]
        function = self._library.plan
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.core = CoreSpec(_no_scratch, function, address)

    def run(
        self, core: CoreSpec, prepared: Prepared, guarded: NDArray[np.bool_], demand_TE: NDArray[np.int64], costs: Costs
    ) -> Driven:
        """Plans the targets in order, on what earlier ones left in ``prepared`` and ``guarded``."""
        count = len(demand_TE)
        demand_TE = np.ascontiguousarray(demand_TE, np.int64)
        driven = Driven(*(np.zeros(count, np.int64) for _ in range(3)))
        self._drive(
            core.address,
            prepared.buffer.ctypes.data,
            prepared.buffer.size,
            prepared.scratch.ctypes.data,
            prepared.scratch.size,
            demand_TE.ctypes.data,
            count,
            guarded.ctypes.data,
            costs.tile_us,
            costs.copy_us,
            costs.window_us,
            driven.nanoseconds.ctypes.data,
            driven.max_tiles.ctypes.data,
            driven.total_tiles.ctypes.data,
        )
        return driven


def build_driver(folder: Path) -> Driver:
    """Compiles the C++ source into ``folder``. Raises ``HostError`` where there is no compiler, or it refuses."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise HostError("this machine", "has no C++ compiler", "install g++ or clang++")
    library = folder / "planner.so"
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(library), str(SOURCE)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise HostError(compiler, f"could not compile {SOURCE.name}: {done.stderr.strip()[:400]}", "try another")
    return Driver(library)


def python_run(
    core: CoreSpec, prepared: Prepared, guarded: NDArray[np.bool_], demand_TE: NDArray[np.int64], costs: Costs
) -> Driven:
    """As ``Driver.run``, timed from Python where nothing else is to be had: about a microsecond more a call."""
    import time

    from afore.scheduler.core_layout import H_MAX_TILES, H_TOTAL_TILES, parts_of

    function: Any = core.function.ctypes
    as_pointer = prepared.buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    scratch = prepared.scratch.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    flags = guarded.ctypes.data_as(ctypes.POINTER(ctypes.c_bool))
    driven = Driven(*(np.zeros(len(demand_TE), np.int64) for _ in range(3)))
    used = parts_of.py_func(prepared.buffer).used
    sizes = prepared.buffer.size, prepared.scratch.size
    for t, demand_E in enumerate(np.ascontiguousarray(demand_TE, np.int64)):
        pointer = demand_E.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        before = time.perf_counter_ns()
        function(
            as_pointer, sizes[0], scratch, sizes[1], pointer, demand_E.size, flags, guarded.size,
            costs.tile_us, costs.copy_us, costs.window_us,
        )  # fmt: skip
        driven.nanoseconds[t] = time.perf_counter_ns() - before
        driven.max_tiles[t] = prepared.buffer[H_MAX_TILES]
        driven.total_tiles[t] = prepared.buffer[H_TOTAL_TILES]
        guarded[:] = used != 0
    return driven


def one_at_a_time(run: Run) -> Run:
    """As ``run``, with no target in flight when the next is planned: no slot is guarded."""

    def alone(
        core: CoreSpec, prepared: Prepared, guarded: NDArray[np.bool_], demand_TE: NDArray[np.int64], costs: Costs
    ) -> Driven:
        runs = []
        for t in range(len(demand_TE)):
            guarded[:] = False
            runs.append(run(core, prepared, guarded, demand_TE[t : t + 1], costs))
        return Driven(
            *(np.concatenate([getattr(one, field.name) for one in runs]) for field in dataclasses.fields(Driven))
        )

    return alone


def planner_config(num_experts: int, num_workers: int, slots: int, tile_tokens: int) -> tuple[PlannerConfig, Any]:
    """Sizes of a row, and its primaries."""
    config = PlannerConfig(
        num_experts=num_experts, num_workers=num_workers, slots_per_worker=slots, tile_tokens=tile_tokens
    )
    return config, contiguous_primaries(num_experts, num_workers)
