"""``record_ids``: what attention workers wrote beside a recording, joined, is the recorded demand of every target."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from afore.core.config import RunConfig
from afore.core.demand import count_demand
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.topology import Topology
from afore.scheduler.traces import Event, TraceHeader, TraceReader
from afore.scheduler.traces.beside import ids_path
from afore.serving.virtual import Ask, run_emulated, running_virtual
from afore.testing import run_virtual
from afore.workers.ids_record import IdsRecord, ids_record
from tests.serving.faulty_fabric import FaultyFabric, Stalls
from tests.serving.virtual_cases import EMULATION, QUIET, SMALL, SPEC, asks, prescribed

THREE = dataclasses.replace(SMALL, topology=Topology(attention=3, ffn=3, microbatches=3, redundant_slots=2))


def recording(file: Path, config: RunConfig = THREE, policy: str = "afore") -> RunConfig:
    return dataclasses.replace(config, policy=policy, record=str(file), record_ids=True)


def check_joined(file: Path) -> int:
    """Every target has the experts of all its tokens, and they are its demand. Returns how many targets."""
    reader = TraceReader(file)
    targets = 0
    for row in reader:
        assert row.ids_TK is not None
        assert row.demand_E is not None
        assert row.ids_TK.shape == (row.tokens, SPEC.experts_per_token)
        np.testing.assert_array_equal(count_demand(row.ids_TK, SPEC.num_experts), row.demand_E)
        targets += 1
    assert reader.notes == []
    return targets


def test_ids_without_a_recording_are_refused() -> None:
    with pytest.raises(ConfigError, match="record_ids: nothing is recorded"):
        RunConfig(record_ids=True)


def test_nobody_writes_what_nobody_asked_for(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, record=str(tmp_path / "run.npz"))
    assert ids_record(config, SPEC, 0) is None
    assert ids_record(SMALL, SPEC, 0) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["afore", "eplb", "lina"])
def test_every_target_of_a_run_has_its_tokens_experts(tmp_path: Path, policy: str) -> None:
    """On the compiled way and on the plain one, and with a policy that is told predictions besides."""
    file = tmp_path / "run.trace.npz"
    plain = run_emulated(dataclasses.replace(THREE, policy=policy), asks(), EMULATION)
    run = run_emulated(recording(file, policy=policy), asks(), EMULATION)
    assert run.tokens == plain.tokens
    assert run.log.to_bytes() == plain.log.to_bytes(), "it costs nothing in virtual time"
    assert check_joined(file) > 50
    alone = [TraceReader(ids_path(file, rank)) for rank in range(3)]
    assert all(sum(1 for _ in reader) > 20 for reader in alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.trace.attention-0.npz",
        "run.trace.attention-1.npz",
        "run.trace.attention-2.npz",
        "run.trace.npz",
    ]


@pytest.mark.slow
def test_aborted_steps_that_come_again(tmp_path: Path) -> None:
    """A target that was aborted after its plan has its experts, and so has the step that came again, under its own number."""
    file = tmp_path / "run.npz"
    config = recording(file)
    requests: list[Ask] = asks(6, 4)
    target_us = config.times.target_s * 1e6
    weather = Stalls({(0, 1): 1.5 * target_us, (1, 6): 2.5 * target_us, (2, 9): 1.5 * target_us})

    async def main() -> list[list[int]]:
        async with running_virtual(config, QUIET, make_fabric=partial(FaultyFabric, weather=weather)) as cluster:
            return await cluster.ask_all(requests)

    assert run_virtual(main) == prescribed(requests, config)
    assert weather.stalled == 3
    assert sum(row.event is Event.ABORT for row in TraceReader(file).events()) >= 2
    check_joined(file)


@pytest.mark.slow
def test_a_disk_that_refuses_one_worker_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.npz"
    (tmp_path / "run.attention-1.npz.partial").mkdir()
    plain = run_emulated(THREE, asks(), QUIET)
    run = run_emulated(recording(file), asks(), QUIET)
    assert run.tokens == plain.tokens
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"{ids_path(file, 1)}: the trace cannot be written: Is a directory")
    rows = list(TraceReader(file))
    without = [row for row in rows if row.ids_TK is None]
    assert len(without) > 0, "those that worker 1 had rows of"
    assert len(rows) > 50


@pytest.mark.slow
def test_a_disk_that_is_full_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = TraceHeader(experts=64, layers=1, top_k=4)
    file = tmp_path / "run.attention-0.npz"
    file.write_bytes(b"of an older run")
    record = IdsRecord(file, header, 32)
    ids_TK = np.arange(128, dtype=np.int32).reshape(32, 4) % 64
    assert record._writer is not None
    assert record._writer._zip is not None
    with open("/dev/full", "wb", buffering=0) as full:
        record._writer._zip.fp = full  # a disk without room
        step = 0
        while not record.lost.is_set():
            record.take(Target(0, 0, step), ids_TK, count_demand(ids_TK, 64))
            step += 1
            assert step < 40_000
            assert record._writer is None or record._writer.waiting <= 17
        record.take(Target(0, 0, step), ids_TK, count_demand(ids_TK, 64))
        record.close()
    assert len(caplog.records) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.attention-0.npz.partial"]
