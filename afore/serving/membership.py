"""Who is in the cluster, as a pure state machine: events in, messages out; no I/O, no clock.

An epoch opens when every member of the topology has loaded, and serves when every member has linked. A member that is lost ends
the epoch; this version does not open another one. Where members are replaceable (roles that people start), one that is lost
before the epoch opens only frees its rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from afore.core import control
from afore.core.errors import ConfigError, WireError
from afore.core.topology import DOOR, ROLES, Topology, member_name

MemberId = tuple[str, int]


class Stage(enum.IntEnum):
    """How far a member has come."""

    JOINED = 0
    LOADED = 1
    REGISTERED = 2
    LINKED = 3


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to each of ``members``."""

    members: tuple[MemberId, ...]
    message: control.Message


class Membership:
    """The hub's view of the topology's members."""

    def __init__(self, topology: Topology, *, replaceable: bool = False) -> None:
        self.topology = topology
        self._replaceable = replaceable
        self.epoch = 0
        self.serving = False
        self.lost_member = ""
        """``role-rank: reason`` once a member was lost."""
        self._stages: dict[MemberId, Stage] = {}
        self._members: dict[MemberId, control.Member] = {}
        self._keys: dict[MemberId, tuple[control.LabelledKey, ...]] = {}
        self._loading: dict[MemberId, tuple[int, int]] = {}

    @property
    def members(self) -> tuple[control.Member, ...]:
        """Everybody who is in."""
        return tuple(self._members.values())

    def join(self, join: control.Join) -> int:
        """Takes a member in and returns its rank. Raises ``ConfigError`` naming what cannot be."""
        if join.role not in ROLES:
            raise ConfigError("role", f"{join.role!r} is not a role", f"roles: {', '.join(ROLES)}")
        if join.role == DOOR:
            # It carries the hub: nobody who knocks there can be it.
            raise ConfigError("role", "door-0 is already in", "a cluster has one door")
        if self.lost_member:
            raise ConfigError("role", f"the cluster has ended ({self.lost_member})", "start it again")
        size = self.topology.count(join.role)
        if join.rank < 0:
            free = [rank for rank in range(size) if (join.role, rank) not in self._stages]
            if not free:
                raise ConfigError(
                    "role",
                    f"all {size} {join.role} ranks of the topology are taken",
                    f"raise topology.{join.role} where the cluster is started",
                )
            rank = free[0]
        elif join.rank >= size:
            raise ConfigError("rank", f"{join.role} has ranks 0 to {size - 1}, not {join.rank}")
        elif (join.role, join.rank) in self._stages:
            raise ConfigError("rank", f"{member_name(join.role, join.rank)} is already in", "leave the rank out")
        else:
            rank = join.rank
        member = (join.role, rank)
        self._stages[member] = Stage.JOINED
        self._members[member] = control.Member(join.role, rank, join.pid, join.endpoint)
        return rank

    def loading(self, member: MemberId, progress: control.Loading) -> None:
        """Notes how far a member's weights are."""
        self._loading[member] = (progress.done, progress.total)

    def progress(self) -> tuple[int, int]:
        """(done, total) over all members that have said how much they load."""
        return sum(d for d, _ in self._loading.values()), sum(t for _, t in self._loading.values())

    def loaded(self, member: MemberId) -> list[Send]:
        """A member has its weights; with the last one the epoch opens."""
        self._advance(member, Stage.LOADED)
        if not self._all(Stage.LOADED):
            return []
        self.epoch += 1
        return [Send(tuple(self._members), control.OpenEpoch(self.epoch, self.members))]

    def registered(self, member: MemberId, regions: control.Regions) -> list[Send]:
        """A member has registered its regions; with the last one everybody gets the directory."""
        self._check_epoch(member, regions.epoch)
        self._advance(member, Stage.REGISTERED)
        self._keys[member] = regions.keys
        if not self._all(Stage.REGISTERED):
            return []
        keys = tuple(control.MemberKeys(role, rank, self._keys[role, rank]) for role, rank in self._members)
        return [Send(tuple(self._members), control.DirectoryMessage(self.epoch, keys))]

    def linked(self, member: MemberId, linked: control.Linked) -> list[Send]:
        """A member's links stand; with the last one the cluster serves."""
        self._check_epoch(member, linked.epoch)
        self._advance(member, Stage.LINKED)
        if not self._all(Stage.LINKED):
            return []
        self.serving = True
        return [Send(tuple(self._members), control.Serve(self.epoch))]

    def lost(self, member: MemberId, reason: str) -> None:
        """A member is gone: the epoch has ended, or its rank is free again. The first loss is the one that is named."""
        self._stages.pop(member, None)
        if self._replaceable and self.epoch == 0:
            self._members.pop(member, None)
            self._loading.pop(member, None)
            return
        self.serving = False
        if not self.lost_member:
            self.lost_member = f"{member_name(*member)}: {reason}"

    def missing(self) -> tuple[str, ...]:
        """Members that are not linked yet, by name."""
        return tuple(
            member_name(*member)
            for member in self.topology.members()
            if member[0] != "door" and self._stages.get(member, Stage.JOINED) is not Stage.LINKED
        )

    def absent(self) -> tuple[str, ...]:
        """Members that have not joined, by name."""
        return tuple(
            member_name(*member)
            for member in self.topology.members()
            if member[0] != "door" and member not in self._stages
        )

    def _all(self, stage: Stage) -> bool:
        expected = [member for member in self.topology.members() if member[0] != "door"]
        return all(self._stages.get(member, Stage.JOINED) >= stage for member in expected) and all(
            member in self._stages for member in expected
        )

    def _advance(self, member: MemberId, stage: Stage) -> None:
        current = self._stages.get(member)
        if current is None or current != stage - 1:
            raise WireError(member_name(*member), f"said {stage.name} when it was {current and current.name}")
        self._stages[member] = stage

    def _check_epoch(self, member: MemberId, epoch: int) -> None:
        if epoch != self.epoch:
            raise WireError(member_name(*member), f"spoke of epoch {epoch} in epoch {self.epoch}")
