"""The group of emulated workers: rows move as in ``shared``, in the time that collectives would take.

All-gather and reduction begin once the model streams of all N workers have reached them, as collectives do; the device's profile
says what they then cost by their bytes (works ``gather`` and ``reduce``). A worker that skips an aborted target is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from afore.core.plan import PlanEntry
from afore.transport.exchange import ExchangeLayout
from afore.workers.device.base import Stream, Work
from afore.workers.device.emulated_stream import EmulatedStream
from afore.workers.device.meetings import Meetings
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.staging import Staging


class EmulatedGroup(SharedGroup):
    """One worker's side; ``meetings`` are those of the fleet."""

    def __init__(
        self,
        meetings: Meetings,
        *,
        rank: int,
        epoch: int,
        layout: ExchangeLayout,
        peers_A: Sequence[AttentionPeer],
        timeout_us: float,
        redistributes: bool = False,
    ) -> None:
        """``redistributes``: every target pays the profile's ``redistribute_us`` before its rows are gathered."""
        super().__init__(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)
        self._meetings = meetings
        self._epoch = epoch
        self._num_workers = layout.num_ffn
        self._redistributes = redistributes

    def gather(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.gather``."""
        if self._redistributes:
            stream.run(Work("redistribute", entry.target), _nothing)
        self._meet(stream, entry, "gather")
        super().gather(stream, entry, staging)

    def reduce(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.reduce``."""
        self._meet(stream, entry, "reduce")
        super().reduce(stream, entry, staging)

    def skip(self, entry: PlanEntry) -> None:
        """See ``Group.skip``."""
        for what in ("gather", "reduce"):
            self._meetings.at((self._epoch, entry.sequence, what), self._num_workers).stay_away()

    def _meet(self, stream: Stream, entry: PlanEntry, what: str) -> None:
        assert isinstance(stream, EmulatedStream)
        stream.meet(self._meetings.at((self._epoch, entry.sequence, what), self._num_workers))


def _nothing() -> None:
    """Work that only takes time."""
