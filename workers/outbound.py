"""What an attention worker writes for a target, and where: its demand first, on its own lane, then the execution inputs.

The inputs are written once for this node, into this worker's own exchange region, where its FFN workers read them in place, with
a zero-byte write that rings each one's bell; and once for each other node with FFN workers, into its lead's mirror.
"""

from __future__ import annotations

from dataclasses import dataclass

from afore.core.demand import DemandVector
from afore.core.target import Phase, Target
from afore.core.trace import Tracer
from afore.models.attention import Routed
from afore.transport import bells
from afore.transport.api import Link, RegionKey
from afore.transport.exchange import InputSlots, ReuseGuard
from afore.transport.input_mirror import InputPacker
from afore.transport.layouts import Layouts
from afore.transport.mailbox import pack_demand
from afore.transport.ringing import ring_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Links and regions of one epoch that an attention worker writes through."""

    scheduler: Link
    """Demand lane."""
    mailbox_key: RegionKey
    predictions_key: RegionKey | None = None
    """Where predictions go; none: the policy wants none."""
    bells: tuple[tuple[Link, RegionKey], ...]
    """The FFN workers of this node, data lane, and the region of each on which its bells ring."""
    mirrors: tuple[tuple[Link, RegionKey], ...]
    """The lead of each other node with FFN workers, data lane, and the region into which inputs are mirrored there."""


class Outbound:
    """One epoch's writes of one attention worker. ``exchange`` is the memory of its own exchange region."""

    def __init__(
        self,
        *,
        rank: int,
        epoch: int,
        doors: Doors,
        layouts: Layouts,
        exchange: memoryview,
        tracer: Tracer,
        timeout_us: float,
    ) -> None:
        self._rank = rank
        self._epoch = epoch
        self._doors = doors
        self._mailbox = layouts.mailbox
        self._inputs = InputSlots(exchange, layouts.exchange, epoch)
        self._guard = ReuseGuard(layouts.exchange.num_microbatches, layouts.exchange.num_ffn)
        self._packers_M = [
            InputPacker(layouts.mirror, epoch) for _ in range(layouts.exchange.num_microbatches if doors.mirrors else 0)
        ]
        self._mirror_offsets_M = [
            layouts.mirror.write_offset(rank, m) for m in range(layouts.exchange.num_microbatches)
        ]
        self._written_M: list[Target | None] = [None] * layouts.exchange.num_microbatches
        self._tracer = tracer
        self._timeout_us = timeout_us

    async def demand(self, target: Target, demand_E: DemandVector) -> None:
        """Writes the demand vector into its mailbox slot and notifies the scheduler. Raises ``TransportError``."""
        start_ns = self._tracer.now_ns()
        await self._doors.scheduler.write(
            self._doors.mailbox_key,
            self._mailbox.offset(self._rank, target.microbatch),
            pack_demand(self._epoch, target, self._rank, Phase.DECODE, demand_E),
            notify=self._mailbox.immediate(self._rank, target.microbatch),
            timeout_us=self._timeout_us,
        )
        self._tracer.span("demand_write", target, start_ns, self._tracer.now_ns())

    async def prediction(self, target: Target, predicted_E: DemandVector) -> None:
        """Writes what the demand of ``target``, which is still to come, is predicted to be. Raises ``TransportError``."""
        key = self._doors.predictions_key
        assert key is not None
        await self._doors.scheduler.write(
            key,
            self._mailbox.offset(self._rank, target.microbatch),
            pack_demand(self._epoch, target, self._rank, Phase.DECODE, predicted_E),
            notify=bells.PREDICTION(self._rank, target.microbatch),
            timeout_us=self._timeout_us,
        )

    async def inputs(self, target: Target, routed: Routed) -> None:
        """Writes hidden states, expert ids and weights where the FFN workers read them, and rings every one's bell.

        Raises ``SlotError`` while the slot's previous target may still be read, ``TransportError``.
        """
        start_ns = self._tracer.now_ns()
        self._guard.writing(target)
        self._written_M[target.microbatch] = target
        bell = bells.INPUTS(self._rank, target.microbatch)
        if self._packers_M:
            packed = self._packers_M[target.microbatch].pack(target, routed.hidden_TD, routed.ids_TK, routed.weights_TK)
            offset = self._mirror_offsets_M[target.microbatch]
            for link, key in self._doors.mirrors:
                await link.write(key, offset, packed, notify=bell, timeout_us=self._timeout_us)
        if routed.in_place:
            self._inputs.retract(target.microbatch)
            self._inputs.publish(target, routed.hidden_TD.shape[0])
        elif self._doors.bells:
            self._inputs.write(target, routed.hidden_TD, routed.ids_TK, routed.weights_TK)
        await ring_all(self._doors.bells, bell, timeout_us=self._timeout_us)
        self._tracer.span("a2f", target, start_ns, self._tracer.now_ns())

    def replied(self, target: Target) -> None:
        """All N workers have replied: none of them reads the slot any more."""
        self._guard.all_replied(target)

    def abandon(self, microbatch: int) -> None:
        """The microbatch's target was aborted and all N workers have passed it: none of them reads the slot any more."""
        target = self._written_M[microbatch]
        if target is not None:
            self._guard.abandoned(target)
