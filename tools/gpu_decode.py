"""One request after another through the GPU's attention and prefill models, experts on the CPU: no roles, no transport."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afore.core.clock import WallClock
from afore.core.trace import Tracer
from afore.models.attention import F32, StepBatch
from afore.models.kv import BlockAllocator, KVLayout
from afore.models.loading import LoadedModel
from afore.models.local import LocalExperts
from afore.transport.exchange import ExchangeLayout
from afore.workers.attention_gpu import GpuAttentionWeights
from afore.workers.device.base import Work
from afore.workers.gpu_place import GpuPlace, StreamCompute
from afore.workers.prefill_gpu import GpuPrefillWeights

STEP_US = 30e6


class GpuDecoder:
    """Greedy decoding over ``place``. Prompts reach the cache as they do in a cluster: through a region of host memory."""

    def __init__(
        self, place: GpuPlace, dense: LoadedModel, whole: LoadedModel, experts: LocalExperts, layout: KVLayout
    ) -> None:
        spec = dense.spec
        self._experts = experts
        self._layout = layout
        self._region = memoryview(bytearray(layout.nbytes))
        self._weights = GpuAttentionWeights(dense, place, 0, 0)
        self._weights.exchange(ExchangeLayout(1, 1, 1, spec.hidden_size, spec.experts_per_token), None)
        self._model = self._weights.open(layout, self._region)
        self._prefill = GpuPrefillWeights(whole, place, 0, 0)
        self._allocator = BlockAllocator(layout.num_blocks)
        clock = WallClock()
        self._compute = StreamCompute(place.device, clock, Tracer("check", clock, None), timeout_us=STEP_US)
        self.layers = 0
        """MoE layers run so far: how often the host has awaited a demand."""

    async def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The prompt's next tokens. Raises ``DeviceError``."""
        blocks = self._allocator.allocate(self._layout.blocks_for(len(prompt) + tokens))
        run = self._prefill.model.start()
        prefilled = await self._compute.run(Work("prefill", None), lambda: run.feed(prompt))
        for offset, data in prefilled.pack(self._layout, blocks):
            self._region[offset : offset + len(data)] = data
        self._weights.take_up(blocks)
        found = [int(np.argmax(prefilled.logits_V))]
        while len(found) < tokens and found[-1] not in self._model.spec.eos_ids:
            found.append(int(np.argmax((await self._step(found[-1], len(prompt) + len(found) - 1, blocks))[0])))
        self._allocator.free(blocks)
        return found

    async def _step(self, token: int, position: int, blocks: Sequence[int]) -> F32:
        model, run = self._model, self._compute.run
        batch = StepBatch.of([token], [position], [list(blocks)])
        state = await run(Work("begin", None), lambda: model.begin(batch))
        for layer in model.layers():
            ordinal = layer.moe_ordinal
            if ordinal is None:
                await run(Work("dense", None), lambda index=layer.index: model.dense(state, index))  # type: ignore[misc]
                continue
            routed = await run(Work("attention", None), lambda m=ordinal: model.attend(state, m))  # type: ignore[misc]
            counted = np.bincount(routed.ids_TK.reshape(-1), minlength=model.spec.num_experts)
            if routed.demand_E is None or not np.array_equal(routed.demand_E, counted):
                raise RuntimeError(f"layer {ordinal}: the demand that the GPU has counted is not that of its ids")
            out_TD = self._experts(ordinal, routed)
            await run(Work("combine", None), lambda m=ordinal, o=out_TD: model.combine(state, m, o))  # type: ignore[misc]
            self.layers += 1
        return await run(Work("sample", None), lambda: model.logits(state))

    def close(self) -> None:
        """Lets go of the region."""
        self._weights.close()
