"""What an attention worker predicts: transitions of its own steps, and a write of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from afore.core.clock import WallClock
from afore.core.config import BatchOptions, RunConfig
from afore.core.target import Target
from afore.core.topology import Topology
from afore.core.trace import Tracer
from afore.models.attention import Routed
from afore.models.emulated import emulated_spec
from afore.transport.api import Lane
from afore.transport.bells import BellKind, decode
from afore.transport.layouts import layouts_for
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.mailbox import Mailbox
from afore.workers.outbound import Doors, Outbound
from afore.workers.predictions import ByNextGate, ByTransitions, predictions_by

SPEC = emulated_spec(num_experts=4, experts_per_token=2, moe_layers=3)
NOBODY: Any = None
"""Transitions look at no model."""


def routed(*rows: tuple[int, int]) -> Routed:
    ids_TK = np.array(rows, np.int32)
    return Routed(np.zeros((len(rows), SPEC.hidden_size), np.float32), ids_TK, np.ones(ids_TK.shape, np.float32))


def predict(by: ByTransitions, target: Target, *rows: tuple[int, int]) -> list[int] | None:
    predicted_E = by.predict(NOBODY, NOBODY, routed(*rows), target)
    return None if predicted_E is None else predicted_E.tolist()


def test_transitions_are_learned_from_the_layers_of_one_step() -> None:
    by = ByTransitions(SPEC)
    assert predict(by, Target(0, 0, 0), (0, 1)) == [0, 0, 0, 0]
    assert predict(by, Target(0, 1, 0), (2, 3), (2, 3)) == [0, 0, 0, 0]
    assert predict(by, Target(1, 0, 0), (2, 3)) == [0, 0, 0, 0]
    assert predict(by, Target(2, 0, 0), (0, 1)) is None
    # What followed 0 and 1 in microbatch 0 was 2 and 3, one each, which is also a guess at what follows 2.
    assert predict(by, Target(0, 0, 1), (0, 1), (0, 2)) == [0, 0, 2, 2]
    # A step that was given up in between teaches nothing of a pair of layers that it did not run.
    assert predict(by, Target(1, 1, 7), (2, 3)) == [1, 1, 0, 0]
    assert predict(by, Target(0, 1, 8), (2, 2)) == [0, 0, 1, 1]


def test_rows_that_are_overwritten_later_have_been_kept() -> None:
    by, first = ByTransitions(SPEC), routed((0, 1))
    by.predict(NOBODY, NOBODY, first, Target(0, 0, 0))
    first.ids_TK[:] = 3
    predict(by, Target(1, 0, 0), (2, 3))
    assert predict(by, Target(0, 0, 1), (0, 0)) == [0, 0, 1, 1]


def test_who_predicts() -> None:
    assert predictions_by(None, SPEC) is None
    assert isinstance(predictions_by("transitions", SPEC), ByTransitions)
    assert isinstance(predictions_by("next-gate", SPEC), ByNextGate)


async def test_a_prediction_has_a_slot_of_its_own() -> None:
    config = RunConfig(topology=Topology(attention=2, ffn=1, microbatches=2), batch=BatchOptions(max_num_seqs=4))
    layouts = layouts_for(config, SPEC)
    network = LoopbackNetwork(WallClock())
    attention, scheduler = LoopbackFabric(network, "attention-1"), LoopbackFabric(network, "scheduler-0")
    demands, predictions = (scheduler.register(layouts.mailbox.nbytes, label=label) for label in ("a", "b"))
    link = await attention.connect("scheduler-0", Lane.DEMAND, timeout_us=5e6)
    doors = Doors(scheduler=link, mailbox_key=demands.key, predictions_key=predictions.key, bells=(), mirrors=())
    outbound = Outbound(
        rank=1,
        epoch=3,
        doors=doors,
        layouts=layouts,
        exchange=memoryview(bytearray(layouts.exchange.nbytes)),
        tracer=Tracer("attention-1", WallClock(), None),
        timeout_us=5e6,
    )
    now, ahead = Target(0, 1, 4), Target(1, 1, 4)
    await outbound.demand(now, np.array([1, 0, 1, 0], np.int32))
    await outbound.prediction(ahead, np.array([0, 2, 0, 0], np.int32))
    bell = decode((await predictions.notified(timeout_us=5e6))[0].immediate)
    assert (bell.kind, bell.rank, bell.microbatch) == (BellKind.PREDICTION, 1, 1)
    found = [
        vector.tolist()
        for region, target in ((demands, now), (predictions, ahead))
        if (vector := Mailbox(region.buffer, layouts.mailbox, 3).take(1, 1, target)) is not None
    ]
    assert found == [[1, 0, 1, 0], [0, 2, 0, 0]]
    await attention.close()
    await scheduler.close()
