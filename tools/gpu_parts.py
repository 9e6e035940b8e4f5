"""The parts of a GPU check, each a process of its own (``gpu_part.py``).

A part raises where something is wrong; what it returns are findings with units in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from afore.core.errors import ConfigError
from afore.tools.calibrate.gpu import measure_gpu
from afore.tools.calibrate.gpu_profile import GPU_BASE, profile_of_gpu, yaml_of
from afore.tools.gpu_bench import GLM_AIR, Bench, ExpertSize, Layer
from afore.tools.gpu_claims import ClaimFailed, NotHere
from afore.tools.gpu_exact import check_experts, check_partition
from afore.tools.gpu_ipc import ipc_missing
from afore.tools.gpu_measure import EACH, MOST_ROWS, copy_times, overlap, tile_times
from afore.tools.gpu_report import FILES
from afore.tools.gpu_serving import run_attention, run_group, run_hosted, run_serving
from afore.tools.gpu_tests import run_gpu_tests
from afore.workers.cuda_store import SHARED_NBYTES
from afore.workers.device.cuda.driver import Span
from afore.workers.device.cuda.memory import address_of
from afore.workers.device.hardware import read_profile

SMALL = ExpertSize(name="bundled model", hidden_size=128, expert_size=32, rows=36, dtype=torch.float32)


def run_device() -> dict[str, Any]:
    """Opens the GPU and copies in a batch; says what this driver has."""
    bench = Bench.open()
    driver, memory = bench.driver, bench.memory
    values, back = memory.pinned((1 << 20,), np.uint8), memory.pinned((1 << 20,), np.uint8)
    values[:] = np.random.default_rng(1).integers(0, 256, values.shape)
    at, half = memory.allocate(SHARED_NBYTES), values.nbytes // 2
    up, down = address_of(values), address_of(back)
    driver.copy([Span(at, up, half), Span(at + half, up + half, half)], bench.compute)
    driver.copy([Span(down, at, half), Span(down + half, at + half, half)], bench.compute)
    bench.finish()
    if not np.array_equal(values, back):
        raise RuntimeError("bytes changed on their way to the GPU and back")
    plain = np.zeros(1 << 20, dtype=np.uint8)
    try:
        driver.register(address_of(plain), plain.nbytes, read_only=False)
        driver.unregister(address_of(plain))
        pinned = "host memory can be pinned where it lies"
    except Exception as error:
        pinned = f"host memory cannot be pinned where it lies: {error}"
    found = {
        "driver_version": driver.version,
        "stream_priorities": list(driver.priority_range()),
        "copies_in_batches": driver.batches,
        "pinned": pinned,
        "kernels": bench.without_triton or "our own compile and run",
    }
    bench.close()
    return found


def run_ipc() -> dict[str, Any]:
    """Has another process read this one's GPU memory by CUDA IPC."""
    bench = Bench.open()
    try:
        if missing := ipc_missing(bench.driver):
            raise NotHere(f"no CUDA IPC, because {missing}")
    finally:
        bench.close()
    return {"cuda_ipc": "another process of this machine has read this one's GPU memory"}


def run_kernels() -> dict[str, Any]:
    """Partition and experts on the GPU against the CPU's: exactly, and within tolerances."""
    bench = Bench.open()
    found = {
        "without_triton": bench.without_triton or "no",
        "partition": check_partition(bench),
        "experts": check_experts(bench),
    }
    bench.close()
    return found


def run_calibration() -> dict[str, Any]:
    """What was measured, and the profile made of it: what ``calibrate --gpu`` writes."""
    found = measure_gpu(repeats=10)
    try:
        profile = profile_of_gpu(found, read_profile(GPU_BASE), name="gpu")
    except ConfigError as error:
        raise ClaimFailed(f"no profile can be made: {error}", found) from error
    return {**found, "profile": "gpu.yaml", FILES: {"gpu.yaml": yaml_of(profile)}}


def run_overlap() -> dict[str, Any]:
    """Copies beside a row of targets."""
    bench = Bench.open()
    layer = Layer(bench, GLM_AIR, most_pairs=32 * 64)
    found = overlap(layer, 32, 64, 8)
    bench.close()
    return found


def run_glm() -> dict[str, Any]:
    """Tiles and copies of GLM-4.5-Air's experts, and of the bundled model's: each size, M_tile and kernel is measured by itself."""
    bench = Bench.open()
    found: dict[str, Any] = {"without_triton": bench.without_triton or "no"}
    for size in (GLM_AIR, SMALL):
        layer = Layer(bench, size, most_pairs=MOST_ROWS * max(EACH) * 64)
        found[f"{size.name} experts"] = size.describe()
        found[f"{size.name} tiles"] = tile_times(layer, (16, 64), repeats=10)
        busy = layer.experts(2 * MOST_ROWS, 64)
        found[f"{size.name} copies"] = copy_times(layer, (1, 2, 4, 8, 16), busy, repeats=10)
    found["times_with_host_in_them"] = bench.late
    bench.close()
    return found


def run_tests(limit_s: float) -> dict[str, Any]:
    """The tests that are marked ``gpu``, by pytest alone if need be; what could not run without other packages is named."""
    return run_gpu_tests(limit_s)


PARTS: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    {
        "device": run_device,
        "ipc": run_ipc,
        "kernels": run_kernels,
        "calibration": run_calibration,
        "overlap": run_overlap,
        "glm": run_glm,
        "group": run_group,
        "attention": run_attention,
        "serving": run_serving,
        "hosted": run_hosted,
        "tests": run_tests,
    }
)
