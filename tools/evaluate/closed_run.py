"""A closed batch: every request is there from the beginning, and what their tokens' times say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from afore.core import control
from afore.core.config import RunConfig
from afore.serving.client import Event, failure
from afore.serving.virtual import Emulation, VirtualCluster, running_virtual
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.window import between, tokens_per_s
from afore.tools.evaluate.workloads import WORKLOADS, prompt_lengths

if TYPE_CHECKING:
    from afore.tools.evaluate.cell import Cell

AFTER_STEPS = 40
"""Steps that requests can go on for while others are still measured: so far apart may microbatches be."""


class ClosedRun:
    """A closed batch: every request is there from the beginning and decodes until the last is measured."""

    def __init__(self, cell: Cell, config: RunConfig, emulation: Emulation, samples: CopySamples) -> None:
        self._cell = cell
        self._samples = samples
        self._config = config
        self._emulation = emulation
        self._seats = cell.attention * cell.microbatches * cell.rows
        self._times_ns: list[list[int]] = [[] for _ in range(self._seats)]
        self._left_to_warm = self._left = self._seats
        self._warm, self._done = asyncio.Event(), asyncio.Event()

    async def measured(self) -> dict[str, Any]:
        """The run's figures."""
        cell = self._cell
        lengths = prompt_lengths(WORKLOADS[cell.workload], self._seats, seed=cell.seed)
        async with running_virtual(self._config, self._emulation) as cluster:
            tasks = [
                asyncio.create_task(self._request(cluster, number, length)) for number, length in enumerate(lengths)
            ]
            await self._reached(self._warm, tasks)
            cluster.world.prefill_is_free = False
            before = await cluster.client.stats()
            self._samples.start(cluster.network.clock.now_ns())
            await self._reached(self._done, tasks)
            self._samples.stop(cluster.network.clock.now_ns())
            stats = await cluster.client.stats()
            await cluster.client.stop("the last request is measured")
            await asyncio.wait(tasks)
        return self._figures(before, stats)

    async def _reached(self, event: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        """Returns once the event is set. Raises what ended a request."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            ended = next(task for task in tasks if task.done())
            for task in tasks:
                task.cancel()
            # What ended one ends them all, and each is heard: one that nobody asked would be reported as lost, with a traceback.
            await asyncio.gather(*tasks, return_exceptions=True)
            ended.result()
            raise AssertionError("a request ended before it was measured")

    async def _request(self, cluster: VirtualCluster, number: int, length: int) -> None:
        cell, times_ns = self._cell, self._times_ns[number]
        warm, last = 2 + cell.warm, 2 + cell.warm + cell.steps
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(came: tuple[int, Event]) -> None:
            at_ns, event = came
            if not isinstance(event, control.TokenOut):
                if isinstance(event, control.Failed) and not self._done.is_set():
                    ended.set_exception(failure(event))
                else:
                    ended.set_result(None)
                return
            times_ns.append(at_ns)
            if len(times_ns) == warm:
                self._left_to_warm -= 1
                if not self._left_to_warm:
                    self._warm.set()
            elif len(times_ns) == last:
                self._left -= 1
                if not self._left:
                    self._done.set()

        # Some more than are measured, so that no microbatch shrinks while another is still measured.
        await cluster.client.submit_to(take, (0,) * length, max_new_tokens=last + AFTER_STEPS)
        await ended

    def _figures(self, before: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
        warm = 1 + self._cell.warm
        last = warm + self._cell.steps
        itls_ms = sorted(
            (after - earlier) / 1e6
            for times_ns in self._times_ns
            for earlier, after in zip(times_ns[warm:last], times_ns[warm + 1 : last + 1], strict=True)
        )
        return {
            "tokens": len(itls_ms),
            "tokens_per_s": round(tokens_per_s(self._times_ns, warm, last), 3),
            "itl_mean_ms": round(sum(itls_ms) / len(itls_ms), 6),
            "itl_p50_ms": percentile(itls_ms, 50),
            "itl_p95_ms": percentile(itls_ms, 95),
            **between(before, stats),
            "all_targets": stats["counters"]["targets"],
        }


def percentile(ordered: list[float], percent: float) -> float:
    """The nearest-rank percentile of sorted values; 0 of none."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, max(0, -(-int(percent * len(ordered)) // 100) - 1))], 6)
