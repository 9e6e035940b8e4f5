"""A device that computes nothing and takes the time that a profile says.

Its streams (``emulated_stream``) stamp completions as soon as their dependencies are known; only what the host awaits becomes a
timer. Closures are executed in the order of their start stamps as far as these are known, so tags and identity results are
where they should be; what happens when is told by ``executing``. Copies contend for the fleet's ports.
"""

from __future__ import annotations

from collections.abc import Callable

from afore.workers.device.base import Kernels, Work
from afore.workers.device.emulated_kernels import CountedKernels, EmulatedKernels
from afore.workers.device.emulated_stream import EmulatedEvent, EmulatedStream
from afore.workers.device.ports import EmulatedFleet
from afore.workers.device.profile import CostProfile


class EmulatedDevice:
    """One worker's device in ``fleet``. ``rank`` names its ports; ``name`` is unique in the fleet, by default ``ffn-{rank}``."""

    def __init__(
        self,
        fleet: EmulatedFleet,
        rank: int,
        profile: CostProfile,
        *,
        name: str | None = None,
        counted: bool = False,
        own_collectives: bool = False,
    ) -> None:
        """``counted``: its kernels compute nothing, not even which pairs are whose (``CountedKernels``).
        ``own_collectives``: gathering and reducing have streams beside the model stream, and do not slow it down.
        """
        self._name = f"ffn-{rank}" if name is None else name
        fleet.join(self._name)
        self.fleet = fleet
        self.rank = rank
        self.profile = profile
        self.awaited: dict[EmulatedEvent, None] = {}
        """Events that the host awaits, oldest first."""
        self.counted = counted
        """Whether its closures only count."""
        self.closed = False
        """Whether ``close`` was called."""
        self._closed_ns = 0
        self.current: Work | None = None
        """The work whose closure runs just now: set by its stream, as are its stamps."""
        self.start_ns = 0
        self.end_ns = 0
        self.ending: Callable[[Work, int, int], int] | None = None
        """From (work, start, end) the end that it comes to where the device's time is not its own; none: that end."""
        self._model = EmulatedStream(self, "model")
        self._migration = EmulatedStream(self, "migration")
        self._collective = (self._model, self._model)
        if own_collectives:
            self._collective = (EmulatedStream(self, "gather"), EmulatedStream(self, "reduce"))
        self._kernels: Kernels = CountedKernels(self) if counted else EmulatedKernels(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def model_stream(self) -> EmulatedStream:
        return self._model

    @property
    def migration_stream(self) -> EmulatedStream:
        return self._migration

    @property
    def collective_streams(self) -> tuple[EmulatedStream, EmulatedStream]:
        """See ``OwnCollectives``: the model stream twice, unless the device was made with its own."""
        return self._collective

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def now_ns(self) -> int:
        """The fleet's time, which stands still for a device that is closed."""
        return self._closed_ns if self.closed else self.fleet.clock.now_ns()

    def close(self) -> None:
        """What was not finished by now never is. Idempotent."""
        if self.closed:
            return
        self._closed_ns = self.fleet.clock.now_ns()
        self.closed = True
        self.fleet.leave(self._name)
        for event in tuple(self.awaited):
            event.release_if_over()

    # What runs just now: for closures, kernels and tagged stores

    def executing(self) -> tuple[int, int]:
        """(start, end) of the work whose closure runs just now, in nanoseconds."""
        assert self.current is not None, "executing is for closures that the device runs"
        return self.start_ns, self.end_ns

    @property
    def working_on(self) -> Work:
        """The work whose closure runs just now."""
        assert self.current is not None, "working_on is for closures that the device runs"
        return self.current

    def charge_us(self, cost_us: float) -> None:
        """The work that runs just now takes so much longer."""
        self.end_ns += round(cost_us * 1e3)
