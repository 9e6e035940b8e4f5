"""An attention worker whose record of its tokens' experts fails: the engine hears of it, tokens stay the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from afore.core import control
from afore.core.clock import LoopClock
from afore.core.config import BatchOptions, RunConfig
from afore.core.topology import ATTENTION, SCHEDULER, Topology
from afore.models.bundle import bundled_model_path
from afore.models.reference import Reference
from afore.serving.admission import Limits
from afore.serving.engine import Engine
from afore.serving.hub import Hub
from afore.testing import virtual_test
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from tests.workers.attention_rig import Rig, decode_all
from tests.workers.plain_experts import ExpertsOfCheckpoint

CONFIG = RunConfig(topology=Topology(attention=1, ffn=2, microbatches=1), batch=BatchOptions(max_num_seqs=8))


@pytest.mark.slow
async def test_a_file_that_cannot_be_written_is_told_and_tokens_come(tmp_path: Path) -> None:
    (tmp_path / "run.attention-0.npz").mkdir()
    config = dataclasses.replace(CONFIG, record=str(tmp_path / "run.npz"), record_ids=True)
    prompt = [5, 6, 7, 8]
    async with Rig(config, ExpertsOfCheckpoint()) as rig:
        await rig.mail(control.IdsLost, 0)
        tokens = await decode_all(rig, [prompt], [(0, 0)], 6)
    assert tokens == [Reference(bundled_model_path()).generate(prompt, 6, ignore_eos=True)]


@virtual_test
async def test_the_engine_counts_whom_it_was_told_of() -> None:
    hub = Hub(LoopbackFabric(LoopbackNetwork(LoopClock()), "hub"), CONFIG)
    limits = Limits(vocab_size=10, max_model_len=10, kv_tokens=1024, eos_ids=frozenset())
    engine = Engine(hub, CONFIG, limits, None)
    engine.from_member(ATTENTION, 0, control.IdsLost())
    engine.from_member(SCHEDULER, 0, control.IdsLost())
    assert engine.ids_lost == 1
