"""Requests that come one by one, ask for so many tokens, and leave: prompts are paid for, batches grow and shrink."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from afore.core import control
from afore.core.config import RunConfig
from afore.serving.virtual import Emulation, VirtualCluster, running_virtual
from afore.tools.evaluate.closed_run import percentile
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.window import between
from afore.tools.evaluate.workloads import ARRIVALS, WORKLOADS, arrival_times_us, output_lengths, prompt_lengths
from afore.tools.evaluate.world import most_requests_per_s, open_requests

if TYPE_CHECKING:
    from afore.tools.evaluate.cell import Cell


class OpenRun:
    """Measured from the request that comes a third of the way in to the last one's arrival: neither filling up nor draining."""

    def __init__(self, cell: Cell, config: RunConfig, emulation: Emulation, samples: CopySamples) -> None:
        del samples  # of the whole run, as the statistics
        self._cell, self._config, self._emulation = cell, config, emulation
        count = open_requests(cell)
        arrivals, workload = ARRIVALS[cell.arrivals], WORKLOADS[cell.workload]
        self._prompts = prompt_lengths(workload, count, seed=cell.seed)
        mean = sum(self._prompts) / count
        self.per_s = cell.load * most_requests_per_s(cell, emulation.profile, emulation.spec, mean)
        """Requests a second."""
        self._at_us = arrival_times_us(arrivals, count, per_s=self.per_s, seed=cell.seed)
        self._outputs = output_lengths(arrivals, count, mean=cell.steps, seed=cell.seed)
        self._times_ns: list[list[int]] = [[] for _ in range(count)]

    async def measured(self) -> dict[str, Any]:
        """The run's figures."""
        async with running_virtual(self._config, self._emulation) as cluster:
            began_ns = cluster.network.clock.now_ns()
            await asyncio.gather(*(self._request(cluster, number) for number in range(len(self._at_us))))
            stats = await cluster.client.stats()
        first_ns = began_ns + round(self._at_us[len(self._at_us) // 3] * 1e3)
        last_ns = began_ns + round(self._at_us[-1] * 1e3)
        itls_ms, tokens, firsts_ms = [], 0, []
        for at_us, times_ns in zip(self._at_us, self._times_ns, strict=True):
            came_ns = began_ns + round(at_us * 1e3)
            tokens += sum(first_ns < at_ns <= last_ns for at_ns in times_ns)
            itls_ms += [
                (after - before) / 1e6 for before, after in itertools.pairwise(times_ns) if first_ns < after <= last_ns
            ]
            if came_ns >= first_ns and times_ns:
                firsts_ms.append((times_ns[0] - came_ns) / 1e6)
        itls_ms.sort()
        firsts_ms.sort()
        elapsed_ns = max(1, last_ns - first_ns)
        return {
            "tokens": tokens,
            "elapsed_ms": elapsed_ns / 1e6,
            "tokens_per_s": round(tokens / elapsed_ns * 1e9, 3),
            "requests_per_s": round(self.per_s, 6),
            "itl_mean_ms": round(sum(itls_ms) / max(1, len(itls_ms)), 6),
            "itl_p50_ms": percentile(itls_ms, 50),
            "itl_p95_ms": percentile(itls_ms, 95),
            "ttft_p50_ms": percentile(firsts_ms, 50),
            "ttft_p95_ms": percentile(firsts_ms, 95),
            **between(None, stats),
            "all_targets": stats["counters"]["targets"],
        }

    async def _request(self, cluster: VirtualCluster, number: int) -> None:
        await cluster.network.clock.sleep_us(self._at_us[number])
        stream = cluster.client.submit((0,) * self._prompts[number], max_new_tokens=self._outputs[number])
        async for at_ns, event in stream:
            if isinstance(event, control.TokenOut):
                self._times_ns[number].append(at_ns)
