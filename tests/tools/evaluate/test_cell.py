"""Cells: whole runs in virtual time, small ones; what must follow from the mechanisms, and that nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell, demand_key, percentile, run_cell
from afore.tools.evaluate.demand import demand_of
from afore.tools.evaluate.figure import vary
from afore.tools.evaluate.profiles import parse_override, with_overrides
from afore.tools.evaluate.store import CellFailedError, results_of, to_bytes
from afore.workers.device.hardware import read_profile

SMALL = Cell(policy="afore", attention=2, ffn=4, prefill=1, slots=4, rows=60, layers=4, warm=2, steps=4)
FAST_ATTENTION = {"attention": 4, "rows": 30}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def afore() -> dict[str, Any]:
    return run_cell(SMALL)


def test_the_same_cell_gives_the_same_bytes_under_any_hash_seed(afore: dict[str, Any]) -> None:
    code = (
        "import sys; from tests.tools.evaluate.test_cell import SMALL, run_cell, to_bytes; "
        "sys.stdout.buffer.write(to_bytes(run_cell(SMALL)))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        assert found.stdout == to_bytes(afore)


def test_every_policy_meets_the_same_demand_and_every_token_comes(afore: dict[str, Any]) -> None:
    static = run_cell(vary(SMALL, policy="static"))
    assert static["demand"] == afore["demand"]
    assert static["copies"]["targets"] == 0 < afore["copies"]["targets"]
    assert afore["tokens"] == SMALL.attention * SMALL.microbatches * SMALL.rows * SMALL.steps
    assert static["imbalance"]["tile"]["after"] == static["imbalance"]["tile"]["before"]
    assert afore["imbalance"]["tile"]["after"] < static["imbalance"]["tile"]["after"]
    assert afore["tokens_per_s"] > static["tokens_per_s"]
    assert afore["itl_p50_ms"] <= afore["itl_p95_ms"]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_where_attention_is_the_limit_throughput_is_its_own(microbatches: int) -> None:
    """However steps lie in the time that is measured: a policy for experts changes nothing then."""
    limit = (("chip.attention_host_us", 20_000.0),)
    cell = vary(SMALL, layers=4, warm=6, steps=3, overrides=limit, microbatches=microbatches)
    afore, static = run_cell(cell), run_cell(vary(cell, policy="static"))
    seats = cell.attention * microbatches * cell.rows
    assert afore["tokens_per_s"] == pytest.approx(static["tokens_per_s"], rel=0.03)
    # All of a step's layers on each attention worker, one microbatch after another: it is never faster than that.
    assert afore["tokens_per_s"] <= seats / (4 * microbatches * 20e-3)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_eplb_has_rebalanced_before_anything_is_measured(microbatches: int) -> None:
    found = run_cell(vary(SMALL, policy="eplb-redistribute", microbatches=microbatches, warm=8, steps=4))
    assert found["imbalance"]["tile"]["after"] < found["imbalance"]["tile"]["before"]
    assert found["copies"]["copies"] == 0


def test_a_microbatch_may_be_many_steps_behind_the_others() -> None:
    """EPLB's copies over slow wires hold up the one whose target needs them."""
    slow = (("wires.link_gb_per_s", 1.0),)
    # Right before what is measured, where the evaluation's EPLB never rebalances.
    late = tuple((f"policy_options.eplb.{name}", 3 * 7) for name in ("window_steps", "interval_steps"))
    found = run_cell(
        vary(SMALL, policy="eplb-redistribute", microbatches=3, warm=8, steps=3, overrides=slow, options=late)
    )
    assert found["tokens"] == SMALL.attention * 3 * SMALL.rows * 3
    assert found["itl_p95_ms"] > 2 * found["itl_p50_ms"]


def test_what_a_policy_pays_on_the_path_is_paid_by_every_target(afore: dict[str, Any]) -> None:
    paid = run_cell(vary(SMALL, redistribute_us=2000.0))
    # FFN workers are the bottleneck by then: three microbatches of four layers, a step long each.
    assert paid["itl_mean_ms"] - afore["itl_mean_ms"] > 3 * 4 * 1.0
    assert paid["demand"] == afore["demand"]


def test_collectives_beside_the_experts_cost_less() -> None:
    deep = vary(SMALL, **FAST_ATTENTION, layers=16, steps=2, warm=1)  # experts decide, not the ends of a step
    between, beside = run_cell(deep), run_cell(vary(deep, collectives="own-stream"))
    assert beside["tokens_per_s"] > between["tokens_per_s"]
    assert beside["demand"] == between["demand"]


def test_attention_on_the_experts_devices_costs_more() -> None:
    apart = run_cell(vary(SMALL, **FAST_ATTENTION))
    together = run_cell(vary(SMALL, **FAST_ATTENTION, colocated=True))
    assert together["tokens_per_s"] < apart["tokens_per_s"]


def test_a_slow_worker_slows_everybody() -> None:
    assert run_cell(vary(SMALL, slow_worker=3.0))["tokens_per_s"] < run_cell(SMALL)["tokens_per_s"]


def test_cells_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    tiny = vary(SMALL, layers=1, rows=4, steps=1)
    other = vary(tiny, seed=1)
    run: list[Cell] = []
    first = results_of([tiny, tiny], tmp_path, lambda cell, done, total: run.append(cell))
    again = results_of([tiny, other], tmp_path, lambda cell, done, total: run.append(cell))
    assert run == [tiny, other]
    assert again[tiny] == first[tiny]
    (tmp_path / "cells" / f"{tiny.key()}.json").write_text("{}")
    assert results_of([tiny], tmp_path, lambda cell, done, total: run.append(cell)) == {tiny: first[tiny]}
    assert run == [tiny, other, tiny]
    # Another cell's file under this one's name, and one that no JSON reader gets through.
    for wrong in ((tmp_path / "cells" / f"{other.key()}.json").read_bytes(), b"[" * 200_000):
        (tmp_path / "cells" / f"{tiny.key()}.json").write_bytes(wrong)
        assert results_of([tiny], tmp_path, lambda cell, done, total: None) == {tiny: first[tiny]}


def test_two_processes_run_what_one_runs(tmp_path: Path) -> None:
    cells = [vary(SMALL, layers=1, rows=4, steps=1, seed=seed) for seed in range(3)]
    run: list[Cell] = []
    one = results_of(cells, tmp_path / "one", lambda *_: None)
    two = results_of(cells, tmp_path / "two", lambda *_: None, jobs=2, finished=run.append)
    assert two == one
    assert sorted(run, key=lambda cell: cell.seed) == cells
    for first in (tmp_path / "one" / "cells").iterdir():
        assert (tmp_path / "two" / "cells" / first.name).read_bytes() == first.read_bytes()


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_ends_a_cell_is_said_with_the_cell(tmp_path: Path, jobs: int) -> None:
    wrong = vary(SMALL, layers=1, rows=4, steps=1, policy="nobody.knows:It")
    with pytest.raises(CellFailedError, match=r"nobody\.knows:It, chat: .*nobody"):
        results_of([wrong], tmp_path, lambda *_: None, jobs=jobs)


def test_stored_demand_is_what_is_run(tmp_path: Path, afore: dict[str, Any]) -> None:
    profile = read_profile(SMALL.profile)
    demand_of(demand_key(SMALL, profile), tmp_path)
    stored = demand_of(demand_key(SMALL, profile), tmp_path)
    assert to_bytes(run_cell(SMALL, demand=stored)) == to_bytes(afore)


def test_requests_that_come_one_by_one_are_all_answered() -> None:
    found = run_cell(vary(SMALL, arrivals="azure-conv", rows=4, layers=1, steps=4, workload="math"))
    assert found["targets"] == found["counters"]["targets"] == found["all_targets"] > 0
    assert found["tokens"] > 0
    assert 0 < found["itl_p50_ms"] <= found["itl_p95_ms"]
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p95_ms"]


def test_another_number_in_the_profile_is_another_cell() -> None:
    profile = read_profile(SMALL.profile)
    faster = with_overrides(profile, [("chip.gemm_efficiency", 0.5)])
    assert SMALL.key() == SMALL.key(profile) != SMALL.key(faster)
    same = vary(SMALL, overrides=(("chip.gemm_efficiency", profile.chip.gemm_efficiency.value),))
    assert same.content() == SMALL.content()
    words = replace(profile, about="in other words")
    assert SMALL.key(words) == SMALL.key()


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("chip.speed=3", "chip.speed"),
        ("name=3", "name"),
        ("chip.tflops", "chip.tflops"),
        ("chip.tflops=fast", "no number"),
        ("chip.tflops=-1", "chip.tflops"),
        ("chip.gemm_efficiency=0", "would ever end"),
    ],
)
def test_overrides_that_cannot_be_are_named(override: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        with_overrides(read_profile(SMALL.profile), [parse_override(override)])


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="46 MoE layers"):
        demand_key(vary(SMALL, layers=46), read_profile(SMALL.profile))


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 95) == 95.0
    assert percentile([7.0], 95) == 7.0
    assert percentile([], 95) == 0.0
    assert percentile([1.0, 2.0], 50) == 1.0
