"""The prefill role: chunks of several prompts in turns, and messages are taken between them."""

from __future__ import annotations

import dataclasses

import pytest

from afore.core import control
from afore.core.config import BatchOptions, RunConfig
from afore.core.topology import ATTENTION, PREFILL, Topology
from afore.models.emulated import emulated_spec, emulated_tokens
from afore.transport.session import RoleContext
from afore.workers.compute import Compute, InlineCompute
from afore.workers.emulated_models import EmulatedModels
from tests.workers.attention_rig import Rig
from tests.workers.plain_experts import IdentityExperts

SPEC = emulated_spec(num_experts=8, experts_per_token=2, moe_layers=1)
PROMPT = tuple(range(40))
CONFIG = RunConfig(
    topology=Topology(attention=1, ffn=1, microbatches=1, redundant_slots=0),
    batch=BatchOptions(max_num_seqs=4, block_tokens=4, kv_blocks=100),
)


class InlineModels(EmulatedModels):
    """The emulated model, run in the event loop as a real one is: a prompt never suspends."""

    def compute(self, ctx: RoleContext) -> Compute:
        return InlineCompute(ctx.clock, ctx.tracer)


def make_rig(chunk_tokens: int = 0) -> Rig:
    batch = dataclasses.replace(CONFIG.batch, prefill_chunk_tokens=chunk_tokens)
    return Rig(dataclasses.replace(CONFIG, batch=batch), IdentityExperts(SPEC), world=InlineModels(SPEC))


@pytest.mark.slow
async def test_prompts_run_in_the_order_in_which_they_come() -> None:
    async with make_rig() as rig:
        blocks = [await rig.reserve(0, request, len(PROMPT)) for request in range(6)]
        for request in (3, 1, 5, 0, 2, 4):
            rig.post(PREFILL, 0, control.PrefillWork(request, PROMPT, 0, blocks[request], control.Sampling()))
        dones = [await rig.mail(control.PrefillDone, request) for request in range(6)]
        for request in range(6):
            await rig.mail(control.KvReady, 0, request)
    assert [key[1] for key in rig.arrivals if key[0] is control.PrefillDone] == [3, 1, 5, 0, 2, 4]
    assert {done.token for done in dones} == set(emulated_tokens(SPEC, PROMPT, 1))


@pytest.mark.slow
async def test_the_end_of_the_cluster_does_not_wait_for_prompts_in_the_queue() -> None:
    async with make_rig() as rig:
        blocks = await rig.reserve(0, 0, len(PROMPT))
        for request in range(400):
            rig.post(PREFILL, 0, control.PrefillWork(request, PROMPT, 0, blocks, control.Sampling()))
        await rig.mail(control.PrefillDone, 0)
    assert not rig.has_mail(control.PrefillDone, 399)


@pytest.mark.slow
async def test_a_short_prompt_is_done_between_the_chunks_of_a_long_one() -> None:
    async with make_rig(chunk_tokens=8) as rig:
        blocks = [await rig.reserve(0, request, length) for request, length in enumerate((len(PROMPT), 5))]
        rig.post(PREFILL, 0, control.PrefillWork(0, PROMPT, 0, blocks[0], control.Sampling()))
        rig.post(PREFILL, 0, control.PrefillWork(1, PROMPT[:5], 0, blocks[1], control.Sampling()))
        dones = [await rig.mail(control.PrefillDone, request) for request in range(2)]
        for request in range(2):
            await rig.mail(control.KvReady, 0, request)
    order = [key[1] for key in rig.arrivals if key[0] in (control.PrefillProgress, control.PrefillDone)]
    assert order.index(1) < 4
    assert order.count(0) == 5
    assert [done.token for done in dones] == [emulated_tokens(SPEC, p, 1)[0] for p in (PROMPT, PROMPT[:5])]


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
async def test_a_cancelled_prompt_stops_at_the_next_chunk_and_its_blocks_come_back(begun: bool) -> None:
    async with make_rig(chunk_tokens=1) as rig:
        blocks = [await rig.reserve(0, request, len(PROMPT)) for request in range(2)]
        works = [control.PrefillWork(request, PROMPT, 0, blocks[request], control.Sampling()) for request in range(2)]
        for work in works[: 1 if begun else 2]:
            rig.post(PREFILL, 0, work)
        cancelled = 0 if begun else 1
        if begun:
            await rig.mail(control.PrefillProgress, 0, 1)
        rig.post(PREFILL, 0, control.CancelPrefill(cancelled))
        rig.post(ATTENTION, 0, control.Release(cancelled, quarantine=True, late=True))
        await rig.mail(control.PrefillStopped, cancelled)
        await rig.mail(control.Freed, 0, cancelled)
        if begun:
            rig.post(PREFILL, 0, works[1])
        await rig.mail(control.PrefillDone, 1 - cancelled)
        rig.post(PREFILL, 0, control.CancelPrefill(1 - cancelled))  # too late, and no mistake
        await rig.mail(control.KvReady, 0, 1 - cancelled)
    assert not rig.has_mail(control.PrefillDone, cancelled)
    assert not rig.has_mail(control.PrefillProgress, cancelled, len(PROMPT) - 1)
    assert not rig.has_mail(control.KvReady, 0, cancelled)
