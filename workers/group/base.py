"""The group's seam: how the FFN workers get a target's inputs and return its outputs, in sequence order.

Only the sequencer calls a group, and for every target in the same order on every worker: collective calls in differing order
corrupt silently. ``gather`` and ``reduce`` enqueue on the model stream; ``reply`` runs on the host once the stream is past both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from afore.core.plan import PlanEntry
from afore.core.target import Target
from afore.workers.device.base import Stream
from afore.workers.staging import Staging

Meet = Callable[[int | None], Awaitable[tuple[str, int]]]
"""Given the port of the worker that others come to, or None by those who come: its host and port, once it is known."""


class Group(Protocol):
    """One worker's side of the group, rebuilt in every epoch."""

    def missing(self, entry: PlanEntry) -> tuple[int, ...]:
        """The attention workers whose inputs of this target have not come here; empty: gather may be enqueued."""
        ...

    def arrived(self, attention: int, microbatch: int) -> Target | None:
        """The target whose inputs that attention worker's slot of the microbatch holds, planned or not."""
        ...

    def gather(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """Enqueues the gathering of all rows, in (attention rank, row) order, into ``staging``."""
        ...

    def reduce(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """Enqueues what must happen to the partial rows on the device before they can be sent."""
        ...

    def skip(self, entry: PlanEntry) -> None:
        """This worker will not run the target: nobody may wait for it in ``gather`` or ``reduce``."""
        ...

    async def reply(self, entry: PlanEntry) -> None:
        """Sends this worker's rows to every attention worker with T_a > 0. Never before the target's inputs were read for the
        last time: a reply lets their owner overwrite them. Raises ``TransportError``.
        """
        ...

    def close(self) -> None:
        """Lets go of mapped memory. Idempotent."""
        ...
