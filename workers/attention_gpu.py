"""Attention on a GPU: the model's own modules there, a paged KV cache in its memory, and rows that FFN workers find where they need
them.

Per layer one small copy comes down, the demand that the GPU has counted, into pinned memory that the mailbox's message is made
from. Hidden rows, ids and weights go where the FFN workers read them: into this worker's GPU memory, which they open, or, where
they cannot, down into pinned memory and from there into the exchange. A prompt's keys and values come into a region of host
memory, because prefill workers write them one-sided, and are taken up once they are complete.

Letters: T tokens, K experts per token, E experts, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from afore.core.config import RunConfig
from afore.core.demand import DemandVector
from afore.models.attention import F32, I32, AttentionModel, Routed, StepBatch
from afore.models.attention_modules import ModulesState, TransformersAttention
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout, KVStorage, block_spans
from afore.models.loading import LoadedModel
from afore.transport.exchange import ExchangeLayout
from afore.transport.session import RoleContext
from afore.workers.compute import Compute
from afore.workers.device.cuda.driver import Span
from afore.workers.device.cuda.memory import address_of
from afore.workers.device.cuda.pinned import PinnedRegions
from afore.workers.device.cuda.places import rows_apart
from afore.workers.gpu_place import GpuPlace
from afore.workers.gpu_rows import GpuRows, rows_of
from afore.workers.replies import PendingReplies


class RowsSink(Protocol):
    """Where a layer's rows go. ``take`` enqueues; what it returns is valid once the stream is past it."""

    def take(self, microbatch: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Routed:
        """Rows of a target: float32, int32, float32, contiguous."""
        ...


class DemandCounter:
    """Counts on the GPU, into pinned memory of each microbatch."""

    def __init__(self, place: GpuPlace, num_experts: int, num_microbatches: int) -> None:
        self._place = place
        self._counts_ME = place.memory.tensor((num_microbatches, num_experts), torch.int32)
        self._host_ME: I32 = place.memory.pinned((num_microbatches, num_experts), np.int32)
        self._ones: torch.Tensor | None = None

    def count(self, microbatch: int, ids_TK: torch.Tensor) -> DemandVector:
        """Enqueues; the vector is valid once the stream is past it, until the microbatch's next layer."""
        counts_E = self._counts_ME[microbatch].zero_()
        flat_P = ids_TK.reshape(-1).long()
        if self._ones is None or self._ones.numel() < flat_P.numel():
            self._ones = torch.ones(flat_P.numel(), dtype=torch.int32, device=ids_TK.device)
        counts_E.scatter_add_(0, flat_P, self._ones[: flat_P.numel()])
        host_E: DemandVector = self._host_ME[microbatch]
        self._place.copy([Span(address_of(host_E), address_of(counts_E), host_E.nbytes)])
        return host_E


class HostSink:
    """Rows come down into pinned memory."""

    def __init__(self, place: GpuPlace, layout: ExchangeLayout, demand: DemandCounter) -> None:
        rows, pinned = layout.max_tokens, place.memory.pinned
        self._place = place
        self._demand = demand
        self._rooms_M: list[tuple[F32, I32, F32]] = [
            (
                pinned((rows, layout.hidden), np.float32),
                pinned((rows, layout.top_k), np.int32),
                pinned((rows, layout.top_k), np.float32),
            )
            for _ in range(layout.num_microbatches)
        ]

    def take(self, microbatch: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Routed:
        """See ``RowsSink``."""
        tokens = hidden_TD.shape[0]
        hidden, ids, weights = self._rooms_M[microbatch]
        hidden, ids, weights = hidden[:tokens], ids[:tokens], weights[:tokens]
        for to, at in zip((hidden, ids, weights), (hidden_TD, ids_TK, weights_TK), strict=True):
            _down(to, at)
        return Routed(hidden_TD=hidden, ids_TK=ids, weights_TK=weights, demand_E=self._demand.count(microbatch, ids_TK))


class GpuSink:
    """Rows stay: they are written into slots that FFN workers read."""

    def __init__(self, rows: GpuRows, demand: DemandCounter) -> None:
        self._rows = rows
        self._demand = demand

    def take(self, microbatch: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Routed:
        """See ``RowsSink``. The slot's previous target has all its replies: this layer follows from them."""
        tokens = hidden_TD.shape[0]
        slots = rows_of(self._rows.inputs_M[microbatch], tokens)
        for slot, values in zip(slots, (hidden_TD, ids_TK, weights_TK), strict=True):
            slot.copy_(values)
        nothing_TD: F32 = np.zeros((tokens, 0), dtype=np.float32)
        nothing_TK: I32 = np.zeros((tokens, 0), dtype=np.int32)
        demand_E = self._demand.count(microbatch, slots[1])
        return Routed(hidden_TD=nothing_TD, ids_TK=nothing_TK, weights_TK=nothing_TD, demand_E=demand_E, in_place=True)


class GpuAttention(TransformersAttention):
    """The module path on a GPU. Everything is enqueued on torch's current stream."""

    def __init__(self, model: LoadedModel, storage: KVStorage, place: GpuPlace, sink: RowsSink, rows: int) -> None:
        """``rows``: T_max."""
        super().__init__(model, storage, device=place.torch_device)
        self._place = place
        self._sink = sink
        self._vocabulary = int(model.module.lm_head.weight.shape[0])
        self._rows = rows
        self._logits_M: dict[int, F32] = {}

    def begin(self, batch: StepBatch) -> ModulesState:
        state = super().begin(batch)
        state.microbatch = batch.microbatch
        return state

    def _sent(self, state: ModulesState, hidden_TD: Any, ids_TK: Any, weights_TK: Any) -> Routed:
        return self._sink.take(
            state.microbatch,
            hidden_TD.to(torch.float32).contiguous(),
            ids_TK.to(torch.int32).contiguous(),
            weights_TK.to(torch.float32).contiguous(),
        )

    def _received(self, expert_out_TD: Any) -> torch.Tensor:
        if isinstance(expert_out_TD, torch.Tensor):
            return expert_out_TD
        return torch.from_numpy(expert_out_TD).to(self._place.torch_device, non_blocking=True)

    def next_choices(self, state: ModulesState, moe_ordinal: int) -> I32:
        """See ``AttentionModel``. Waits for the GPU: only policies that predict by gates ask for it."""
        with self._place.device.current_model_stream():
            return super().next_choices(state, moe_ordinal)

    def _logits(self, state: ModulesState, rows_TV: torch.Tensor) -> F32:
        """Into pinned memory, where they are once the stream is past this."""
        room = self._logits_M.get(state.microbatch)
        if room is None:
            room = self._place.memory.pinned((self._rows, self._vocabulary), np.float32)
            self._logits_M[state.microbatch] = room
        logits_TV: F32 = room[: rows_TV.shape[0]]
        _down(logits_TV, rows_TV.to(torch.float32))
        return logits_TV


class GpuAttentionWeights:
    """What an attention worker has loaded, on its GPU. ``stack`` of the role closes it; rows and cache are an epoch's."""

    def __init__(self, loaded: LoadedModel, place: GpuPlace, nbytes: int, tensors: int) -> None:
        self._loaded = loaded
        self._place = place
        self.nbytes = nbytes
        self.tensors = tensors
        self._exchange: ExchangeLayout | None = None
        self._rows: GpuRows | None = None
        self._landing: Landing | None = None
        with place.device.current_model_stream():
            loaded.module.to(place.torch_device)

    @property
    def spec(self) -> ModelSpec:
        return self._loaded.spec

    def rows_apart(self, config: RunConfig) -> str:
        """Why rows cannot lie in this GPU's memory; empty where they can."""
        driver = self._place.driver
        return rows_apart(config, driver.device_count(), driver.can_reach)

    def exchange(self, layout: ExchangeLayout, buffer: memoryview | None) -> None:
        """The epoch's exchange. ``buffer``: the region of the rows' handle; None keeps rows in host memory."""
        self._exchange, self._rows = layout, None
        if buffer is not None:
            place = self._place
            self._rows = GpuRows(place.driver, place.memory, place.ordinal, layout, buffer, place.process)

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model over a cache in the GPU's memory; ``buffer`` is the region into which prompts come. After ``exchange``."""
        assert self._exchange is not None, "exchange first"
        place, exchange = self._place, self._exchange
        with place.device.current_model_stream():
            cache = place.memory.tensor((layout.nbytes,), torch.uint8).zero_()
        self.close()
        self._landing = Landing(place, layout, buffer, cache)
        demand = DemandCounter(place, self.spec.num_experts, exchange.num_microbatches)
        sink: RowsSink = GpuSink(self._rows, demand) if self._rows is not None else HostSink(place, exchange, demand)
        return GpuAttention(self._loaded, KVStorage(layout, cache), place, sink, exchange.max_tokens)

    def compute(self, ctx: RoleContext) -> Compute:
        """Where the model's pieces run."""
        return self._place.compute(ctx.config, ctx.clock, ctx.tracer)

    def sum_rows(self, replies: PendingReplies) -> F32 | torch.Tensor:
        """The routed sum of a target, where it is at hand; on the model stream."""
        return replies.sum_TD() if self._rows is None else self._rows.sum_TD(replies)

    def take_up(self, blocks: Sequence[int]) -> None:
        """A prompt's keys and values have come into the region: enqueues their way to the GPU."""
        assert self._landing is not None
        self._landing.take_up(blocks)

    def close(self) -> None:
        """Lets go of the region, once the GPU is past everything. Idempotent."""
        if self._landing is not None:
            self._place.device.drain()
            self._landing.close()
            self._landing = None


class Landing:
    """A prompt's keys and values on their way from the region that prefill writes into the cache on the GPU."""

    def __init__(self, place: GpuPlace, layout: KVLayout, region: memoryview, cache: torch.Tensor) -> None:
        self._place = place
        self._layout = layout
        self._cache_at = address_of(cache)
        self._region = region
        self._region_at = int(np.frombuffer(region, dtype=np.uint8).ctypes.data)
        self._pinned = PinnedRegions(place.driver)
        self._pinned.add(region)  # where it cannot be, the driver copies by itself, and the host waits

    def take_up(self, blocks: Sequence[int]) -> None:
        """Enqueues copies of the blocks of every layer: whatever is enqueued later finds them."""
        self._place.copy(
            [
                Span(self._cache_at + offset, self._region_at + offset, nbytes)
                for offset, nbytes in block_spans(self._layout, blocks)
            ]
        )

    def close(self) -> None:
        """No copy may be under way. Idempotent."""
        self._pinned.close()


def _down(to: npt.NDArray[Any], at: torch.Tensor) -> None:
    """Enqueues a copy into pinned memory on torch's current stream."""
    torch.from_numpy(to).copy_(at, non_blocking=True)
