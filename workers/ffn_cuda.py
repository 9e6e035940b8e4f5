"""An FFN worker on a GPU: its experts in the GPU's memory, open to its peers; its targets on the GPU's streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.plan import CopyStart, EntryKind, PlanEntry
from afore.core.slots import StoreLayout
from afore.core.target import Phase, Target
from afore.models.config import ModelSpec
from afore.transport.exchange import ExchangeLayout
from afore.transport.session import RoleContext
from afore.workers.cuda_store import CudaPeer, CudaStore, FarPeer, region_nbytes
from afore.workers.cuda_target import CudaStaging, CudaTarget
from afore.workers.device.cuda.choice import choose, default_file
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver, load_driver
from afore.workers.device.cuda.kernels import (
    TORCH,
    CudaKernels,
    Implementation,
    check_tile,
    torch_implementation,
    ways_of,
)
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.places import ffn_together, group_of
from afore.workers.device.cuda.probe import gpu_of
from afore.workers.device.cuda.trial import Trial
from afore.workers.experts import Store
from afore.workers.ffn_world import load_from_checkpoint
from afore.workers.group.base import Meet
from afore.workers.group.collective import Collective, nccl_missing
from afore.workers.group.on_gpu import GpuGroup
from afore.workers.group.shared import AttentionPeer
from afore.workers.partition import compile_partition
from afore.workers.sequencer import MakeCompute
from afore.workers.staging import Staging
from afore.workers.store_shape import StoreShape

_log = logging.getLogger(__name__)

WARM = PlanEntry(
    kind=EntryKind.PLAN,
    epoch=0,
    sequence=0,
    target=Target(layer=0, microbatch=0, step=0),
    phase=Phase.DECODE,
    tokens_A=(1,),
    demand_crc=0,
    shares=(),
    copies=(),
    start=CopyStart.NOW,
    cancels=-1,
)
"""A target without a plan."""
Current = Callable[[int], contextlib.AbstractContextManager[object]]


class CudaFfn:
    """``current`` and ``ordinal`` are for tests: without a GPU the driver's memory is the host's."""

    def __init__(
        self,
        driver: Driver,
        clock: Clock,
        config: RunConfig,
        spec: ModelSpec,
        implementation: Implementation,
        *,
        name: str,
        ordinal: int,
        on_gpu: bool = True,
        current: Current | None = None,
        process: int | None = None,
        ways: Sequence[Implementation] = (),
    ) -> None:
        """``ways``: from which the fastest is chosen by measurement; ``implementation`` computes until then.

        ``process``: this one's number, where several are played in one. Raises ``ConfigError``, ``CudaError``.
        """
        self._ways = tuple(ways) or (implementation,)
        check_tile(config.planner.tile_tokens)
        compile_partition()  # plans are checked on the host, and pairs are counted there for the feedback
        self._config = config
        self._driver = driver
        self._ordinal = ordinal
        self._process = process
        self._spec = spec
        self._on_gpu = on_gpu
        self._form, why = group_of(config, driver.device_count(), driver.can_reach, nccl_missing() if on_gpu else "")
        _log.info("%s: group %s, because %s", name, self._form, why)
        self._collective: Collective | None = None
        """Joined, and not yet a group's."""
        self._device = CudaDevice(
            driver,
            clock,
            asyncio.get_running_loop(),
            ordinal=ordinal,
            name=name,
            completion=config.device.completion,
            current=current,
        )
        self._memory = DeviceMemory(driver, ordinal if on_gpu else None)
        self._device.on_close(self._memory.close)
        with self._device.current_model_stream():
            self._device.kernels = CudaKernels(
                implementation,
                self._memory,
                num_experts=spec.num_experts,
                most_places=config.topology.attention * config.max_tokens_per_worker * spec.experts_per_token,
                hidden_size=spec.hidden_size,
                expert_size=spec.expert_size,
                dtype=torch.float32,
                tile_tokens=config.planner.tile_tokens,
            )

    @classmethod
    def on_gpu(cls, ctx: RoleContext, spec: ModelSpec) -> CudaFfn:
        """On this machine's GPU: workers take the GPUs of ``device.gpus`` in turn. Raises ``HostError``, ``ConfigError``."""
        config = ctx.config
        driver = load_driver(name=ctx.name)
        ordinal = gpu_of(config.device.gpus, ctx.rank, driver.device_count())
        torch.cuda.set_device(ordinal)
        capability = (
            driver.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal),
            driver.attribute("COMPUTE_CAPABILITY_MINOR", ordinal),
        )
        ways = ways_of(config.device.kernels, torch.float32, capability, (spec.hidden_size, spec.expert_size))
        return cls(driver, ctx.clock, config, spec, ways[0], name=ctx.name, ordinal=ordinal, ways=ways)

    @property
    def device(self) -> CudaDevice:
        return self._device

    @property
    def compute(self) -> MakeCompute:
        return partial(CudaTarget, driver=self._driver, stream=self._device.model_stream.handles.stream)

    @property
    def meets(self) -> bool:
        return self._form == "nccl"

    async def join(self, meet: Meet, *, rank: int, epoch: int, listen_at: str) -> None:
        times = self._config.times
        self._collective = await Collective.join(
            meet,
            backend="nccl" if self._on_gpu else "gloo",
            rank=rank,
            size=self._config.topology.ffn,
            epoch=epoch,
            timeout_s=max(times.join_s, 4 * times.step_s),
            ordinal=self._ordinal if self._on_gpu else None,
            listen_at=listen_at,
        )

    def store_nbytes(self, shape: StoreShape) -> int:
        return region_nbytes(shape, readable=not ffn_together(self._config))

    def store(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> CudaStore:
        gpu = self._driver.device_uuid(self._ordinal)
        stream = self._device.model_stream.handles.stream
        return CudaStore(buffer, shape, layout, self._driver, self._memory, gpu, stream, self._process)

    def load(self, store: Store) -> Iterator[tuple[int, int]]:
        assert isinstance(store, CudaStore)
        yield from self._read(store)
        self._warm(store)

    def _read(self, store: CudaStore) -> Iterator[tuple[int, int]]:
        yield from load_from_checkpoint(self._config, store)

    def _warm(self, store: CudaStore) -> None:
        """Runs a target of one row, whose result nobody reads: the first launch of a kernel compiles it, which takes seconds.

        Where our kernels do not compile or run, ``auto`` takes torch's.
        """
        if not self._spec.num_moe_layers:
            return
        try:
            self._run_one_row(store)
        except Exception as error:
            if self._config.device.kernels != "auto" or self._ways[0].name == TORCH:
                raise
            why = " ".join(str(error).split())[:300]
            _log.warning(
                "%s: kernels %s do not work here, torch's are taken: %s: %s",
                self._device.name,
                self._ways[0].name,
                type(error).__name__,
                why,
            )
            self._ways = (torch_implementation(),)
            self._device.kernels.use(self._ways[0])
            self._run_one_row(store)
        self._choose(store)

    def _run_one_row(self, store: CudaStore) -> None:
        layout, spec = store.layout, self._spec
        with self._device.current_model_stream():
            room = CudaStaging(
                self._memory,
                max_tokens=1,
                hidden_size=spec.hidden_size,
                top_k=spec.experts_per_token,
                num_rows=layout.num_rows,
                num_experts=spec.num_experts,
            )
            room.use_room(1)
            for part in (room.device_hidden_TD, room.device_ids_TK, room.device_weights_TK):
                part.zero_()
            compute = self.compute(WARM, room, self._device.kernels, store)
            compute.partition()
            compute.experts()
        self._device.drain()

    def _choose(self, store: CudaStore) -> None:
        """Finds the fastest kernels for targets of each size."""
        kernels: CudaKernels = self._device.kernels
        kept = self._config.device.kernels_file
        trial = Trial(
            self._driver,
            self._memory,
            self._device,
            store,
            top_k=self._spec.experts_per_token,
            tile_tokens=self._config.planner.tile_tokens,
        )
        choice = choose(
            self._ways,
            trial.key(self._ordinal),
            kernels.most_places,
            trial.measure_us,
            default_file() if kept is None else Path(kept),
        )
        kernels.ways = {way.name: way for way in self._ways}
        kernels.choice = choice
        partition = kernels.implementation.name
        _log.info("%s: partition by %s, experts by %s", self._device.name, partition, choice.describe())

    def peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> CudaPeer:
        return CudaPeer(
            buffer,
            shape,
            layout,
            self._driver,
            ordinal=self._ordinal,
            context=self._device.context,
            drain=self._device.drain,
            process=self._process,
        )

    def far_peer(self, buffer: memoryview, shape: StoreShape, layout: StoreLayout) -> FarPeer:
        return FarPeer(buffer, shape, layout, self._driver, self._device.drain)

    def group(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> GpuGroup:
        collective, self._collective = self._collective, None
        group = GpuGroup(
            self._driver,
            self._memory,
            self._device.model_stream,
            self._device.drain,
            rank=rank,
            epoch=epoch,
            layout=layout,
            peers_A=peers_A,
            timeout_us=timeout_us,
            collective=collective,
            process=self._process,
            gpu=self._driver.device_uuid(self._ordinal),
        )
        _log.info("%s has its rows by %s", self._device.name, group.name)
        return group

    def staging(self, *, max_tokens: int, hidden_size: int, top_k: int, num_rows: int) -> Staging:
        with self._device.current_model_stream():
            return CudaStaging(
                self._memory,
                max_tokens=max_tokens,
                hidden_size=hidden_size,
                top_k=top_k,
                num_rows=num_rows,
                num_experts=self._spec.num_experts,
            )
