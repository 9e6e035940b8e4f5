"""What spans of a real run say of each target's way, a chain of moments without gaps, so that its parts add up to the whole:

attention    from the first worker's beginning to the end of each: those that were woken later begin later
gate         until the scheduler, free for it, begins with the plan: gate, counting, writing, waking up
plan         the scheduler's
gather       until a worker, free for it, begins to compute: publishing, waking up, verdict, inputs, its thread's turn
kernels      until its last one ends, without waits for copies
reply        until its reply is written
turn         beyond the target: from the last reply (or from other attention) until the next layer's attention begins
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.tools.trace_files import open_directory

_Span = tuple[float, float]
"""From, to; in µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One target's, in µs."""

    target: Target
    tokens: int
    """Of all attention workers."""
    attention_A: Mapping[int, float]
    """Of each attention worker that had rows: to its end."""
    rows_A: Mapping[int, int]
    gate: float
    plan: float
    gather_N: Mapping[int, float]
    kernels_N: Mapping[int, float]
    reply_N: Mapping[int, float]
    turn: float | None
    """None: the step ended."""
    took: float
    """From the first attention's beginning to the last reply."""


def ways(directory: Path) -> list[Way]:
    """Every target of a run's spans that went all the way. Raises ``ConfigError`` where none did."""
    attention: dict[Target, dict[int, tuple[_Span, int]]] = defaultdict(dict)
    plans: dict[Target, _Span] = {}
    ffn: dict[int, dict[Target, dict[str, _Span]]] = defaultdict(lambda: defaultdict(dict))
    for file in open_directory(directory)[0]:
        role, rank = file.header.role, file.header.rank
        for _, span in file.records():
            target = span.target
            if target is None or span.kind != "span":
                continue
            times = (span.start_ns / 1e3, span.end_ns / 1e3)
            if role == ATTENTION and span.name == "attention":
                attention[target][rank] = (times, int(span.args.get("tokens", 0)))
            elif role == SCHEDULER and span.name == "plan":
                plans[target] = times
            elif role == FFN:
                ffn[rank][target][span.name] = times
    before = {
        rank: _through_before(
            (target, spans["gather"][0], spans["reply"][1]) for target, spans in of.items() if _whole(spans)
        )
        for rank, of in ffn.items()
    }
    planned = _through_before((target, *times) for target, times in plans.items())
    turns = _turns(attention, ffn)
    whole = [
        target for target in attention if target in plans and all(_whole(of.get(target, {})) for of in ffn.values())
    ]
    if not whole or not ffn:
        raise ConfigError(str(directory), "no target went all its way", "record a run of all roles with --trace")
    found = []
    for target in sorted(whole, key=lambda one: (one.step, one.layer, one.microbatch)):
        on_workers = {rank: (of[target], before[rank][target]) for rank, of in ffn.items()}
        plan = (plans[target], planned[target])
        found.append(_way(target, attention[target], plan, on_workers, turns.get(target)))
    return found


def _whole(spans: Mapping[str, _Span]) -> bool:
    return all(name in spans for name in ("gather", "wait", "reduce", "reply"))


def _through_before(worked: Iterable[tuple[Target, float, float]]) -> dict[Target, float]:
    """When one that works on target after target (began, ended) was through with the one before each."""
    found, through = {}, 0.0
    for target, _, ended in sorted(worked, key=lambda one: one[1]):
        found[target], through = through, ended
    return found


def _turns(
    attention: Mapping[Target, Mapping[int, tuple[_Span, int]]], ffn: Mapping[int, Mapping[Target, Mapping[str, _Span]]]
) -> dict[Target, float]:
    """Of each target with a next layer."""
    found, busy = {}, 0.0
    for target, workers in sorted(attention.items(), key=lambda one: min(start for (start, _), _ in one[1].values())):
        began = min(start for (start, _), _ in workers.values())
        if target.layer:
            last = replace(target, layer=target.layer - 1)
            replies = [of[last]["reply"][1] for of in ffn.values() if "reply" in of.get(last, ())]
            if replies:
                found[last] = max(0.0, began - max(*replies, busy))
        busy = max(end for (_, end), _ in workers.values())
    return found


def _way(
    target: Target,
    attention: Mapping[int, tuple[_Span, int]],
    plan: tuple[_Span, float],
    ffn: Mapping[int, tuple[Mapping[str, _Span], float]],
    turn: float | None,
) -> Way:
    began, (planned, before_plan) = min(start for (start, _), _ in attention.values()), plan
    return Way(
        target=target,
        tokens=sum(tokens for _, tokens in attention.values()),
        attention_A={rank: end - began for rank, ((_, end), _) in attention.items()},
        rows_A={rank: tokens for rank, (_, tokens) in attention.items()},
        gate=planned[0] - max(before_plan, *(end for (_, end), _ in attention.values())),
        plan=planned[1] - planned[0],
        gather_N={rank: of["gather"][0] - max(planned[1], before) for rank, (of, before) in ffn.items()},
        kernels_N={
            rank: of["reduce"][1] - of["gather"][0] - (of["wait"][1] - of["wait"][0]) for rank, (of, _) in ffn.items()
        },
        reply_N={rank: of["reply"][1] - of["reduce"][1] for rank, (of, _) in ffn.items()},
        turn=turn,
        took=max(of["reply"][1] for of, _ in ffn.values()) - began,
    )
