"""What of a target's way no line through kernels' times explains, the host's part, and costs of a virtual worker that has it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.topology import ATTENTION, DOOR, FFN, SCHEDULER
from afore.tools.calibrate.fit import ALONE, Fit
from afore.tools.calibrate.spans import Recorded
from afore.tools.evaluate.reality_ways import Way
from afore.workers.device.base import Work
from afore.workers.device.profile import CostProfile

_SHUFFLED = 7
"""Seed of the order in which recorded targets' host parts are met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What one target took beyond its kernels' lines, in µs. Residuals may be negative, wholes not."""

    attention_A: Mapping[int, float]
    gate: float
    gather_N: Mapping[int, float]
    reply_N: Mapping[int, float]
    turn: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host's parts of the targets that were fitted on; a target of a virtual run meets one of them, whole."""

    parts: tuple[HostPart, ...]
    plan_us: float
    """Mean; what a plan, and kernels, took more or less is in ``gather_N``."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """By role, in µs a target and process: CPU that nobody on the target's way waits for. Only where cores are shared."""

    def part(self, target: Target, layers: int, microbatches: int) -> HostPart:
        """That of a virtual target: each is met as often as any other."""
        number = (target.step * microbatches + target.microbatch) * layers + target.layer
        return self.parts[number % len(self.parts)]

    def means(self) -> dict[str, float]:
        """For a report."""
        return {
            "attention": statistics.mean(us for one in self.parts for us in one.attention_A.values()),
            "gate": statistics.mean(one.gate for one in self.parts),
            "plan": self.plan_us,
            "gather": statistics.mean(us for one in self.parts for us in one.gather_N.values()),
            "reply": statistics.mean(us for one in self.parts for us in one.reply_N.values()),
            "turn": statistics.mean(one.turn for one in self.parts),
        }


def host_of(found: Sequence[Way], recorded: Recorded, costs: CostProfile, fits: Mapping[str, Fit]) -> Host:
    """The host's parts of ``found``: what ``costs`` and the line of experts do not say. ``recorded`` counts tiles."""
    tiles = {(one.target, one.rank): one.size for one in recorded.samples["experts"]}
    known = [way for way in found if all((way.target, rank) in tiles for rank in way.kernels_N)]
    if not known:
        raise ConfigError("reality", "no target that can be fitted on was planned in the run's spans", "run it again")
    plan_us = statistics.mean(way.plan for way in known)
    experts = fits["experts"].line

    def kernels_us(way: Way, rank: int) -> float:
        host_us = sum(
            costs.work_ns(Work(name, way.target, tokens=way.tokens)) for name in ("gather", "partition", "reduce")
        )
        return host_us / 1e3 + experts.at(tiles[way.target, rank])

    def attention_us(way: Way, rank: int) -> float:
        return costs.work_ns(Work("attention", way.target, tokens=way.rows_A[rank])) / 1e3

    turn = _mean_turn(known)
    parts = [
        HostPart(
            attention_A={rank: us - attention_us(way, rank) for rank, us in way.attention_A.items()},
            gate=way.gate,
            gather_N={
                rank: us + way.plan - plan_us + way.kernels_N[rank] - kernels_us(way, rank)
                for rank, us in way.gather_N.items()
            },
            reply_N=way.reply_N,
            turn=turn if way.turn is None else way.turn,
        )
        for way in known
    ]  # fmt: skip
    random.Random(_SHUFFLED).shuffle(parts)
    return Host(parts=tuple(parts), plan_us=plan_us)


def _mean_turn(found: Sequence[Way]) -> float:
    """What the last layer is taken to have, too."""
    turns = [way.turn for way in found if way.turn is not None]
    return statistics.mean(turns) if turns else 0.0


def host_alone(found: Sequence[Way], cpu_us: Mapping[str, float]) -> Host:
    """The host's parts as they are where nobody waits for a core, and what processes compute beside.

    The shortest tenth waited for none. ``cpu_us``: of each role's process, a target; what is not on the way, is beside it.
    """

    def tenth(values: Iterable[float]) -> float:
        ordered = sorted(values)
        return max(0.0, ordered[int(ALONE * (len(ordered) - 1))])

    gate, plan = tenth(one.gate for one in found), tenth(one.plan for one in found)
    gather = tenth(us for one in found for us in one.gather_N.values())
    reply = tenth(us for one in found for us in one.reply_N.values())
    turns = [one.turn for one in found if one.turn is not None]
    attention = statistics.mean(us for one in found for us in one.attention_A.values())
    kernels = statistics.mean(us for one in found for us in one.kernels_N.values())
    on_way = {ATTENTION: attention + gate, SCHEDULER: plan, FFN: gather + kernels + reply}
    return Host(
        parts=(
            HostPart(
                attention_A={0: 0.0}, gate=gate, gather_N={0: gather}, reply_N={0: reply}, turn=tenth(turns or [0.0])
            ),
        ),
        plan_us=plan,
        beside={role: max(0.0, us - on_way.get(role, 0.0)) for role, us in cpu_us.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedCosts(CostProfile):
    """Costs of one worker's kernels, and the host's part of each target beside them."""

    host: Host
    rank: int
    layers: int
    microbatches: int

    def __post_init__(self) -> None:
        """The costs were checked when they were made."""

    def work_ns(self, work: Work) -> int:
        kernel_ns = CostProfile.work_ns(self, work)
        if work.target is None:
            return kernel_ns
        part = self.host.part(work.target, self.layers, self.microbatches)
        match work.span:
            case "attention":
                host_us = _of(part.attention_A, self.rank)
            case "gate":
                host_us = part.gate
            case "gather":
                host_us = _of(part.gather_N, self.rank)
            case "reduce":
                host_us = _of(part.reply_N, self.rank)
            case "combine":
                host_us = part.turn
            case _:
                return kernel_ns
        return max(0, kernel_ns + round(host_us * 1e3))

    def beside_ns(self, work: Work) -> tuple[int, ...]:
        """The scheduler and the door have no device: their work begins with that of the first attention worker."""
        beside = self.host.beside
        match work.span:
            case "gate" if beside:
                roles = [ATTENTION] + [SCHEDULER] * (self.rank == 0)
            case "combine" if beside and self.rank == 0:
                roles = [DOOR]
            case "reduce" if beside:
                roles = [FFN]
            case _:
                return ()
        return tuple(round(beside.get(role, 0.0) * 1e3) for role in roles)


def hosted(costs: CostProfile, host: Host, *, rank: int, layers: int, microbatches: int) -> HostedCosts:
    """``costs`` with the host's part, which has the gate. Lines have in them what memory takes: positions and experts' weights."""
    plain = replace(costs, attention_context_ns=0.0, expert_us=0.0, gate_us=0.0)
    values = {name: getattr(plain, name) for name in CostProfile.__dataclass_fields__}
    return HostedCosts(**values, host=host, rank=rank, layers=layers, microbatches=microbatches)


def _of(parts: Mapping[int, float], rank: int) -> float:
    """A worker that the fitted run did not have meets what another one did."""
    return parts[rank] if rank in parts else parts[sorted(parts)[rank % len(parts)]]
