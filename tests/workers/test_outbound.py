"""What an attention worker writes: rows that wait for room on a link stay those of their own target."""

from __future__ import annotations

import asyncio

import numpy as np

from afore.core.clock import WallClock
from afore.core.config import BatchOptions, RunConfig
from afore.core.target import Target
from afore.core.topology import Topology
from afore.core.trace import Tracer
from afore.models.attention import Routed
from afore.models.emulated import emulated_spec
from afore.transport.api import Lane
from afore.transport.bells import decode
from afore.transport.input_mirror import InputMirror, MirrorReader
from afore.transport.layouts import layouts_for
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.workers.outbound import Doors, Outbound

EPOCH = 1
SPEC = emulated_spec(num_experts=16, experts_per_token=2, moe_layers=2)
CONFIG = RunConfig(topology=Topology(attention=1, ffn=1, microbatches=3), batch=BatchOptions(max_num_seqs=6))
LAYOUTS = layouts_for(CONFIG, SPEC)
TIMEOUT_US = 5e6


def rows(tokens: int, value: int) -> Routed:
    """Rows that say whose they are."""
    return Routed(
        hidden_TD=np.full((tokens, SPEC.hidden_size), value, np.float32),
        ids_TK=np.full((tokens, SPEC.experts_per_token), value, np.int32),
        weights_TK=np.full((tokens, SPEC.experts_per_token), value, np.float32),
    )


async def test_inputs_of_microbatches_that_wait_for_one_link_do_not_mix() -> None:
    """One credit: the second and third microbatch's rows wait side by side until the lead takes its notifications."""
    network = LoopbackNetwork(WallClock(), credits=1)
    attention, lead = LoopbackFabric(network, "attention-0"), LoopbackFabric(network, "ffn-0", node="b")
    region = lead.register(LAYOUTS.mirror.nbytes, label="inputs")
    link = await attention.connect("ffn-0", Lane.DATA, timeout_us=TIMEOUT_US)
    outbound = Outbound(
        rank=0,
        epoch=EPOCH,
        doors=Doors(scheduler=link, mailbox_key=region.key, bells=(), mirrors=((link, region.key),)),
        layouts=LAYOUTS,
        exchange=memoryview(bytearray(LAYOUTS.exchange.nbytes)),
        tracer=Tracer("attention-0", WallClock(), None),
        timeout_us=TIMEOUT_US,
    )
    mirror = InputMirror(region.buffer, LAYOUTS.mirror, EPOCH)
    reader = MirrorReader(region.buffer, LAYOUTS.mirror, 0, EPOCH)
    targets = [Target(layer=0, microbatch=m, step=4) for m in range(3)]
    async with asyncio.TaskGroup() as group:
        for number, target in enumerate(targets):
            group.create_task(outbound.inputs(target, rows(2 - number // 2, number + 1)))
        heard = 0
        while heard < len(targets):
            for notification in await region.notified(timeout_us=TIMEOUT_US):
                mirror.publish(0, decode(notification.immediate).microbatch)
                heard += 1
    for number, target in enumerate(targets):
        seen = reader.read(target.microbatch, target)
        assert seen is not None, target
        assert [set(part.ravel().tolist()) for part in seen] == [{number + 1}] * 3
