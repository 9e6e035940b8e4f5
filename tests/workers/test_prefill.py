"""The prefill role: first in, first out, and messages are taken between prompts."""

from __future__ import annotations

import pytest

from afore.core import control
from afore.core.config import BatchOptions, RunConfig
from afore.core.topology import PREFILL, Topology
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


def make_rig() -> Rig:
    return Rig(CONFIG, IdentityExperts(SPEC), world=InlineModels(SPEC))


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
