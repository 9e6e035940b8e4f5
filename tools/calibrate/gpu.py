"""``python -m afore.tools.calibrate --gpu``: what a tile, a copy and the host cost on this machine's GPU.

Measured: β_tile over M_tile with every kernel that applies, copies over size and count, alone and under compute, what a target
costs the host, and how soon the host hears that one is done, by bell and by query.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from afore.core.clock import WallClock
from afore.core.version import VERSION
from afore.tools.gpu_bench import GLM_AIR, Bench, ExpertSize, Layer
from afore.tools.gpu_exact import partition_time
from afore.tools.gpu_host import version_of
from afore.tools.gpu_lines import line_of
from afore.tools.gpu_measure import (
    EACH,
    MOST_ROWS,
    completion_times,
    copy_times,
    fastest,
    host_times,
    plan_transfer_times,
    tile_times,
)
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import load_driver
from afore.workers.device.cuda.probe import Found, find_gpus

TILES = (16, 32, 64, 128)
"""M_tile: those that kernels have."""
COPIES = (1, 2, 4, 8, 16)


def measure_gpu(repeats: int) -> dict[str, Any]:
    """Everything measured, with machine, versions and date. Raises ``HostError`` where there is no GPU."""
    found = find_gpus()
    bench = Bench.open()
    try:
        measured = calibrate(bench, GLM_AIR, partial(open_device, 0), tiles=TILES, counts=COPIES, repeats=repeats)
    finally:
        bench.close()
    return {**describe_machine(found), **measured}


def describe_machine(found: Found) -> dict[str, Any]:
    """What the numbers depend on: GPU, driver, versions, date."""
    gpu = found.gpus[0]
    return {
        "machine": gpu.describe(),
        "gpu": {"name": gpu.name, "memory_gb": gpu.nbytes / 1e9, "driver_version": found.driver_version},
        "date": datetime.date.today().isoformat(),
        "versions": {
            "afore": VERSION,
            "torch": torch.__version__,
            **{name: version_of(name) or "not installed" for name in ("triton", "cuda-python")},
        },
    }


def open_device(ordinal: int, completion: CompletionName) -> CudaDevice:
    """A device on this machine's GPU, for the running loop."""
    driver = load_driver(name="calibrate")
    return CudaDevice(driver, WallClock(), asyncio.get_running_loop(), ordinal=ordinal, completion=completion)


def calibrate(
    bench: Bench,
    size: ExpertSize,
    make_device: Callable[[CompletionName], CudaDevice],
    *,
    tiles: Sequence[int],
    counts: tuple[int, ...],
    repeats: int,
) -> dict[str, Any]:
    """All of it, for experts of ``size``."""
    most = min(size.rows, MOST_ROWS) * max(EACH)
    layer = Layer(bench, size, most_pairs=max(tiles) * most)
    found = tile_times(layer, tiles, repeats=repeats, each=EACH)
    best = fastest(found)
    copies = copy_times(layer, counts, layer.experts(most, max(tiles)), repeats=repeats)
    small = layer.experts(4, min(tiles))
    return {
        "experts": size.describe(),
        "without_triton": bench.without_triton,
        "tiles": found,
        "fastest": {str(tile): one["kernel"] for tile, one in best.items()},
        "partition": partition_time(bench, repeats=repeats),
        "copies": copies,
        "copy": _fitted(copies, size.nbytes),
        "host": host_times(bench, small, repeats=repeats),
        "transfers": plan_transfer_times(bench.driver, bench, repeats=repeats),
        "completion": asyncio.run(completion_times(make_device, small, repeats=repeats)),
        "costs": {
            "tile_us": {str(tile): one["tile_us"] for tile, one in best.items()},
            "copy_us": copies[0]["under_compute_us"],
        },
        "times_with_host_in_them": bench.late,
    }


def _fitted(copies: list[dict[str, Any]], nbytes: int) -> dict[str, float]:
    """Latency and rate of a port, from a line through batches of every size, alone."""
    points = [(one["experts"], one["alone_us"]) for one in copies]
    if len(points) < 2:
        return {"copy_latency_us": 0.0, "copy_gb_per_s": copies[0]["alone_gb_per_s"], "fit_error": 0.0}
    line = line_of(points)
    return {
        "copy_latency_us": max(0.0, line.fixed_us),
        "copy_gb_per_s": nbytes / line.each_us / 1e3 if line.each_us > 0 else 0.0,
        "fit_error": line.error,
    }
