"""What differs between worlds for an FFN worker: its device, where its weights come from, and how its group gathers.

The same ``ffn.serve`` runs over ``CheckpointFfn`` in processes and scripts, and over ``EmulatedFfn`` in virtual time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from afore.core.config import RunConfig
from afore.core.slots import StoreLayout
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint, ExpertReader
from afore.models.config import ModelSpec
from afore.transport.entry import EntryCodec, EntryLimits
from afore.transport.exchange import ExchangeLayout
from afore.transport.session import RoleContext
from afore.workers.device.base import Device
from afore.workers.device.cpu import CpuDevice
from afore.workers.experts import ExpertRow, ExpertStore, PeerStore, Reader, Store
from afore.workers.flight import TargetCompute
from afore.workers.group.base import Group, Meet
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.sequencer import MakeCompute
from afore.workers.staging import Staging
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

    def far_peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> Peer:
        """A store of another node, in memory of this process into which it is read as it is needed."""
        ...

    @property
    def meets(self) -> bool:
        """Whether the workers have to come together (``join``) before there is a group."""
        ...

    async def join(self, meet: Meet, *, rank: int, epoch: int, listen_at: str) -> None:
        """Returns once all workers of the epoch have. ``listen_at``: worker 0's own address. Raises ``TransportError``."""
        ...

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> Group:
        """The group of an epoch."""
        ...

    def staging(self, *, max_tokens: int, hidden_size: int, top_k: int, num_rows: int) -> Staging:
        """The buffers of one microbatch."""
        ...

    @property
    def compute(self) -> MakeCompute:
        """What makes a target's work on this device."""
        ...


@runtime_checkable
class DecodesOnce(Protocol):
    """Parts of one of several workers of a process: they decode the ring's entries together."""

    def codec(self, limits: EntryLimits) -> EntryCodec:
        """The codec that they share."""
        ...


class HostParts:
    """What workers have in common whose rows lie in host memory."""

    compute: MakeCompute = TargetCompute
    meets = False

    async def join(self, meet: Meet, *, rank: int, epoch: int, listen_at: str) -> None:
        """See ``FfnParts``: nobody needs to be met."""

    def staging(self, *, max_tokens: int, hidden_size: int, top_k: int, num_rows: int) -> Staging:
        """See ``FfnParts``."""
        return Staging(max_tokens=max_tokens, hidden_size=hidden_size, top_k=top_k, num_rows=num_rows)


class FfnWorld(Protocol):
    """Makes an FFN worker's parts."""

    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The model's numbers, without its weights."""
        ...

    def ffn(self, ctx: RoleContext) -> FfnParts: ...


class CheckpointFfn(HostParts):
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
        yield from load_from_checkpoint(self._config, store)

    def peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> PeerStore:
        return PeerStore(buffer, shape, layout)

    far_peer = peer

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> SharedGroup:
        return SharedGroup(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)


class ReadableStore(Protocol):
    """A store that a checkpoint is read into."""

    def load_each(self, reader: Reader) -> Iterator[tuple[int, int]]: ...


def load_from_checkpoint(config: RunConfig, store: ReadableStore) -> Iterator[tuple[int, int]]:
    """Fills a store's primaries; yields (experts read, experts in all). Raises ``CheckpointError``."""
    with Checkpoint(config.model if config.model is not None else bundled_model_path()) as checkpoint:
        reader = ExpertReader(checkpoint)

        def read(layer: int, expert: int, row: ExpertRow) -> None:
            reader.read_expert(layer, expert, row.gate_up_FD, row.down_DI, row.gate_up_bias_F, row.down_bias_D)

        yield from store.load_each(read)


class CheckpointFfnWorld(ABC):
    """The real world of FFN workers; a mixin of the world of all roles."""

    def ffn(self, ctx: RoleContext) -> FfnParts:
        """On the device that the configuration names. Raises ``HostError`` where it is a GPU and there is none."""
        if ctx.config.device.name == "cuda":
            # Only here: torch's CUDA side costs every other role its import.
            from afore.workers.ffn_cuda import CudaFfn

            return CudaFfn.on_gpu(ctx, self.model_spec(ctx.config))
        return CheckpointFfn(ctx)

    @abstractmethod
    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The model's numbers."""
