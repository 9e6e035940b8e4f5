"""What differs between worlds for an FFN worker: its device, where its weights come from, and how its group gathers.

The same ``ffn.serve`` runs over ``CheckpointFfn`` in processes and scripts, and over ``EmulatedFfn`` in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from afore.core.config import RunConfig
from afore.core.slots import StoreLayout
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint, ExpertReader
from afore.models.config import ModelSpec
from afore.transport.exchange import ExchangeLayout
from afore.transport.session import RoleContext
from afore.workers.device.base import Device
from afore.workers.device.cpu import CpuDevice
from afore.workers.experts import ExpertRow, ExpertStore, PeerStore, Store
from afore.workers.group.base import Group
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.store_shape import StoreShape


class Peer(Protocol):
    """A peer's primaries, as a source of copies."""

    def close(self) -> None: ...


class FfnParts(Protocol):
    """What one FFN worker is made of. Everything but the group outlives epochs."""

    @property
    def device(self) -> Device: ...

    def store_nbytes(self, shape: StoreShape) -> int:
        """Bytes of the region that holds the store; at least 1."""
        ...

    def store(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> Store:
        """The worker's store in its region's memory, empty."""
        ...

    def load(self, store: Store) -> Iterator[tuple[int, int]]:
        """Fills the primaries; yields (experts read, experts in all) now and then. Raises ``CheckpointError``."""
        ...

    def peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> Peer:
        """A peer's store in its mapped region."""
        ...

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> Group:
        """The group of an epoch."""
        ...


class FfnWorld(Protocol):
    """Makes an FFN worker's parts."""

    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The model's numbers, without its weights."""
        ...

    def ffn(self, ctx: RoleContext) -> FfnParts: ...


class CheckpointFfn:
    """Experts from the checkpoint, on this CPU."""

    def __init__(self, ctx: RoleContext) -> None:
        options = ctx.config.device
        self._config = ctx.config
        self._verify_copies = options.verify_copies
        self._device = CpuDevice(
            ctx.clock,
            asyncio.get_running_loop() if options.threads else None,
            name=ctx.name,
            inline=not options.threads,
            emulate_copy_us=options.emulate_copy_us,
        )

    @property
    def device(self) -> CpuDevice:
        return self._device

    def store_nbytes(self, shape: StoreShape) -> int:
        return shape.nbytes

    def store(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> ExpertStore:
        return ExpertStore(buffer, shape, layout, verify_copies=self._verify_copies)

    def load(self, store: Store) -> Iterator[tuple[int, int]]:
        assert isinstance(store, ExpertStore)
        path = self._config.model if self._config.model is not None else bundled_model_path()
        with Checkpoint(path) as checkpoint:
            reader = ExpertReader(checkpoint)

            def read(layer: int, expert: int, row: ExpertRow) -> None:
                reader.read_expert(layer, expert, row.gate_up_FD, row.down_DI, row.gate_up_bias_F, row.down_bias_D)

            yield from store.load_each(read)

    def peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> PeerStore:
        return PeerStore(buffer, shape, layout)

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> SharedGroup:
        return SharedGroup(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)


class CheckpointFfnWorld:
    """The real world of FFN workers; a mixin of the world of all roles."""

    def ffn(self, ctx: RoleContext) -> CheckpointFfn:
        return CheckpointFfn(ctx)
