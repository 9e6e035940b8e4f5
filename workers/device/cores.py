"""Cores that emulated workers share: processes on one machine that has fewer cores than they could use."""

from __future__ import annotations

from afore.core.errors import ConfigError
from afore.workers.device.base import Work
from afore.workers.device.emulated import EmulatedDevice
from afore.workers.device.ports import EmulatedFleet
from afore.workers.device.profile import CostProfile


class Cores:
    """Work gets a core in the order in which it asks for one, and keeps it to its end. Raises ``ConfigError`` for none at all."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError("cores", f"{count} run nothing", "give 1 or more, or none for a device to each worker")
        self._free_ns = [0] * count

    def take(self, start_ns: int, duration_ns: int) -> int:
        """When work ends that could begin at ``start_ns``. What takes no time needs no core."""
        if not duration_ns:
            return start_ns
        free = [core for core, free_ns in enumerate(self._free_ns) if free_ns <= start_ns]
        # Of free cores the one that was busy last: work that asks later may be able to begin earlier.
        core = max(free, key=self._free_ns.__getitem__) if free else self._free_ns.index(min(self._free_ns))
        self._free_ns[core] = max(start_ns, self._free_ns[core]) + duration_ns
        return self._free_ns[core]

    def run(self, start_ns: int, duration_ns: int, beside_ns: tuple[int, ...]) -> int:
        """``take``, and what goes on beside from then on; when the work itself ends."""
        end_ns = self.take(start_ns, duration_ns)
        for each_ns in beside_ns:
            self.take(end_ns, each_ns)
        return end_ns


class DeviceOnCores(EmulatedDevice):
    """A device whose work takes one of ``cores`` for its time; copies too, which a thread makes."""

    def __init__(
        self, fleet: EmulatedFleet, rank: int, profile: CostProfile, cores: Cores, *, counted: bool = False
    ) -> None:
        super().__init__(fleet, rank, profile, counted=counted)
        self._cores = cores
        self.ending = self._on_core

    def _on_core(self, work: Work, start_ns: int, end_ns: int) -> int:
        return self._cores.run(start_ns, end_ns - start_ns, self.profile.beside_ns(work))
