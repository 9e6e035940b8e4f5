"""Each metric, by its value."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from afore.core.control import Sampling
from afore.core.topology import Topology
from afore.serving.batching import Batcher
from afore.serving.engine import Engine
from afore.serving.http.metrics import Metrics
from afore.serving.requests import Request
from tests.serving.http.served import SMALL, Served, metric, serving

SECOND_NS = 10**9


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ns = 5 * SECOND_NS

    def now_ns(self) -> int:
        return self.ns

    async def sleep_us(self, duration_us: float) -> None:
        raise AssertionError("nobody sleeps here")

    def wait(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


class Figures:
    """What metrics read of an engine."""

    num_running = 3
    num_waiting = 2
    kv_usage = 0.25
    num_preemptions = 5
    ids_lost = 1


def request(name: str, prompt: int = 4) -> Request:
    return Request(
        number=0, client=7, name=name, prompt=(1,) * prompt, max_new_tokens=9, ignore_eos=False, sampling=Sampling()
    )


def test_counts_and_times_of_two_requests() -> None:
    clock = Hand()
    metrics = Metrics(cast(Engine, Figures()), clock)
    first, second = request("a", prompt=4), request("b", prompt=6)
    metrics.submitted(first)
    clock.wait(0.003)
    metrics.scheduled(first)
    metrics.submitted(second)
    clock.wait(0.097)
    metrics.scheduled(first)  # again, after a preemption: its time in the line is counted once
    metrics.token(7, "a", 0)
    clock.wait(0.02)
    metrics.token(7, "a", 1)
    clock.wait(0.03)
    metrics.token(7, "a", 2)
    metrics.ended(7, "a", "length")
    clock.wait(1.0)
    metrics.ended(7, "b", "abort")
    metrics.token(7, "b", 0)  # comes too late to count
    metrics.ended(7, "b", "abort")
    text = metrics.text().decode()
    assert metric(text, "afore_num_requests_running") == 3
    assert metric(text, "afore_num_requests_waiting") == 2
    assert metric(text, "afore_kv_cache_usage_perc") == 0.25
    assert metric(text, "afore_num_preemptions_total") == 5
    assert metric(text, "afore_record_ids_failures_total") == 1
    assert metric(text, "afore_prompt_tokens_total") == 10
    assert metric(text, "afore_generation_tokens_total") == 3
    ended = {
        r: metric(text, f'afore_request_success_total{{finished_reason="{r}"}}') for r in ("stop", "length", "abort")
    }
    assert ended == {"stop": 0, "length": 1, "abort": 1}
    for name, count, total in (
        ("afore_request_queue_time_seconds", 1, 0.003),
        ("afore_time_to_first_token_seconds", 1, 0.1),
        ("afore_inter_token_latency_seconds", 2, 0.05),
        ("afore_e2e_request_latency_seconds", 2, 0.15 + 1.147),
    ):
        assert metric(text, f"{name}_count") == count
        assert metric(text, f"{name}_sum") == pytest.approx(total)
    assert metric(text, 'afore_inter_token_latency_seconds_bucket{le="0.025"}') == 1
    assert metric(text, 'afore_inter_token_latency_seconds_bucket{le="0.05"}') == 2


def test_the_planners_figures_are_those_it_sent() -> None:
    metrics = Metrics(cast(Engine, Figures()), Hand())
    assert "afore_expert_copies" not in metrics.text().decode()
    stats: dict[str, Any] = {
        "migration": {"copies": 12, "targets": 9, "exposed_targets": None},
        "imbalance": {"token": {"before": 1.5, "after": 1.25}, "tile": {"before": None, "after": None}},
        "counters": {"targets": 40, "refusals": 1, "recorded": 9, "aborts": 2},
    }
    metrics.planner(stats)
    text = metrics.text().decode()
    values = {
        "afore_expert_copies_total": 12,
        "afore_targets_total": 40,
        "afore_targets_with_copies_total": 9,
        "afore_targets_exposed_total": 0,
        "afore_plan_refusals_total": 1,
        "afore_recorded_rows_total": 9,
        "afore_record_failures_total": 0,
        "afore_target_aborts_total": 2,
        'afore_token_imbalance_ratio{when="before"}': 1.5,
        'afore_token_imbalance_ratio{when="after"}': 1.25,
    }
    assert {name: metric(text, name) for name in values} == values
    assert "afore_tile_imbalance_ratio{" not in text, "what was not measured is not zero"


def test_blocks_are_counted_from_their_grant_to_their_release() -> None:
    from afore.core import control

    batcher = Batcher(Topology(attention=1), max_tokens_per_worker=2, kv_blocks=4, block_tokens=2, eos_ids=frozenset())
    batcher.submit(0, control.Submit("a", "", (1, 2), 3, False, Sampling()))
    assert batcher.blocks_held == 2
    batcher.cancel(0, "a")
    assert batcher.blocks_held == 0


@pytest.mark.slow
def test_a_cluster_counts_what_it_served() -> None:
    with serving(SMALL) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "n": 2}
        text = served.generate("Hello there", max_new_tokens=8)[1]
        for more in ({}, {"stream": True}):
            assert http.post("/v1/completions", json={**body, **more}).status_code == 200
        stopped = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0, "stop": text[:3]}
        assert http.post("/v1/completions", json=stopped).json()["choices"][0]["finish_reason"] == "stop"
        hello = http.post("/tokenize", json={"prompt": "Hello there"}).json()["count"]
        http.post("/v1/completions", json={"prompt": "x", "n": -1})
        text = http.get("/metrics").text
        assert metric(text, 'afore_request_success_total{finished_reason="stop"}') == 1
        assert metric(text, 'afore_request_success_total{finished_reason="length"}') == 5, "every door counts"
        assert metric(text, "afore_prompt_tokens_total") == 4 * 3 + 2 * hello
        assert metric(text, "afore_time_to_first_token_seconds_count") == 6
        assert metric(text, "afore_request_queue_time_seconds_count") == 6
        assert metric(text, "afore_e2e_request_latency_seconds_count") == 6
        generated = metric(text, "afore_generation_tokens_total")
        assert metric(text, "afore_inter_token_latency_seconds_count") == generated - 6
        assert metric(text, "afore_kv_cache_usage_perc") == 0
        assert metric(text, "afore_num_requests_running") == 0
        stats = served.run(served.cluster.stats)
        assert metric(text, "afore_targets_total") == stats["counters"]["targets"]
        assert metric(text, "afore_expert_copies_total") == stats["migration"]["copies"]


@pytest.mark.slow
def test_scraping_under_load(served: Served, http: httpx.Client) -> None:
    body = {"prompt": "Hello", "max_tokens": 15, "ignore_eos": True, "stream": True}
    before = metric(http.get("/metrics").text, "afore_generation_tokens_total")
    with http.stream("POST", "/v1/completions", json=body) as stream:
        seen = []
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                seen.append(metric(httpx.get(f"{served.url}/metrics").text, "afore_generation_tokens_total"))
    assert seen == sorted(seen)
    assert metric(http.get("/metrics").text, "afore_generation_tokens_total") == before + 15
