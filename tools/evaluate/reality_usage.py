"""CPU that each process of a running cluster takes for a target while its batch is full, and what it leaves to others."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from afore.core.topology import ATTENTION, DOOR, FFN, SCHEDULER

FIRST_TOKENS = 8
"""Of every request, before it is looked at the first time: the batch is full from then on."""
LAST_TOKENS = 2
"""Before the first request has all of its tokens, it is looked at again."""
LEAST_SHARE = 0.1
"""Of a machine that has hardly any time: with less, predictions say nothing."""
_ROLES = (ATTENTION, DOOR, FFN, SCHEDULER)


class Usage:
    """Hears of every token of a run of ``requests`` requests of ``tokens`` each, and looks twice."""

    def __init__(self, requests: int, tokens: int) -> None:
        self._seen = [0] * requests
        self._tokens = tokens
        self._first: _Look | None = None
        self._last: _Look | None = None

    def token(self, request: int) -> None:
        """The request has one more."""
        self._seen[request] += 1
        if self._first is None and min(self._seen) >= FIRST_TOKENS:
            self._first = _look(sum(self._seen))
        if self._last is None and max(self._seen) >= self._tokens - LAST_TOKENS:
            self._last = _look(sum(self._seen))

    def cpu_us(self, layers: int, microbatches: int) -> dict[str, float]:
        """By role, of each of its processes, a target; empty where the batch was not full between two looks.

        The kernel counts in hundredths of a second, so that a long run says more.
        """
        first, last = self._first, self._last
        if first is None or last is None or last.tokens <= first.tokens:
            return {}
        steps = (last.tokens - first.tokens) / len(self._seen)
        by_role: dict[str, list[float]] = defaultdict(list)
        for member, cpu_s in last.cpu_s.items():
            us = (cpu_s - first.cpu_s.get(member, cpu_s)) * 1e6 / (steps * layers * microbatches)
            by_role[member.rpartition("-")[0]].append(us)
        return {role: sum(each) / len(each) for role, each in by_role.items()}

    def share(self) -> float:
        """Part of the time of the cores that this process may use that nothing else used meanwhile; 1 where that is not known."""
        first, last = self._first, self._last
        if first is None or last is None or last.time_s <= first.time_s:
            return 1.0
        own_s = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
        others_s = max(0.0, last.busy_s - first.busy_s - own_s)
        return max(LEAST_SHARE, 1.0 - others_s / (last.time_s - first.time_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    tokens: int
    cpu_s: Mapping[str, float]
    """Of each member so far."""
    busy_s: float
    """Of the cores that this process may use, whoever used them."""
    time_s: float
    """Of all of them together."""


def _look(tokens: int) -> _Look:
    times = psutil.cpu_times(percpu=True)
    mine = [times[core] for core in os.sched_getaffinity(0) if core < len(times)]
    all_s = sum(sum(one) - getattr(one, "guest", 0.0) - getattr(one, "guest_nice", 0.0) for one in mine)
    idle_s = sum(one.idle + getattr(one, "iowait", 0.0) for one in mine)
    return _Look(tokens=tokens, cpu_s=_cpu_s(), busy_s=all_s - idle_s, time_s=all_s)


def _cpu_s() -> dict[str, float]:
    """Of each member so far. What this process does to read tokens counts as the door's, which does it for other clients."""
    found: dict[str, float] = defaultdict(float)
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            name, times = process.name(), process.cpu_times()
            if process.pid == own.pid:
                found[f"{DOOR}-0"] += times.user + times.system
            elif name.rpartition("-")[0] in _ROLES:
                found[name] += times.user + times.system
    return dict(found)
