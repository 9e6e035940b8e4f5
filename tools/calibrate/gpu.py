"""``python -m afore.tools.calibrate --gpu``: what a tile, a copy and the host cost on this machine's GPU.

Measured: β_tile over M_tile with every kernel that applies, copies over size and count, alone and under compute, what a target
costs the host, and how soon the host hears that one is done, by bell and by query.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from afore.core.clock import WallClock
from afore.core.version import VERSION
from afore.tools.gpu_bench import GLM_AIR, Bench, ExpertSize, Layer
from afore.tools.gpu_measure import (
    completion_times,
    copy_times,
    fastest,
    host_times,
    plan_transfer_times,
    tile_times,
)
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import load_driver
from afore.workers.device.cuda.probe import find_gpus

TILES = {16: (4, 32), 32: (4, 32), 64: (4, 32), 128: (4, 32)}
"""Numbers of full tiles for each M_tile: the slope between them is β_tile."""
COPIES = (1, 2, 4, 8, 16)


def measure_gpu(repeats: int) -> dict[str, Any]:
    """Everything measured, with machine, versions and date. Raises ``HostError`` where there is no GPU."""
    gpu = find_gpus().gpus[0]
    bench = Bench.open()
    try:
        measured = calibrate(bench, GLM_AIR, partial(open_device, 0), tiles=TILES, counts=COPIES, repeats=repeats)
    finally:
        bench.close()
    return {"machine": gpu.describe(), **versions(), **measured}


def open_device(ordinal: int, completion: CompletionName) -> CudaDevice:
    """A device on this machine's GPU, for the running loop."""
    driver = load_driver(name="calibrate")
    return CudaDevice(driver, WallClock(), asyncio.get_running_loop(), ordinal=ordinal, completion=completion)


def versions() -> dict[str, str]:
    """What the numbers depend on besides the machine."""
    return {"date": datetime.date.today().isoformat(), "afore": VERSION, "torch": torch.__version__}


def calibrate(
    bench: Bench,
    size: ExpertSize,
    make_device: Callable[[CompletionName], CudaDevice],
    *,
    tiles: Mapping[int, tuple[int, ...]],
    counts: tuple[int, ...],
    repeats: int,
) -> dict[str, Any]:
    """All of it, for experts of ``size``."""
    layer = Layer(bench, size, most_pairs=max(tile * max(numbers) for tile, numbers in tiles.items()))
    found = tile_times(layer, tiles, repeats=repeats)
    best = fastest(found)
    widest = max(tiles)
    busy = layer.experts(max(tiles[widest]), widest)
    copies = copy_times(layer, counts, busy, repeats=repeats)
    small = layer.experts(min(tiles[min(tiles)]), min(tiles))
    return {
        "experts": size.describe(),
        "tiles": found,
        "fastest": {str(tile): one["kernel"] for tile, one in best.items()},
        "copies": copies,
        "copy": _fitted(copies, size.nbytes),
        "host": host_times(bench, small, repeats=repeats),
        "transfers": plan_transfer_times(bench.driver, bench, repeats=repeats),
        "completion": asyncio.run(completion_times(make_device, small, repeats=repeats)),
        "costs": {
            "tile_us": {str(tile): one["tile_us"] for tile, one in best.items()},
            "copy_us": copies[0]["under_compute_us"],
        },
    }


def _fitted(copies: list[dict[str, Any]], nbytes: int) -> dict[str, float]:
    """Latency and rate of a port, from the smallest and the largest batch."""
    first, last = copies[0], copies[-1]
    more = last["experts"] - first["experts"]
    each_us = (last["alone_us"] - first["alone_us"]) / more if more else first["alone_us"]
    return {
        "copy_latency_us": max(0.0, first["alone_us"] - each_us * first["experts"]),
        "copy_gb_per_s": nbytes / each_us / 1e3 if each_us > 0 else 0.0,
    }
