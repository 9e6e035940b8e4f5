"""The planner's bench: its demand, its C++ build equal to the core bit for bit, its report and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from afore.core.errors import ConfigError, HostError
from afore.scheduler.costs import Costs
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.tools.bench import planner
from afore.tools.bench.planner_cores import (
    CORES,
    CoreSpec,
    Driver,
    build_driver,
    one_at_a_time,
    planner_config,
    python_run,
)
from afore.tools.bench.planner_demand import STATIC_IMBALANCE, drifting, static_imbalance
from tests.scheduler.plan_cases import Situation


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    try:
        return build_driver(tmp_path_factory.mktemp("cpp"))
    except HostError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cores() -> dict[str, CoreSpec]:
    return {name: make() for name, make in CORES.items()}


def test_generated_demand_is_repeatable_and_as_skewed_as_stated() -> None:
    first, again = (drifting(num_experts=128, pairs=16384, targets=60, seed=3) for _ in range(2))
    assert np.array_equal(first, again)
    assert (first.sum(axis=1) == 16384).all()
    assert static_imbalance(first, 8) == pytest.approx(STATIC_IMBALANCE, abs=0.1)
    assert not np.array_equal(first, drifting(num_experts=128, pairs=16384, targets=60, seed=4))


@pytest.mark.slow
def test_the_cpp_build_equals_the_core_bit_for_bit(driver: Driver, cores: dict[str, CoreSpec]) -> None:
    core = cores["afore"]
    for seed in range(150):
        situation = Situation.random(np.random.default_rng(seed))
        config, primaries_E = situation.config, situation.primaries_E
        costs = situation.costs()
        demand_TE = np.array(list(situation.demands(6)), np.int64)
        sides = []
        for one in (core, driver.core):
            prepared = one.prepare(config, primaries_E)
            guarded = np.zeros(config.num_workers * int(config.slots_N.max()), np.bool_)
            driven = driver.run(one, prepared, guarded, demand_TE, costs)
            sides.append((prepared.buffer, driven.max_tiles, driven.total_tiles))
        for ours, theirs in zip(*sides, strict=True):
            assert np.array_equal(ours, theirs), seed
    # Timed from Python, it plans the same.
    prepared = core.prepare(config, primaries_E)
    guarded = np.zeros(config.num_workers * int(config.slots_N.max()), np.bool_)
    assert np.array_equal(python_run(core, prepared, guarded, demand_TE, costs).max_tiles, sides[0][1])


@pytest.mark.slow
def test_a_run_reports_every_core_and_its_ratio(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    argv = ["--ep", "2,4", "--slots", "2", "--tokens", "256", "--rounds", "2", "--targets", "10", "--json", str(out)]
    assert planner.main(argv) == 0
    report = json.loads(out.read_text())
    assert [row["ep"] for row in report["rows"]] == [2, 4]
    for row in report["rows"]:
        assert row["identical"] is True
        ours, theirs = row["cores"]["afore"], row["cores"]["c++"]
        assert ours["median_us"] > 0
        assert ours["tile_imbalance"] == theirs["tile_imbalance"] <= row["static"]["tile_imbalance"]
        assert ours["ratio"]["min"] <= ours["ratio"]["median"] <= ours["ratio"]["max"]
        plus = row["cores"]["afore-plus"]
        assert 0 < plus["median_us"] <= plus["p99_us"]
    printed = capsys.readouterr().out
    assert "bit-identical" in printed
    assert "afore-plus: median below the paper's in" in printed


@pytest.mark.slow
def test_with_nothing_in_flight_no_slot_is_guarded(cores: dict[str, CoreSpec]) -> None:
    """Each target may rebind what the last one used, and is planned as by a planner that guards nothing."""
    config, primaries_E = planner_config(16, 4, 1, 8)
    demand_TE = drifting(num_experts=16, pairs=512, targets=30, seed=5)
    costs = Costs(tile_us=20.0, copy_us=0.0, window_us=0.0)
    found = {}
    for name in ("afore", "afore-plus"):
        core = cores[name]
        for in_flight, run in ((0, one_at_a_time(python_run)), (1, python_run)):
            guarded = np.zeros(4, np.bool_)
            found[name, in_flight] = run(core, core.prepare(config, primaries_E), guarded, demand_TE, costs).max_tiles
        planner_ = {"afore": Planner, "afore-plus": PlusPlanner}[name](config, primaries_E)
        alone = [planner_.plan(demand_E, costs=costs).max_tiles for demand_E in demand_TE]
        assert found[name, 0].tolist() == alone
    assert found["afore-plus", 0].sum() < found["afore", 0].sum()
    assert found["afore-plus", 0].sum() < found["afore-plus", 1].sum()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds"):
        planner.main(["--rounds", "0"])
    with pytest.raises(ConfigError, match="--public"):
        planner.main(["--public", "nobody", "--ep", "2", "--slots", "2", "--rounds", "1", "--targets", "1"])
    with pytest.raises(SystemExit):
        planner.main(["--ep", "none"])
