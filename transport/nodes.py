"""Which members share memory: a node is a machine, or whatever part of it the fabric says can map one another's regions."""

from __future__ import annotations

from collections.abc import Mapping

from afore.core.topology import FFN, SCHEDULER
from afore.transport.api import Fabric

Endpoints = Mapping[tuple[str, int], str]
"""Address of every (role, rank)."""


class Nodes:
    """The nodes of one epoch's members."""

    def __init__(self, fabric: Fabric, endpoints: Endpoints) -> None:
        self._node_of = {member: fabric.node_of(address) for member, address in endpoints.items()}
        self._leads: dict[str, int] = {}
        for (role, rank), node in sorted(self._node_of.items()):
            if role == FFN:
                self._leads.setdefault(node, rank)

    def of(self, role: str, rank: int) -> str:
        """The node of a member."""
        return self._node_of[role, rank]

    def together(self, left: tuple[str, int], right: tuple[str, int]) -> bool:
        """Whether two members share memory."""
        return self._node_of[left] == self._node_of[right]

    def ffn_leads(self) -> dict[str, int]:
        """The lead of each node that has FFN workers: the lowest rank there. What comes from other nodes comes to it."""
        return dict(self._leads)

    def lead(self, rank: int) -> int:
        """The lead of FFN worker ``rank``'s node."""
        return self._leads[self._node_of[FFN, rank]]

    @property
    def ring_is_mirrored(self) -> bool:
        """Whether each node with FFN workers has a copy of the plan ring: where not all of them are beside the scheduler."""
        return any(node != self._node_of[SCHEDULER, 0] for node in self._leads)
