"""Copies of experts between GPUs: what a job says, and how a batch of them is handed to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afore.core.record import record
from afore.workers.device.base import CopyJob
from afore.workers.device.cuda.driver import Driver, Span


@record
class SpanCopy:
    """What copies one expert: the ``run`` of a ``CopyJob`` for a CUDA stream, which hands its spans to the driver in a batch."""

    spans: tuple[Span, ...]
    """Between memories that the GPU reaches. They do not overlap, nor do those of other copies of a batch."""
    staging: int = 0
    """Address of pinned host memory for all spans together, where the source is out of the GPU's reach; 0: it is not."""
    issued: Callable[[], None] | None = None
    """Called once the copy is enqueued."""

    def __call__(self) -> None:
        raise AssertionError("a copy between GPUs is enqueued by its stream, not run")

    @property
    def through_host(self) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Out of the source into pinned memory; from there to where it belongs. In stream order one buffer serves all copies."""
        outward, inward, at = [], [], self.staging
        for destination, source, nbytes in self.spans:
            outward.append(Span(at, source, nbytes))
            inward.append(Span(destination, at, nbytes))
            at += nbytes
        return tuple(outward), tuple(inward)


def issue_copies(driver: Driver, jobs: Sequence[CopyJob], stream: int) -> None:
    """Enqueues jobs on a stream: one batch of all that go directly, then those through host memory, one after another."""
    direct: list[Span] = []
    staged: list[SpanCopy] = []
    others: list[CopyJob] = []
    for job in jobs:
        if not isinstance(job.run, SpanCopy):
            others.append(job)
        elif job.run.staging:
            staged.append(job.run)
        else:
            direct += job.run.spans
    if direct:
        driver.copy(direct, stream)
    for copy in staged:
        for spans in copy.through_host:
            driver.copy(spans, stream)
    for job in jobs:
        if isinstance(job.run, SpanCopy) and job.run.issued is not None:
            job.run.issued()
    for job in others:
        job.run()
