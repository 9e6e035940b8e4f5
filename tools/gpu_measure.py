"""What is measured of a GPU: a tile's time, a copy's time alone and under compute, how they overlap, how soon the host hears of it.

Every number carries its unit in its name, and is a median.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from afore.core.clock import WallClock
from afore.tools.gpu_bench import Bench, Layer
from afore.tools.gpu_lines import line_of
from afore.workers.device.base import Work
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.kernels import Implementation

WORK = Work("experts", None)
WARM = 3
"""Times that are not counted: kernels are compiled at the first, by Triton on the way to the GPU and by numba on the way back."""
WAIT_US = 60e6
"""For an event: the first one stands behind a kernel that is compiled."""
MOST_ROWS = 32
"""Store rows over which tiles are spread: as many experts as one of four workers has of 128."""
EACH = (1, 2, 3, 4)
"""Tiles of each row: the slope over them is β_tile."""
MOST_TARGETS = 256
"""Enqueued at once beside copies: the driver's queue has room for about a thousand launches."""


def tile_times(
    layer: Layer, tile_tokens: Sequence[int], *, repeats: int, each: Sequence[int] = EACH
) -> list[dict[str, Any]]:
    """β_tile of each M_tile and implementation, and what an expert costs whatever its tiles.

    Two lines, because a tile that brings weights of its own along costs another time than one whose weights are read anyway:

    - ``tile_us``: over ``each`` tiles of every row: the same rows, so the same weights, and only tiles are more;
    - ``row_us``: over ever more rows of one tile each: what an expert's weights and first tile cost; ``experts_us`` without any.
    """
    found = []
    size, rows = layer.size, min(layer.size.rows, MOST_ROWS)
    widths = size.hidden_size, size.expert_size
    some = sorted({max(1, rows // part) for part in (4, 2, 1)})
    for pairs in tile_tokens:
        for way in layer.bench.ways(size.dtype, widths):

            def us(tiles: int, used: int, pairs: int = pairs, way: Implementation = way) -> float:
                enqueue = layer.experts(tiles, pairs, way, rows=used)
                return layer.bench.time_us(enqueue, layer.bench.compute, repeats=repeats)

            of_tiles = [(rows * count, us(rows * count, rows)) for count in each]
            of_rows = [(used, us(used, used)) for used in some]
            tiles, experts = line_of(of_tiles), line_of(of_rows)
            found.append(
                {
                    "tile_tokens": pairs,
                    "kernel": way.name,
                    "tile_us": tiles.each_us,
                    "tile_fit_error": tiles.error,
                    "row_us": experts.each_us,
                    "row_fit_error": experts.error,
                    "experts_us": max(0.0, experts.fixed_us),
                    "most_us": of_tiles[-1][1],
                    "points": [{"rows": rows, "tiles": tiles, "experts_us": us} for tiles, us in of_tiles]
                    + [{"rows": used, "tiles": used, "experts_us": us} for used, us in of_rows],
                }
            )
    return found


def fastest(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each M_tile the implementation with the least time at its most tiles."""
    best: dict[int, dict[str, Any]] = {}
    for one in found:
        known = best.get(one["tile_tokens"])
        if known is None or one["most_us"] < known["most_us"]:
            best[one["tile_tokens"]] = one
    return best


def copy_times(
    layer: Layer, counts: tuple[int, ...], busy: Callable[[], None], *, repeats: int
) -> list[dict[str, Any]]:
    """Time of so many experts copied in one batch, alone and under ``busy``, which runs for longer than the copies take."""
    bench, rows = layer.bench, layer.size.rows
    busy_us = max(1e-3, bench.time_us(busy, bench.compute, repeats=repeats))
    found = []
    for count in counts:
        if 2 * count > rows:
            break
        spans = [span for index in range(count) for span in layer.row_spans(index, rows - 1 - index)]

        def copy(spans: list[Span] = spans) -> None:
            bench.driver.copy(spans, bench.copies)

        alone_us = bench.time_us(copy, bench.copies, repeats=repeats)
        under_us, targets, covered = _under(bench, busy, busy_us, copy, alone_us, repeats)
        nbytes = count * layer.size.nbytes
        found.append(
            {
                "experts": count,
                "mib": nbytes / 2**20,
                "alone_us": alone_us,
                "under_compute_us": under_us,
                "targets_beside": targets,
                "under_compute_all_along": covered,
                "alone_gb_per_s": nbytes / alone_us / 1e3 if alone_us > 0 else 0.0,
                "batched": bench.driver.batches,
            }
        )
    return found


def _under(
    bench: Bench, busy: Callable[[], None], busy_us: float, copy: Callable[[], None], alone_us: float, repeats: int
) -> tuple[float, int, bool]:
    """(median µs of ``copy`` under compute, how often ``busy`` ran beside it, whether it ran until the copies were done)."""
    targets = 1 + int(1.5 * alone_us / busy_us)
    while True:
        targets = min(targets, MOST_TARGETS)

        def compute(targets: int = targets) -> None:
            for _ in range(targets):
                busy()

        times = bench.times([(bench.compute, compute), (bench.copies, copy)], repeats=repeats)
        covered = all(computed.end_us >= copied.end_us for computed, copied in times)
        if covered or targets == MOST_TARGETS:
            return statistics.median(copied.took_us for _, copied in times), targets, covered
        targets *= 2


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
    both = bench.times([(bench.compute, compute), (bench.copies, copy)], repeats=5)
    computed, copied = sorted(both, key=lambda times: max(each.end_us for each in times))[len(both) // 2]
    together_us = max(computed.end_us, copied.end_us)
    shorter_us = min(compute_us, copy_us)
    return {
        "tiles": tiles,
        "tile_tokens": tile_tokens,
        "targets": targets,
        "kernel": bench.implementation.name,
        "copies": copies,
        "copied_mib": copies * layer.size.nbytes / 2**20,
        "compute_alone_us": compute_us,
        "copy_alone_us": copy_us,
        "together_us": together_us,
        "overlapped": (compute_us + copy_us - together_us) / shorter_us if shorter_us > 0 else 0.0,
        "times_with_host_in_them": bench.late,
        "spans": [
            {"lane": "compute alone", "from_us": 0.0, "to_us": compute_us},
            {"lane": "copies alone", "from_us": 0.0, "to_us": copy_us},
            {"lane": "compute, both together", "from_us": computed.begin_us, "to_us": computed.end_us},
            {"lane": "copies, both together", "from_us": copied.begin_us, "to_us": copied.end_us},
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
            for turn in range(WARM + repeats):
                device.model_stream.run(WORK, busy)
                event = device.model_stream.record()
                device.model_stream.flush()
                cpu_ns = time.thread_time_ns()
                await event.wait(timeout_us=WAIT_US)
                now_ns, spent_ns = clock.now_ns(), time.thread_time_ns() - cpu_ns
                if turn >= WARM:
                    host_us.append(spent_ns / 1e3)
                    late_us.append((now_ns - event.completed_ns) / 1e3)
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
    for turn in range(WARM + repeats):
        begin_ns = time.perf_counter_ns()
        with bench.on_compute():
            enqueue()
        launched_ns = time.perf_counter_ns() - begin_ns
        event = bench.event()
        begin_ns = time.perf_counter_ns()
        bench.driver.record(event, bench.compute)
        recorded_ns = time.perf_counter_ns() - begin_ns
        bench.finish()
        if turn >= WARM:
            launch_us.append(launched_ns / 1e3)
            event_us.append(recorded_ns / 1e3)
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
