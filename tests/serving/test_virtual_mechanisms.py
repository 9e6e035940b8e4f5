"""Mechanisms beyond the paper in the whole runtime: they change when things are done, never a token."""

from __future__ import annotations

import dataclasses

import pytest

from afore.core.config import BatchOptions, CostOptions, DeviceOptions, RunConfig
from afore.core.policy_options import AforeAheadOptions, AforePlusOptions, PolicyOptions
from afore.core.topology import Topology
from afore.serving.virtual import EmulatedRun, run_emulated
from afore.workers.device.ports import Jitter
from tests.serving.virtual_cases import EMULATION, FFN_BOUND, QUIET, SMALL, asks, prescribed

LONG = asks(9, 40)
ROOMY = dataclasses.replace(
    SMALL, batch=BatchOptions(max_num_seqs=12, block_tokens=4, kv_blocks=120), costs=CostOptions(tile_us=30, copy_us=1)
)
DEAR = dataclasses.replace(FFN_BOUND, name="dear", experts_us=600.0)
"""A target costs much, whatever is in it: the fewer of them, the better."""
SLOW_ATTENTION = dataclasses.replace(FFN_BOUND, name="slow-attention", attention_us=5.0, attention_token_us=80.0)
"""Two microbatches hide attention and experts better than one."""
WEATHER = Jitter(compute_us=60.0, copy_us=400.0)


def microbatches_at_the_end(run: EmulatedRun) -> set[int]:
    """Of the last targets before requests began to end."""
    entries = [entry.target for entry in run.log.records("entry") if entry.args["kind"] == "PLAN"]
    return {target.microbatch for target in entries[len(entries) // 2 : len(entries) * 3 // 4] if target is not None}


def fewer(least: int) -> RunConfig:
    return dataclasses.replace(ROOMY, batch=dataclasses.replace(ROOMY.batch, least_microbatches=least))


@pytest.mark.slow
def test_where_each_target_is_dear_fewer_microbatches_run_and_all_is_faster() -> None:
    emulation = dataclasses.replace(EMULATION, profile=DEAR)
    given, found = (run_emulated(config, LONG, emulation) for config in (ROOMY, fewer(1)))
    assert given.tokens == found.tokens == prescribed(LONG)
    assert microbatches_at_the_end(given) == {0, 1, 2}
    assert microbatches_at_the_end(found) == {0}
    assert found.elapsed_ns < 0.8 * given.elapsed_ns
    bounded = run_emulated(fewer(2), LONG, emulation)
    assert bounded.tokens == found.tokens
    assert microbatches_at_the_end(bounded) == {0, 1}


@pytest.mark.slow
def test_microbatches_that_came_together_part_and_experts_wait_less() -> None:
    """A step's end takes an attention worker longer than experts take for a target; without parting, three ends come at once."""
    asked = asks(12, 60)
    profile = dataclasses.replace(FFN_BOUND, sample_us=300.0)
    emulation = dataclasses.replace(EMULATION, profile=profile)
    apart, together = (
        run_emulated(
            dataclasses.replace(ROOMY, batch=dataclasses.replace(ROOMY.batch, spread=spread)), asked, emulation
        )
        for spread in (True, False)
    )
    assert apart.tokens == together.tokens == prescribed(asked)
    assert apart.elapsed_ns < 0.95 * together.elapsed_ns


@pytest.mark.slow
def test_one_microbatch_is_not_kept_where_two_hide_more() -> None:
    emulation = dataclasses.replace(EMULATION, profile=SLOW_ATTENTION)
    run = run_emulated(
        dataclasses.replace(fewer(1), topology=dataclasses.replace(ROOMY.topology, microbatches=2)), LONG, emulation
    )
    assert run.tokens == prescribed(LONG)
    assert microbatches_at_the_end(run) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("afore-plus", PolicyOptions(afore_plus=AforePlusOptions(protected_plans=0))),
        ("afore-ahead", PolicyOptions(afore_ahead=AforeAheadOptions(window_copies=1e9, protected_plans=0))),
        ("afore-ahead", PolicyOptions(afore_ahead=AforeAheadOptions(window_copies=1e9))),
    ],
)
def test_slots_that_targets_in_flight_use_are_rebound_behind_them(
    policy: str, options: PolicyOptions, seed: int
) -> None:
    """One slot a worker, three microbatches, slow copies: nothing protects a slot but the migrator's rules, and every read is
    checked."""
    config = dataclasses.replace(
        fewer(seed % 3),
        policy=policy,
        policy_options=options,
        topology=Topology(attention=2, ffn=3, microbatches=3, redundant_slots=1),
        device=DeviceOptions(collectives="own-stream" if seed % 2 else "model-stream"),
    )
    requests = asks(9, 12)
    run = run_emulated(config, requests, dataclasses.replace(QUIET, jitter=WEATHER), seed=seed)
    assert run.tokens == prescribed(requests)
    assert sum(report.writes for report in run.stores) > 10
    assert sum(report.replica_reads for report in run.stores) > 10
    if policy == "afore-ahead":
        assert run.stats["counters"]["copies_ahead"] > 5
