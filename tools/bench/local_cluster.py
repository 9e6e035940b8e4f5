"""A cluster that a benchmark starts itself: with its process ids, so that CPU time can be read by role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from afore.cluster import Cluster
from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.serving.start import running_processes
from afore.serving.supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running one."""

    cluster: Cluster
    pids: Mapping[str, int]
    """Of every role process, by name."""


@contextlib.asynccontextmanager
async def local_cluster(config: RunConfig, clock: Clock) -> AsyncIterator[LocalCluster]:
    """Starts it and ends it with the block. Raises what ``Cluster.start`` raises."""
    async with Supervisor(config.policy) as supervisor:
        running = running_processes(config, clock, supervisor=supervisor)
        async with Cluster.over(running, config, clock) as cluster:
            yield LocalCluster(cluster=cluster, pids=dict(supervisor.pids))
