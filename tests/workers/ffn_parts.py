"""What the rig of FFN workers is made of: shapes, plans, batches of rows, and attention workers that are as plain as can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from afore.core.config import BatchOptions, RunConfig, TimeOptions
from afore.core.plan import CopyStart, PlanEntry
from afore.core.target import Target
from afore.core.topology import ATTENTION, Topology, member_name
from afore.transport.api import Link, RegionKey
from afore.transport.exchange import ExchangeLayout, InputSlots, Replies, ReuseGuard
from afore.transport.feedback import FeedbackFlags, FeedbackRecord
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork

EPOCH = 7
TIMEOUT_US = 60e6
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
ExpertFunction = Callable[[F32, int, I32, F32], F32]
"""(hidden [T, D], layer, ids [T, K], weights [T, K]) → out [T, D]."""


def identity(hidden_TD: F32, layer: int, ids_TK: I32, weights_TK: F32) -> F32:
    """Experts of a tagged store: a token's row times the sum of its weights."""
    out_TD: F32 = hidden_TD * weights_TK.sum(axis=1, keepdims=True)
    return out_TD


class Plans(Protocol):
    """What the scheduler of the rig decides."""

    def reset(self, layer: int) -> None:
        """A plan of this layer was refused: all of its redundant slots count as empty."""
        ...

    def plan(
        self, layer: int, demand_E: I32
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int]], CopyStart]:
        """Shares (expert, worker, slot, count), sorted; copies (expert, worker, slot); when they start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A small world."""

    attention: int = 2
    ffn: int = 3
    microbatches: int = 3
    slots: int | tuple[int, ...] = 1
    layers: int = 3
    steps: int = 2
    experts: int = 7
    top_k: int = 2
    hidden: int = 4
    expert: int = 2
    max_tokens: int = 3

    @property
    def slots_N(self) -> tuple[int, ...]:
        return (self.slots,) * self.ffn if isinstance(self.slots, int) else self.slots

    def config(self, **times: float) -> RunConfig:
        return RunConfig(
            topology=Topology(
                attention=self.attention,
                ffn=self.ffn,
                microbatches=self.microbatches,
                redundant_slots_per_worker=self.slots_N,
            ),
            batch=BatchOptions(max_num_seqs=self.attention * self.microbatches * self.max_tokens),
            times=TimeOptions(**times),
        )


class AttentionSide:
    """One attention worker: its exchange region, and the doors of the FFN workers."""

    def __init__(self, network: LoopbackNetwork, layout: ExchangeLayout, rank: int) -> None:
        self.rank = rank
        self.fabric = LoopbackFabric(network, member_name(ATTENTION, rank))
        self.region = self.fabric.register(layout.nbytes, label="exchange")
        self.inputs = InputSlots(self.region.buffer, layout, EPOCH)
        self.replies = Replies(self.region.buffer, layout, EPOCH)
        self.guard = ReuseGuard(layout.num_microbatches, layout.num_ffn)
        self.replied = asyncio.Condition()
        self.doors: list[tuple[Link, RegionKey]] = []

    @property
    def keys(self) -> dict[str, RegionKey]:
        """Of its regions, by label."""
        return {"exchange": self.region.key}

    def put(self, target: Target, hidden_TD: F32, ids_TK: I32, weights_TK: F32) -> None:
        """Writes a target's rows where FFN workers read them."""
        self.inputs.write(target, hidden_TD, ids_TK, weights_TK)

    def spoil(self, microbatch: int) -> None:
        """Nobody may read these inputs any more."""
        for values in self.inputs.views(microbatch):
            values[:] = 99

    def close(self) -> None:
        """Nothing is under way any more."""

    def replied_rows(self, target: Target, worker: int, count: int, here_TD: F32) -> F32:
        """The rows of a reply: in the host's memory."""
        assert here_TD.shape[0] == count, "rows that lie elsewhere"
        return here_TD

    async def listen(self) -> None:
        while True:
            await self.region.notified(timeout_us=None)
            async with self.replied:
                self.replied.notify_all()


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one target, by attention worker."""

    target: Target
    hidden_A: tuple[F32, ...]
    ids_A: tuple[I32, ...]
    weights_A: tuple[F32, ...]
    demand_E: I32

    @property
    def tokens_A(self) -> tuple[int, ...]:
        return tuple(ids_TK.shape[0] for ids_TK in self.ids_A)


@dataclass(slots=True)
class Seen:
    """What the rig has seen, for assertions."""

    entries: list[PlanEntry] = field(default_factory=list)
    """Of the targets that ``publish`` planned."""
    records: list[FeedbackRecord] = field(default_factory=list)

    @property
    def refused(self) -> set[int]:
        """Sequences of the entries that some worker refused."""
        return {record.sequence for record in self.records if record.flags & FeedbackFlags.REFUSED}

    @property
    def copies(self) -> int:
        """Copies of the entries that all accepted."""
        refused = self.refused
        return sum(len(entry.copies) for entry in self.entries if entry.sequence not in refused)
