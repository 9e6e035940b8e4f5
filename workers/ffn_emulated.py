"""An FFN worker of a virtual world: an emulated device over tags instead of weights, a group that takes collectives' time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afore.core.slots import StoreLayout
from afore.transport.entry import EntryCodec, EntryLimits
from afore.transport.entry_once import Decoders
from afore.transport.exchange import ExchangeLayout
from afore.workers.device.cores import Cores, DeviceOnCores
from afore.workers.device.emulated import EmulatedDevice
from afore.workers.device.ports import EmulatedFleet
from afore.workers.device.profile import CostProfile
from afore.workers.experts import Store
from afore.workers.ffn_world import HostParts
from afore.workers.group.counted import CountedCompute, CountedGroup, CountedStaging, GatheredOnce
from afore.workers.group.emulated import EmulatedGroup
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.staging import Staging
from afore.workers.store_shape import StoreShape
from afore.workers.tagged import TaggedPeer, TaggedStore

NO_MEMORY = 64
"""Bytes of the region that stands for a store without weights."""


class EmulatedFfn(HostParts):
    """Worker ``rank`` of ``fleet``, with the costs of ``profile``. ``stores`` gets its tags, for a check in the end.

    ``collectives``: gather and reduce begin together on all workers; without, each worker goes on by itself, as on one host.
    ``counted_experts``: the model is one of counts, of so many experts; nothing is computed, and no tags are kept. Where there are
    collectives, their results are shared by ``once``, that of the fleet. ``decoders``: those of the fleet; none: its own.
    ``own_collectives``: see ``EmulatedDevice``. ``cores``: the device is one of them, not one of its own.
    """

    def __init__(
        self,
        fleet: EmulatedFleet,
        rank: int,
        profile: CostProfile,
        stores: list[TaggedStore],
        *,
        collectives: bool = True,
        counted_experts: int = 0,
        once: GatheredOnce | None = None,
        decoders: Decoders | None = None,
        own_collectives: bool = False,
        cores: Cores | None = None,
    ) -> None:
        self._collectives = collectives
        self._counted_experts = counted_experts
        counted = counted_experts > 0
        self._once = once if counted and collectives else None
        self._device: EmulatedDevice
        if cores is None:
            self._device = EmulatedDevice(fleet, rank, profile, counted=counted, own_collectives=own_collectives)
        else:
            self._device = DeviceOnCores(fleet, rank, profile, cores, counted=counted)
        self._stores = stores
        self._decoders = decoders or Decoders()
        if self._once is not None:
            self.compute = CountedCompute

    @property
    def device(self) -> EmulatedDevice:
        return self._device

    def store_nbytes(self, shape: StoreShape) -> int:
        return NO_MEMORY

    def store(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> TaggedStore:
        store = TaggedStore(shape, layout, self._device.executing, keep=not self._counted_experts)
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

    def codec(self, limits: EntryLimits) -> EntryCodec:
        """See ``DecodesOnce``."""
        return self._decoders.of(limits)

    def staging(self, *, max_tokens: int, hidden_size: int, top_k: int, num_rows: int) -> Staging:
        """See ``FfnParts``."""
        if self._once is not None:
            return CountedStaging(num_rows=num_rows)
        return super().staging(max_tokens=max_tokens, hidden_size=hidden_size, top_k=top_k, num_rows=num_rows)

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> SharedGroup:
        if not self._collectives:
            return SharedGroup(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)
        meetings = self._device.fleet.meetings
        redistributes = self._device.profile.redistribute_us > 0
        if self._once is not None:
            return CountedGroup(
                meetings,
                self._once,
                num_experts=self._counted_experts,
                rank=rank,
                epoch=epoch,
                layout=layout,
                peers_A=peers_A,
                timeout_us=timeout_us,
                redistributes=redistributes,
            )
        return EmulatedGroup(
            meetings,
            rank=rank,
            epoch=epoch,
            layout=layout,
            peers_A=peers_A,
            timeout_us=timeout_us,
            redistributes=redistributes,
        )
