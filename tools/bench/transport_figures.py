"""What ``bench transport`` makes of times, as pure functions. Definitions are in ``FORMULAS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from afore.tools.bench.transport_pair import Nanoseconds, Pings, Stream

FORMULAS: Final[Mapping[str, str]] = {
    "one-way": "µs: message handed over in one process → its notification in the hands of the other's code",
    "round trip": "µs: message handed over → the notification of its answer, of the same size, in hands",
    "min, p50, p99, p99.9, max": "over all messages of all rounds; rounds: the smallest and the largest p50 of a round",
    "best p99.9 in, least CPU in": "rounds in which that way had the smallest of all",
    "CPU s/M": "user and system seconds of all processes of the pair per 1,000,000 messages delivered, answers counted",
    "messages/s": "messages that wait for no answer / (first handed over → last in hands); median of rounds",
    "GB/s": "10^9 bytes of their payload in a second",
    "× best peer": "p50 one-way / that of the best public peer in the same round; the median of rounds, smallest and largest",
}
"""Each figure's definition and unit, as printed below the tables."""
PERCENTS: Final = (50, 99, 99.9)
ROUND_BYTES: Final = 256 << 20
"""Payload of one measurement each way, at most; more only where ``LEAST`` messages are."""
LEAST: Final = 5
WARMUP: Final = 200


def count_of(nbytes: int, most: int, *, each_s: float = 0.0, seconds: float = 0.0) -> int:
    """Messages of one size in one measurement: ``most``, or what fits into ``ROUND_BYTES`` and ``seconds`` (0: any time)."""
    by_time = int(seconds / each_s) if seconds and each_s else most
    return min(most, max(LEAST, min(ROUND_BYTES // max(1, nbytes), by_time)))


def warmup_of(count: int) -> int:
    """Messages before, that are not counted."""
    return min(WARMUP, -(-count // 5))


def spread_us(rounds_ns: Sequence[Nanoseconds]) -> dict[str, Any]:
    """min, p50, p99, p99.9, max over all rounds, and each round's p50, in µs."""
    together = np.concatenate(rounds_ns)
    percentiles = np.percentile(together, PERCENTS)
    return {
        "n": len(together),
        "min_us": float(together.min()) / 1e3,
        **{f"p{percent:g}_us": float(value) / 1e3 for percent, value in zip(PERCENTS, percentiles, strict=True)},
        "max_us": float(together.max()) / 1e3,
        "rounds_p50_us": [float(np.median(one)) / 1e3 for one in rounds_ns],
    }


def cpu_s_per_million(cpu_s: float, operations: int) -> float:
    """CPU seconds of a million operations."""
    return cpu_s / operations * 1e6


def ping_figures(rounds: Sequence[Pings]) -> dict[str, Any]:
    """Latencies and CPU of the rounds of one way and size."""
    return {
        "one_way": spread_us([one.one_way_ns for one in rounds]),
        "round_trip": spread_us([one.round_trip_ns for one in rounds]),
        "cpu_s_per_million": cpu_s_per_million(sum(one.cpu_s for one in rounds), sum(one.operations for one in rounds)),
    }


def stream_figures(rounds: Sequence[Stream], nbytes: int) -> dict[str, Any]:
    """Rate and CPU of the rounds of one way and size."""
    rates = [one.count / one.wall_s for one in rounds]
    return {
        "n": sum(one.count for one in rounds),
        "messages_per_second": median(rates),
        "gb_per_second": median(rates) * nbytes / 1e9,
        "rounds_messages_per_second": rates,
        "cpu_s_per_million": cpu_s_per_million(sum(one.cpu_s for one in rounds), sum(one.count for one in rounds)),
    }


def against_peers(
    rounds_p50_us: Mapping[str, Sequence[float]], peers: Sequence[str], compared: Sequence[str]
) -> dict[str, dict[str, float | str]]:
    """For each way that is none of ``peers``: its p50 / that of the best of ``compared``, round by round. Empty without one."""
    there = [peer for peer in compared if rounds_p50_us.get(peer)]
    if not there:
        return {}
    best = min(there, key=lambda peer: median(rounds_p50_us[peer]))
    found: dict[str, dict[str, float | str]] = {}
    for way, own in rounds_p50_us.items():
        if way in peers:
            continue
        ratios = [mine / min(rounds_p50_us[peer][number] for peer in there) for number, mine in enumerate(own)]
        found[way] = {"median": median(ratios), "min": min(ratios), "max": max(ratios), "best": best}
    return found


def wins(rounds: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """In how many rounds each has the smallest value."""
    number = min((len(values) for values in rounds.values()), default=0)
    found = dict.fromkeys(rounds, 0)
    for one in range(number):
        found[min(rounds, key=lambda name: rounds[name][one])] += 1
    return found


def crowd_figures(ways: Mapping[str, Sequence[Sequence[Pings]]]) -> dict[str, Any]:
    """Of each way, with the pairs of each round: latencies and CPU, and in how many rounds it was the best."""
    tails: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    figures: dict[str, Any] = {}
    for name, rounds in ways.items():
        one_way = [np.concatenate([one.one_way_ns for one in pairs]) for pairs in rounds]
        round_trip = [np.concatenate([one.round_trip_ns for one in pairs]) for pairs in rounds]
        tails[name] = [float(np.percentile(one, 99.9)) / 1e3 for one in one_way]
        cpu[name] = [
            cpu_s_per_million(sum(one.cpu_s for one in pairs), sum(one.operations for one in pairs)) for pairs in rounds
        ]
        figures[name] = {
            "one_way": spread_us(one_way),
            "round_trip": spread_us(round_trip),
            "rounds_p99.9_us": tails[name],
            "cpu_s_per_million": float(np.median(cpu[name])),
            "rounds_cpu_s_per_million": cpu[name],
        }
    for name, count in wins(tails).items():
        figures[name]["best_tail_rounds"] = count
    for name, count in wins(cpu).items():
        figures[name]["least_cpu_rounds"] = count
    return figures
