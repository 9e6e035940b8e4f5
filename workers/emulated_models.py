"""Attention and prefill without a model, for virtual time: answers that can be checked, and the time that a profile says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.trace import SpanName, Tracer
from afore.models.attention import F32, I32, AttentionModel
from afore.models.config import ModelSpec
from afore.models.counted import NEXT_GATE_ACCURACY, CountedAttention, CountedPrefill, DemandSource
from afore.models.emulated import EmulatedAttention, EmulatedPrefill, ExpertFunction, RoutingProfile
from afore.models.kv import KVLayout, KVStorage
from afore.models.prefill import PrefillModel
from afore.transport.session import RoleContext
from afore.workers.attention import AttentionWeights
from afore.workers.compute import Compute
from afore.workers.device.base import Work
from afore.workers.device.cores import Cores
from afore.workers.device.emulated import EmulatedDevice
from afore.workers.device.profile import LAPTOP_EMULATED, CostProfile
from afore.workers.replies import PendingReplies

R = TypeVar("R")
_NO_ROWS: F32 = np.zeros((0, 1), dtype=np.float32)
_LONGEST_US = 600e6
"""Of a piece of attention that waits for its turn: the deadlines of steps are shorter."""


def identity_expert(hidden_PD: F32, expert_P: I32) -> F32:
    """What an emulated FFN device computes over tagged weights: every expert returns its rows."""
    return hidden_PD


class EmulatedCompute:
    """A device of its own: pieces run one after another, each as long as ``profile`` says; see ``Compute``.

    ``free``: whether pieces cost nothing just now; none: they always cost what they cost. ``cores``: of which each piece needs one.
    """

    def __init__(
        self,
        clock: Clock,
        tracer: Tracer,
        profile: CostProfile,
        free: Callable[[], bool] | None = None,
        cores: Cores | None = None,
    ) -> None:
        self._free = free
        self._cores = cores
        self._clock = clock
        self._tracer = tracer
        self._profile = profile
        self._free_ns = 0
        """When all that was asked for so far is finished."""

    async def run(self, work: Work, do: Callable[[], R], span: SpanName | None = None) -> R:
        now_ns = self._clock.now_ns()
        start_ns = max(now_ns, self._free_ns)
        cost_ns = 0 if self._free is not None and self._free() else self._profile.work_ns(work)
        if self._cores is None:
            self._free_ns = start_ns + cost_ns
        else:
            self._free_ns = self._cores.run(start_ns, cost_ns, self._profile.beside_ns(work))
        end_ns = self._free_ns
        await self._clock.sleep_us((end_ns - now_ns) / 1e3)
        if span is not None:
            self._tracer.span(span, work.target, start_ns, end_ns, tokens=work.tokens)
        return do()


class ColocatedCompute:
    """An FFN worker's own device, in turn with its targets: what attention takes, experts wait for, and the other way round."""

    def __init__(self, device: EmulatedDevice, tracer: Tracer) -> None:
        self._device = device
        self._tracer = tracer

    async def run(self, work: Work, do: Callable[[], R], span: SpanName | None = None) -> R:
        stream = self._device.model_stream
        begun = stream.record()
        stream.run(work, _take_time)
        event = stream.record()
        stream.flush()
        await event.wait(timeout_us=_LONGEST_US)
        if span is not None:
            self._tracer.span(span, work.target, begun.completed_ns, event.completed_ns, tokens=work.tokens)
        return do()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAttentionWeights:
    """What an emulated attention worker "loads"."""

    spec: ModelSpec
    seed: int
    routing: RoutingProfile
    expert: ExpertFunction | None
    nbytes: int = 0
    tensors: int = 0

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model over a KV storage; ``buffer`` must outlive it."""
        storage = KVStorage(layout, buffer)
        return EmulatedAttention(self.spec, storage, seed=self.seed, routing=self.routing, expert=self.expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPrefillWeights:
    """What an emulated prefill worker "loads"."""

    model: PrefillModel
    nbytes: int = 0
    tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAttentionWeights:
    """What an attention worker of a counted model "loads"."""

    spec: ModelSpec
    source: DemandSource
    rank: int
    next_gate_accuracy: float = NEXT_GATE_ACCURACY
    nbytes: int = 0
    tensors: int = 0

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model; nothing is cached."""
        return CountedAttention(self.spec, self.source, self.rank, next_gate_accuracy=self.next_gate_accuracy)

    def sum_rows(self, replies: PendingReplies) -> F32:
        """See ``SumsRows``: rows say nothing, and none have come."""
        return _NO_ROWS


class EmulatedModels:
    """The attention and prefill roles of a virtual world; ``expert`` is what its FFN devices compute, ``None`` if they do not."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        profile: CostProfile = LAPTOP_EMULATED,
        seed: int = 0,
        routing: RoutingProfile | None = None,
        expert: ExpertFunction | None = identity_expert,
        demand: DemandSource | None = None,
        next_gate_accuracy: float = NEXT_GATE_ACCURACY,
    ) -> None:
        """``demand``: a model of counts instead (``afore.models.counted``), whose next gates are right as often as said: ``seed``,
        ``routing``, ``expert`` say nothing."""
        self._spec = spec
        self._accuracy = next_gate_accuracy
        self._demand = demand
        self._profile = profile
        self._seed = seed
        self._routing = routing or RoutingProfile()
        self._expert = expert

    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The emulated model's numbers."""
        return self._spec

    def load_attention(self, config: RunConfig, rank: int) -> AttentionWeights:
        """At once."""
        if self._demand is not None:
            return CountedAttentionWeights(
                spec=self._spec, source=self._demand, rank=rank, next_gate_accuracy=self._accuracy
            )
        return EmulatedAttentionWeights(spec=self._spec, seed=self._seed, routing=self._routing, expert=self._expert)

    def load_prefill(self, config: RunConfig) -> EmulatedPrefillWeights:
        """At once."""
        if self._demand is not None:
            return EmulatedPrefillWeights(model=CountedPrefill(self._spec))
        return EmulatedPrefillWeights(model=EmulatedPrefill(self._spec, seed=self._seed))

    def compute(self, ctx: RoleContext) -> Compute:
        """Charges the profile's times."""
        return EmulatedCompute(ctx.clock, ctx.tracer, self._profile)


def _take_time() -> None:
    """Attention's own numbers are computed on the host, once its time is over."""
