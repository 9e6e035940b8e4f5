"""Cores that workers share: who waits for whom, what goes on beside, and a whole run on them."""

from __future__ import annotations

import dataclasses

import pytest

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.topology import Topology
from afore.serving.virtual import Ask, Emulation, run_emulated
from afore.workers.device.cores import Cores
from tests.serving.virtual_cases import SMALL, SPEC


def test_work_waits_for_the_core_that_is_free_first() -> None:
    cores = Cores(2)
    assert [cores.take(0, 100), cores.take(0, 30), cores.take(10, 50), cores.take(10, 5)] == [100, 30, 80, 85]


def test_of_free_cores_the_one_that_was_busy_last_is_taken() -> None:
    cores = Cores(2)
    cores.take(0, 10)
    assert cores.take(20, 5) == 25
    # The other core was never used: work that could have begun at 0 still does.
    assert cores.take(0, 3) == 3


def test_what_takes_no_time_needs_no_core() -> None:
    cores = Cores(1)
    cores.take(0, 100)
    assert cores.take(50, 0) == 50


def test_what_goes_on_beside_keeps_cores_busy_and_nobody_waiting() -> None:
    cores = Cores(2)
    assert cores.run(0, 10, (40, 20)) == 10
    # One core until 50; the other, free from the beginning, from 10 until 30.
    assert cores.take(10, 5) == 35


def test_no_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="cores"):
        Cores(0)


CONFIG: RunConfig = dataclasses.replace(SMALL, topology=Topology(attention=2, ffn=2, microbatches=1, redundant_slots=2))
ASKS = [Ask(prompt=(1, 2, 3), max_new_tokens=4), Ask(prompt=(5, 6, 7), max_new_tokens=4)]


def test_a_run_on_fewer_cores_takes_longer_and_says_the_same() -> None:
    alone, shared, many = (
        run_emulated(CONFIG, ASKS, Emulation(spec=SPEC, cores=cores, record=False)) for cores in (None, 1, 64)
    )
    assert alone.tokens == shared.tokens == many.tokens
    assert many.elapsed_ns == alone.elapsed_ns
    assert shared.elapsed_ns > alone.elapsed_ns


def test_streams_beside_the_model_stream_do_not_share_cores() -> None:
    config = dataclasses.replace(CONFIG, device=dataclasses.replace(CONFIG.device, collectives="own-stream"))
    with pytest.raises(ConfigError, match="cores"):
        run_emulated(config, ASKS, Emulation(spec=SPEC, cores=2))
