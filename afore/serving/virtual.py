"""The whole runtime in virtual time: the same roles through the same ``run_role``, over emulated models and devices.

    config = RunConfig(topology=Topology(ffn=8, microbatches=3))
    run = run_emulated(config, [Ask(prompt=(1, 2, 3), max_new_tokens=16), Ask(prompt=(4, 5), max_new_tokens=8)])
    assert run.tokens[0] == emulated_tokens(Emulation().spec, (1, 2, 3), 16, seed=config.seed)

Nothing waits, nothing is approximate: time is an integer of nanoseconds, and two runs of the same configuration leave the same
``EventLog``, byte for byte, in any process. ``seed`` of ``run_emulated`` picks another legal order of simultaneous events.
A script that wants more than requests (kill a role, look while it runs) uses ``running_virtual`` inside ``run_virtual``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afore.core import control
from afore.core.clock import Clock, LoopClock
from afore.core.config import RunConfig
from afore.core.dilated_loop import run_dilated
from afore.core.errors import ConfigError
from afore.core.topology import ATTENTION, PREFILL
from afore.core.trace import Tracer
from afore.models.config import ModelSpec
from afore.models.counted import NEXT_GATE_ACCURACY, DemandSource
from afore.models.emulated import RoutingProfile, emulated_spec
from afore.scheduler.policies.registry import check_policy
from afore.serving.client import Client
from afore.serving.door import request_limits
from afore.serving.event_log import EventLog
from afore.serving.inproc import running_members
from afore.testing import run_virtual
from afore.transport.api import Fabric
from afore.transport.entry_once import Decoders
from afore.transport.loopback import LoopbackFaults, LoopbackNetwork
from afore.transport.session import RoleContext
from afore.workers.compute import Compute
from afore.workers.device.cores import Cores
from afore.workers.device.ports import EmulatedFleet, Jitter
from afore.workers.device.profile import LAPTOP_EMULATED, CostProfile
from afore.workers.emulated_models import ColocatedCompute, EmulatedCompute, EmulatedModels
from afore.workers.ffn_emulated import EmulatedFfn
from afore.workers.group.counted import GatheredOnce
from afore.workers.tagged import TaggedStore, TagReport

MOST_RECORDS = 1 << 40
"""A log that dropped records could not be compared: the tracers of a virtual world keep all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What a virtual world is made of, beside the run's own configuration."""

    spec: ModelSpec = field(default_factory=emulated_spec)
    """The model; its tokens are ``emulated_tokens(spec, prompt, n, seed=config.seed)``."""
    routing: RoutingProfile = field(default_factory=RoutingProfile)
    """How skewed its routing is."""
    demand: DemandSource | None = None
    """What routes in a model of counts (``afore.models.counted``); none: the checked model of ``routing``. With it, ``spec`` is a
    ``counted_spec``, tokens say nothing, and stores are not checked."""
    next_gate_accuracy: float = NEXT_GATE_ACCURACY
    """Of a model of counts: part of the assignments that the next layer's gate gives right on a layer's hidden states, 0 to 1."""
    profile: CostProfile = LAPTOP_EMULATED
    """What work costs."""
    profiles: Mapping[str, CostProfile] = field(default_factory=dict)
    """What it costs elsewhere: by member (``ffn-3``) or by role (``prefill``)."""
    colocated: bool = False
    """Attention workers run on the devices of FFN workers, in turn with their experts: serving without disaggregation."""
    cores: int | None = None
    """Cores that all workers share, as processes of one machine do; none: each has a device of its own."""
    collectives: bool = True
    """FFN workers gather and reduce together, as between machines; without, each goes on by itself, as on one host."""
    latency_us: float = 2.0
    """Of every write and message."""
    data_latency_us: float | None = None
    """Of writes on data lanes, which carry rows; none: the same."""
    bandwidth_gbps: float | None = None
    """Of every link, in Gbit/s; none for no limit. With one, logs of different processes may differ by a few nanoseconds: their
    first messages carry process ids, which take more or fewer bytes."""
    faults: LoopbackFaults | None = None
    """Bad weather between roles."""
    jitter: Jitter | None = None
    """Random delays of the FFN devices."""
    weather: int = 0
    """Seed of faults and jitter. The model's seed is the configuration's."""
    record: bool = True
    """Keep the event log; without it a run is a fifth faster."""
    make_tracer: Callable[[str, Clock], Tracer] | None = None
    """Tracers of a caller's own, by member name; none: the world's log, or nothing."""
    free_prefill: bool = False
    """Prompts cost nothing until ``EmulatedWorld.prefill_is_free`` is set to False: a run can begin with its batch full."""

    def profile_of(self, role: str, rank: int) -> CostProfile:
        """What work costs on a member."""
        return self.profiles.get(f"{role}-{rank}", self.profiles.get(role, self.profile))


class EmulatedWorld(EmulatedModels):
    """Made-up models, virtual time, emulated devices: a ``World``. ``stores`` are the FFN workers' tags, for a check in the end."""

    def __init__(self, config: RunConfig, emulation: Emulation, fleet: EmulatedFleet, log: EventLog) -> None:
        super().__init__(
            emulation.spec,
            profile=emulation.profile,
            seed=config.seed,
            routing=emulation.routing,
            demand=emulation.demand,
            next_gate_accuracy=emulation.next_gate_accuracy,
        )
        self.stores: list[TaggedStore] = []
        self.prefill_is_free = emulation.free_prefill
        self._ffn: dict[int, EmulatedFfn] = {}
        self._gathered_once = GatheredOnce()
        self._cores = None if emulation.cores is None else Cores(emulation.cores)
        self.decoders = Decoders()
        """Of all FFN workers."""
        self._emulation = emulation
        self._fleet = fleet
        self._log = log

    def compute(self, ctx: RoleContext) -> Compute:
        """Charges the member's profile, on a device of its own or on that of an FFN worker."""
        if self._emulation.colocated and ctx.role == ATTENTION:
            topology = ctx.config.topology
            return ColocatedCompute(self._ffn[ctx.rank * topology.ffn // topology.attention].device, ctx.tracer)
        profile = self._emulation.profile_of(ctx.role, ctx.rank)
        free = (lambda: self.prefill_is_free) if ctx.role == PREFILL else None
        return EmulatedCompute(ctx.clock, ctx.tracer, profile, free, self._cores)

    def ffn(self, ctx: RoleContext) -> EmulatedFfn:
        """A device of the fleet, over tags."""
        profile = self._emulation.profile_of(ctx.role, ctx.rank)
        parts = self._ffn[ctx.rank] = EmulatedFfn(
            self._fleet,
            ctx.rank,
            profile,
            self.stores,
            collectives=self._emulation.collectives,
            counted_experts=0 if self._emulation.demand is None else self._emulation.spec.num_experts,
            once=self._gathered_once,
            decoders=self.decoders,
            own_collectives=ctx.config.device.collectives == "own-stream",
            cores=self._cores,
        )
        return parts

    def text(self, config: RunConfig) -> None:
        """The model speaks no language: prompts are token ids."""

    def tracer(self, name: str, clock: Clock, config: RunConfig) -> Tracer:
        """Records into the world's log; a role that ends leaves all it has recorded."""
        if self._emulation.make_tracer is not None:
            return self._emulation.make_tracer(name, clock)
        return Tracer(name, clock, None, MOST_RECORDS, listener=self._log.take if self._emulation.record else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a scripted run."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    at_us: float = 0.0
    """When it is submitted, from the moment the cluster serves."""
    leaves_after: int | None = None
    """Tokens after which its client loses interest; none reads to the end."""


class VirtualCluster:
    """A running virtual cluster. Made by ``running_virtual``."""

    def __init__(
        self,
        client: Client,
        tasks: Mapping[str, asyncio.Task[None]],
        network: LoopbackNetwork,
        world: EmulatedWorld,
        log: EventLog,
    ) -> None:
        self.client = client
        self.tasks = tasks
        """Every role's task, by member name."""
        self.network = network
        self.world = world
        self.log = log
        """What has happened; a role's records come when they are flushed, at the latest when it ends."""
        self._asked = 0

    async def ask(self, ask: Ask) -> list[int]:
        """The request's tokens, recorded as they come. Raises ``RequestError``, ``RoleLost``."""
        number = self._asked
        self._asked += 1
        tokens: list[int] = []
        if ask.leaves_after == 0:
            return tokens
        stream = self.client.submit(ask.prompt, max_new_tokens=ask.max_new_tokens)
        async with contextlib.aclosing(stream):
            async for at_ns, event in stream:
                if isinstance(event, control.TokenOut):
                    tokens.append(event.token)
                    self.log.instant("client", "token", at_ns, request=number, index=event.index, token=event.token)
                    if len(tokens) == ask.leaves_after:
                        break
        return tokens

    async def ask_all(self, asks: Sequence[Ask]) -> list[list[int]]:
        """All of them, each at its time; their tokens in the order of ``asks``."""
        clock = self.network.clock

        async def one(ask: Ask) -> list[int]:
            await clock.sleep_us(ask.at_us)
            return await self.ask(ask)

        return list(await asyncio.gather(*(one(ask) for ask in asks)))

    def kill(self, member: str) -> None:
        """The process of ``member`` dies at this moment."""
        self.network.kill(member)

    def check_stores(self) -> list[TagReport]:
        """What the FFN workers' stores have seen. Raises ``SlotError`` for a read that could give wrong tokens."""
        return [store.check() for store in self.world.stores]


@contextlib.asynccontextmanager
async def running_virtual(
    config: RunConfig,
    emulation: Emulation | None = None,
    *,
    make_fabric: Callable[[LoopbackNetwork, str], Fabric] | None = None,
) -> AsyncIterator[VirtualCluster]:
    """Runs every role as a task on the running (virtual-clock) loop; yields once all of them serve.

    ``make_fabric`` gives members endpoints of a test's own. Raises ``ConfigError`` for what cannot run, ``RoleLost`` when a role
    does not come up, and the defect that ended a role.
    """
    emulation = emulation or Emulation()
    if config.topology.fabric == "shm":
        raise ConfigError("topology.fabric", "shm is for processes", "use loopback or auto in virtual time")
    if emulation.cores is not None and (emulation.colocated or config.device.collectives == "own-stream"):
        raise ConfigError(
            "cores", "streams beside the model stream, and colocated devices, do not share them", "leave one out"
        )
    check_policy(config.policy)
    request_limits(config, emulation.spec)
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop)
    network = LoopbackNetwork(
        clock,
        emulation.latency_us,
        emulation.bandwidth_gbps,
        seed=emulation.weather,
        faults=emulation.faults,
        data_latency_us=emulation.data_latency_us,
    )
    fleet = EmulatedFleet(clock, loop, seed=emulation.weather, jitter=emulation.jitter)
    log = EventLog()
    world = EmulatedWorld(config, emulation, fleet, log)
    async with running_members(config, clock, network, world, make_fabric=make_fabric) as (client, tasks):
        yield VirtualCluster(client, tasks, network, world, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """What a scripted run has left."""

    tokens: list[list[int]]
    """Of each request, in the order they were given."""
    stats: dict[str, Any]
    """The scheduler's statistics at the end: ``imbalance``, ``migration``, ``layers``, ``counters``."""
    log: EventLog
    elapsed_ns: int
    """Virtual time from the moment the cluster served to the last request's end."""
    stores: list[TagReport]
    """What the FFN workers' stores have seen."""


def run_emulated(
    config: RunConfig,
    asks: Sequence[Ask],
    emulation: Emulation | None = None,
    *,
    seed: int | None = None,
    dilation: float | None = None,
) -> EmulatedRun:
    """Serves ``asks`` in virtual time and checks every store's tags.

    ``seed``: none for first in, first out; a number for a random legal order of simultaneous events. ``dilation``: on the wall's
    clock instead, so many times slower (``afore.core.dilated_loop``). Raises as ``running_virtual``, ``DeadlockError`` and the like
    where something hangs, ``SlotError`` where weights were used in a way that could be wrong.
    """

    async def main() -> EmulatedRun:
        async with running_virtual(config, emulation) as cluster:
            clock = cluster.network.clock
            began_ns = clock.now_ns()
            tokens = await cluster.ask_all(asks)
            elapsed_ns = clock.now_ns() - began_ns
            stats = await cluster.client.stats()
        return EmulatedRun(
            tokens=tokens, stats=stats, log=cluster.log, elapsed_ns=elapsed_ns, stores=cluster.check_stores()
        )

    return run_virtual(main, seed=seed) if dilation is None else run_dilated(main, dilation)
