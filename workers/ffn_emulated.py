"""An FFN worker of a virtual world: an emulated device over tags instead of weights, a group that takes collectives' time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afore.core.slots import StoreLayout
from afore.transport.exchange import ExchangeLayout
from afore.workers.device.emulated import EmulatedDevice
from afore.workers.device.ports import EmulatedFleet
from afore.workers.device.profile import CostProfile
from afore.workers.experts import Store
from afore.workers.ffn_world import HostParts
from afore.workers.group.emulated import EmulatedGroup
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.store_shape import StoreShape
from afore.workers.tagged import TaggedPeer, TaggedStore

NO_MEMORY = 64
"""Bytes of the region that stands for a store without weights."""


class EmulatedFfn(HostParts):
    """Worker ``rank`` of ``fleet``, with the costs of ``profile``. ``stores`` gets its tags, for a check in the end.

    ``collectives``: gather and reduce begin together on all workers; without, each worker goes on by itself, as on one host.
    ``counted``: the model is one of counts; nothing is computed, and no tags are kept.
    ``own_collectives``: see ``EmulatedDevice``.
    """

    def __init__(
        self,
        fleet: EmulatedFleet,
        rank: int,
        profile: CostProfile,
        stores: list[TaggedStore],
        *,
        collectives: bool = True,
        counted: bool = False,
        own_collectives: bool = False,
    ) -> None:
        self._collectives = collectives
        self._counted = counted
        self._device = EmulatedDevice(fleet, rank, profile, counted=counted, own_collectives=own_collectives)
        self._stores = stores

    @property
    def device(self) -> EmulatedDevice:
        return self._device

    def store_nbytes(self, shape: StoreShape) -> int:
        return NO_MEMORY

    def store(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> TaggedStore:
        store = TaggedStore(shape, layout, self._device.executing, keep=not self._counted)
        self._stores.append(store)
        return store

    def load(self, store: Store) -> Iterator[tuple[int, int]]:
        assert isinstance(store, TaggedStore)
        store.load()
        total = store.shape.num_layers * store.shape.num_primaries
        yield total, total

    def peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> TaggedPeer:
        return TaggedPeer(shape, layout)

    far_peer = peer

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> SharedGroup:
        if not self._collectives:
            return SharedGroup(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)
        meetings = self._device.fleet.meetings
        return EmulatedGroup(
            meetings,
            rank=rank,
            epoch=epoch,
            layout=layout,
            peers_A=peers_A,
            timeout_us=timeout_us,
            redistributes=self._device.profile.redistribute_us > 0,
        )
