"""The regions that an FFN worker registers for an epoch: its bells, and on the lead of a node the copies of what others write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from afore.core import control
from afore.core.topology import ATTENTION, FFN
from afore.models.config import ModelSpec
from afore.transport.api import Link, Region, RegionKey
from afore.transport.bells import BellKind
from afore.transport.input_mirror import InputMirror
from afore.transport.layouts import Layouts, layouts_for
from afore.transport.nodes import Nodes
from afore.transport.ring_mirror import RingMirror
from afore.transport.session import RoleContext
from afore.workers.belfry import Belfry
from afore.workers.group.meeting import MEETING, MEETING_NBYTES
from afore.workers.mirror_keeper import MirrorKeeper, Publish, input_bells, ring_bells

BELLS, INPUTS, RING = "bells", "inputs", "ring"
"""Their labels."""


class OwnRegions:
    """One epoch's; ``regions`` by label."""

    def __init__(
        self,
        ctx: RoleContext,
        spec: ModelSpec,
        epoch: int,
        members: Sequence[control.Member],
        stack: ExitStack,
        *,
        meets: bool = False,
    ) -> None:
        """``meets``: the workers form a group that needs a place to come together at. Raises ``HostError``."""
        nodes = Nodes(ctx.fabric, {(m.role, m.rank): m.endpoint for m in members})
        layouts: Layouts = layouts_for(ctx.config, spec)
        self._ctx = ctx
        self._stack = stack
        self._publish: dict[str, dict[BellKind, Publish]] = {}
        self.regions: dict[str, Region] = {}
        self._register(BELLS, 64)
        if meets:
            self._register(MEETING, MEETING_NBYTES)
        if nodes.lead(ctx.rank) != ctx.rank:
            return
        mine = nodes.of(FFN, ctx.rank)
        if any(m.role == ATTENTION and nodes.of(m.role, m.rank) != mine for m in members):
            region = self._register(INPUTS, layouts.mirror.nbytes)
            self._publish[INPUTS] = input_bells(InputMirror(region.buffer, layouts.mirror, epoch))
        if nodes.ring_is_mirrored:
            region = self._register(RING, layouts.ring.nbytes)
            self._publish[RING] = ring_bells(RingMirror(region.buffer, layouts.ring, epoch, pid=os.getpid()))

    def _register(self, label: str, nbytes: int) -> Region:
        region = self._ctx.fabric.register(nbytes, label=f"{self._ctx.name}-{label}")
        self._stack.callback(region.close)
        self.regions[label] = region
        return region

    def keepers(
        self, belfry: Belfry, neighbours: Sequence[tuple[Link, RegionKey]], *, timeout_us: float
    ) -> Mapping[str, MirrorKeeper]:
        """Who listens on this worker's mirrors; empty where it is no lead, or all is on one node."""
        return {
            label: MirrorKeeper(self.regions[label], publish, belfry, neighbours, timeout_us=timeout_us)
            for label, publish in self._publish.items()
        }
