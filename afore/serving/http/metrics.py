"""What /metrics shows: the names that dashboards of other servers know, with the prefix ``afore_``, in base units, few labels.

Requests count whatever door they came through; times are the engine's: from submission to the token's arrival there. Figures of the
planner come from the scheduler when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from afore.core.clock import Clock
from afore.serving.engine import Engine
from afore.serving.observer import Observer
from afore.serving.requests import Request

REASONS = ("stop", "length", "abort", "error")
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_BETWEEN_TOKENS_S = (
    100e-6,
    250e-6,
    500e-6,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.2,
    0.4,
    0.75,
    1.0,
    2.5,
    5.0,
)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_QUEUE_S = (50e-6, 100e-6, 500e-6, 0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class _Life:
    """Times of one request, in ns."""

    submitted_ns: int
    last_token_ns: int = 0
    scheduled: bool = False


class Metrics(Observer):
    """Counts what the engine's observer hears, in a registry of its own."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._clock = clock
        self._lives: dict[tuple[int, str], _Life] = {}
        registry = self._registry = CollectorRegistry()
        self._planner = _PlannerFigures()
        registry.register(self._planner)
        gauges = (
            (
                "afore_num_requests_running",
                "Requests that have a seat: reserving, in prefill or decoding.",
                "num_running",
            ),
            ("afore_num_requests_waiting", "Requests that wait for a seat.", "num_waiting"),
            ("afore_kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all of them.", "kv_usage"),
        )
        for name, what, attribute in gauges:
            gauge = Gauge(name, what, registry=registry)
            gauge.set_function(lambda attribute=attribute: float(getattr(engine, attribute)))  # type: ignore[misc]  # a default argument has no type of its own
        registry.register(_EngineCounts(engine))
        self._prompt_tokens = Counter("afore_prompt_tokens", "Prompt tokens of requests taken in.", registry=registry)
        self._generated = Counter("afore_generation_tokens", "Tokens generated.", registry=registry)
        self._success = Counter(
            "afore_request_success", "Requests that have ended, by reason.", ("finished_reason",), registry=registry
        )
        for reason in REASONS:
            self._success.labels(reason)
        self._first = Histogram(
            "afore_time_to_first_token_seconds", "Submission to first token.", buckets=_FIRST_TOKEN_S, registry=registry
        )
        self._between = Histogram(
            "afore_inter_token_latency_seconds", "Token to next token.", buckets=_BETWEEN_TOKENS_S, registry=registry
        )
        self._whole = Histogram(
            "afore_e2e_request_latency_seconds", "Submission to end.", buckets=_WHOLE_S, registry=registry
        )
        self._queue = Histogram(
            "afore_request_queue_time_seconds",
            "Submission to a seat with KV blocks.",
            buckets=_QUEUE_S,
            registry=registry,
        )

    # What the engine tells

    def submitted(self, request: Request) -> None:
        self._lives[request.client, request.name] = _Life(self._clock.now_ns())
        self._prompt_tokens.inc(len(request.prompt))

    def scheduled(self, request: Request) -> None:
        life = self._lives.get((request.client, request.name))
        if life is not None and not life.scheduled:
            life.scheduled = True
            self._queue.observe((self._clock.now_ns() - life.submitted_ns) / 1e9)

    def token(self, client: int, name: str, index: int) -> None:
        life = self._lives.get((client, name))
        if life is None:
            return
        now_ns = self._clock.now_ns()
        self._generated.inc()
        if index == 0:
            self._first.observe((now_ns - life.submitted_ns) / 1e9)
        else:
            self._between.observe((now_ns - life.last_token_ns) / 1e9)
        life.last_token_ns = now_ns

    def ended(self, client: int, name: str, reason: str) -> None:
        life = self._lives.pop((client, name), None)
        if life is not None:
            self._success.labels(reason).inc()
            self._whole.observe((self._clock.now_ns() - life.submitted_ns) / 1e9)

    # What a scraper asks

    def planner(self, stats: Mapping[str, Any]) -> None:
        """The scheduler's statistics, as it sent them last."""
        self._planner.stats = stats

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCounts(Collector):
    """The engine's own counts, read when somebody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        what = "How often a request gave its KV blocks to an older one and was prefilled again."
        yield CounterMetricFamily("afore_num_preemptions", what, value=self._engine.num_preemptions)
        what = "Attention workers whose record of their tokens' experts (--record_ids) a disk ended."
        yield CounterMetricFamily("afore_record_ids_failures", what, value=self._engine.ids_lost)


class _PlannerFigures(Collector):
    """The scheduler's statistics as metrics; none before it has sent some."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        if not self.stats:
            return
        migration, imbalance = self.stats["migration"], self.stats["imbalance"]
        counters = self.stats.get("counters", {})
        for name, what, value in (
            ("afore_expert_copies", "Expert copies made.", migration["copies"]),
            ("afore_targets", "Targets (layer, microbatch, step) planned.", counters.get("targets", 0)),
            ("afore_targets_with_copies", "Targets that came with copies.", migration["targets"]),
            (
                "afore_targets_exposed",
                "Targets in which a worker waited for a copy.",
                migration["exposed_targets"] or 0,
            ),
            ("afore_plan_refusals", "Plans that an FFN worker refused.", counters.get("refusals", 0)),
            ("afore_recorded_rows", "Rows that --record has taken.", counters.get("recorded", 0)),
            ("afore_record_failures", "Recordings that a disk ended.", counters.get("record_failed", 0)),
            ("afore_target_aborts", "Targets that were aborted.", counters.get("aborts", 0)),
        ):
            yield CounterMetricFamily(name, what, value=value)
        for kind, what in (("token", "token-expert pairs"), ("tile", "tiles")):
            family = GaugeMetricFamily(
                f"afore_{kind}_imbalance_ratio",
                f"Max over mean of FFN workers' {what}, mean over targets, on primaries and as planned.",
                labels=["when"],
            )
            for when in ("before", "after"):
                if imbalance[kind][when] is not None:
                    family.add_metric([when], imbalance[kind][when])
            yield family
