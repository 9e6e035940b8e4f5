"""What is measured of a GPU: a tile's time, a copy's time alone and under compute, how they overlap, how soon the host hears of it.

Every number carries its unit in its name, and is a median.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from afore.core.clock import WallClock
from afore.tools.gpu_bench import Bench, ExpertSize, Layer
from afore.workers.device.base import Work
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.kernels import Implementation, applicable

WORK = Work("experts", None)


def tile_times(layer: Layer, tiles_of: Mapping[int, tuple[int, ...]], *, repeats: int) -> list[dict[str, Any]]:
    """β_tile of each M_tile and implementation: the slope of the experts' time over the number of tiles."""
    found = []
    size = layer.size
    widths = size.hidden_size, size.expert_size
    ways = (
        applicable(size.dtype, layer.bench.capability, widths) if layer.bench.on_gpu else [layer.bench.implementation]
    )
    for tile_tokens, counts in tiles_of.items():
        for way in ways:
            points = [_experts_us(layer, tiles, tile_tokens, way, repeats) for tiles in counts]
            (few, few_us), (many, many_us) = points[0], points[-1]
            found.append(
                {
                    "tile_tokens": tile_tokens,
                    "kernel": way.name,
                    "tile_us": (many_us - few_us) / (many - few),
                    "experts_us": few_us - (many_us - few_us) / (many - few) * few,
                    "points": [{"tiles": tiles, "experts_us": us} for tiles, us in points],
                }
            )
    return found


def _experts_us(layer: Layer, tiles: int, tile_tokens: int, way: Implementation, repeats: int) -> tuple[int, float]:
    enqueue = layer.experts(tiles, tile_tokens, way)
    return tiles, layer.bench.time_us(enqueue, layer.bench.compute, repeats=repeats)


def fastest(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each M_tile the implementation with the least time at its most tiles."""
    best: dict[int, dict[str, Any]] = {}
    for one in found:
        known = best.get(one["tile_tokens"])
        if known is None or one["points"][-1]["experts_us"] < known["points"][-1]["experts_us"]:
            best[one["tile_tokens"]] = one
    return best


def copy_times(
    layer: Layer, counts: tuple[int, ...], busy: Callable[[], None], *, repeats: int
) -> list[dict[str, Any]]:
    """Time of so many experts copied in one batch, alone and while ``busy`` runs on the compute stream."""
    bench, rows = layer.bench, layer.size.rows
    found = []
    for count in counts:
        if 2 * count > rows:
            break
        spans = [span for index in range(count) for span in layer.row_spans(index, rows - 1 - index)]

        def copy(spans: list[Span] = spans) -> None:
            bench.driver.copy(spans, bench.copies)

        alone_us = bench.time_us(copy, bench.copies, repeats=repeats)

        def under(copy: Callable[[], None] = copy) -> None:
            with bench.on_compute():
                busy()
            copy()

        under_us = bench.time_us(under, bench.copies, repeats=repeats)
        bench.finish()
        nbytes = count * layer.size.nbytes
        found.append(
            {
                "experts": count,
                "mib": nbytes / 2**20,
                "alone_us": alone_us,
                "under_compute_us": under_us,
                "alone_gb_per_s": nbytes / alone_us / 1e3,
                "batched": bench.driver.batches,
            }
        )
    return found


def overlap(layer: Layer, tiles: int, tile_tokens: int, copies: int, *, targets: int = 8) -> dict[str, Any]:
    """A batch of copies and a row of targets, each alone and then both together from one instant, with the spans to draw.

    ``overlapped``: the part of the shorter one that ran beside the longer one: 1 hides it, 0 is one after the other.
    """
    bench, rows = layer.bench, layer.size.rows
    enqueue = layer.experts(tiles, tile_tokens)
    copies = min(copies, rows // 2)
    spans = [span for index in range(copies) for span in layer.row_spans(index, rows - 1 - index)]

    def compute() -> None:
        for _ in range(targets):
            enqueue()

    def copy() -> None:
        bench.driver.copy(spans, bench.copies)

    compute_us = bench.time_us(compute, bench.compute, repeats=5)
    copy_us = bench.time_us(copy, bench.copies, repeats=5)
    bench.finish()
    begin = bench.mark(bench.compute)
    bench.driver.wait(bench.copies, begin)
    copy_begin = bench.mark(bench.copies)
    copy()
    copy_end = bench.mark(bench.copies)
    with bench.on_compute():
        compute()
    compute_end = bench.mark(bench.compute)
    bench.finish()

    def at(event: int) -> float:
        return bench.driver.elapsed_us(begin, event)

    together_us = max(at(copy_end), at(compute_end))
    shorter_us = min(compute_us, copy_us)
    return {
        "tiles": tiles,
        "tile_tokens": tile_tokens,
        "targets": targets,
        "copies": copies,
        "copied_mib": copies * layer.size.nbytes / 2**20,
        "compute_alone_us": compute_us,
        "copy_alone_us": copy_us,
        "together_us": together_us,
        "overlapped": (compute_us + copy_us - together_us) / shorter_us if shorter_us > 0 else 0.0,
        "spans": [
            {"lane": "compute alone", "from_us": 0.0, "to_us": compute_us},
            {"lane": "copies alone", "from_us": 0.0, "to_us": copy_us},
            {"lane": "compute, both together", "from_us": 0.0, "to_us": at(compute_end)},
            {"lane": "copies, both together", "from_us": at(copy_begin), "to_us": at(copy_end)},
        ],
    }


async def completion_times(
    make_device: Callable[[CompletionName], CudaDevice], busy: Callable[[], None], *, repeats: int
) -> dict[str, dict[str, float]]:
    """How long after an event the loop hears of it, and what the wait costs the host, by bell and by query."""
    found: dict[str, dict[str, float]] = {}
    ways: tuple[CompletionName, ...] = ("bell", "query")
    for way in ways:
        device = make_device(way)
        clock, late_us, host_us = WallClock(), [], []
        try:
            for _ in range(repeats):
                device.model_stream.run(WORK, busy)
                event = device.model_stream.record()
                device.model_stream.flush()
                cpu_ns = time.thread_time_ns()
                await event.wait(timeout_us=5e6)
                host_us.append((time.thread_time_ns() - cpu_ns) / 1e3)
                late_us.append((clock.now_ns() - event.completed_ns) / 1e3)
                await asyncio.sleep(0)
        finally:
            device.close()
        found[way] = {
            "late_us": statistics.median(late_us),
            "late_p90_us": sorted(late_us)[int(len(late_us) * 0.9)],
            "host_us": statistics.median(host_us),
        }
    return found


def host_times(bench: Bench, enqueue: Callable[[], None], *, repeats: int) -> dict[str, float]:
    """What enqueuing a target's experts costs the host, and an event with it."""
    launch_us, event_us = [], []
    for _ in range(repeats):
        begin_ns = time.perf_counter_ns()
        with bench.on_compute():
            enqueue()
        launch_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        event = bench.event()
        begin_ns = time.perf_counter_ns()
        bench.driver.record(event, bench.compute)
        event_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        bench.finish()
    return {"enqueue_experts_us": statistics.median(launch_us), "record_event_us": statistics.median(event_us)}


def plan_transfer_times(driver: Driver, bench: Bench, *, repeats: int) -> dict[str, float]:
    """What goes up and down with each target: a plan of 128 experts, and a summary of 40 rows."""
    up, down = 4 * (3 * 128 + 1), 4 * 43
    device, pinned = bench.memory.allocate(up), bench.memory.pinned((up,), "uint8")
    host = int(pinned.ctypes.data)
    return {
        "plan_up_us": bench.time_us(
            lambda: driver.copy([Span(device, host, up)], bench.compute), bench.compute, repeats=repeats
        ),
        "summary_down_us": bench.time_us(
            lambda: driver.copy([Span(host, device, down)], bench.compute), bench.compute, repeats=repeats
        ),
    }


def describe_sizes(*sizes: ExpertSize) -> list[dict[str, Any]]:
    """For reports."""
    return [size.describe() for size in sizes]
