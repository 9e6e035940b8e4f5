"""One process with roles of a cluster, started from a shell: finds the cluster at the rendezvous, takes ranks, says how far it is.

The door opens the rendezvous and every other process waits for it there, so they may be started in any order. Before the cluster
serves, a role that ends frees its rank for another one; afterwards its loss ends the cluster, as everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from afore.core import control
from afore.core.clock import Clock, WallClock, deadline
from afore.core.config import RunConfig
from afore.core.control import WIRE_VERSION
from afore.core.environment import SECRET
from afore.core.errors import (
    ClusterLate,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    RoleLost,
    TransportError,
)
from afore.core.topology import DOOR, FFN, ROLES, SCHEDULER, is_loopback, member_name
from afore.serving import rendezvous
from afore.serving.checks import check, check_shared_memory, describe_kernels, describe_memory
from afore.serving.client import DOOR_GONE, HUB, Client
from afore.serving.endpoints import Whereabouts, host_id, hub_address
from afore.serving.http.listen import check_listen
from afore.serving.identity import ClusterIdentity, flat, model_digest, read_secret
from afore.serving.ranks import Claim, claiming
from afore.serving.ready import StatusLine, print_address, waiting_for
from afore.serving.roles import RealWorld, run_role
from afore.serving.spec import HUB_ADDRESS
from afore.transport.api import Fabric
from afore.transport.crew import crew
from afore.transport.shm_segments import start_ticks

LOOK_AGAIN_US = 50_000.0
"""How soon a process looks again for a hub that is about to listen."""
WORD_S = 1.0
"""How long after the end of a role the hub's word on why may come."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A role of this process and the rank it has."""

    role: str
    claim: Claim
    me: str
    """How it stands in its rank's cell: unique, also among the roles of this process."""

    @property
    def name(self) -> str:
        """``ffn-1``."""
        return member_name(self.role, self.claim.rank)


def run_by_hand(
    roles: Sequence[str],
    rank: int | None,
    *,
    cluster: str | None,
    config: RunConfig,
    given: Collection[str],
    secret: str | None,
    log_level: str,
    line: StatusLine,
) -> int:
    """Runs ``roles`` until the cluster ends. ``given`` are the dotted keys of ``config`` that were given, not defaults;
    ``secret`` is what the environment gives; ``line`` is where to say what is awaited.

    Returns 0 after an orderly end. Raises the ``AforeError`` that refused or ended it.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    name = "+".join(roles)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])  # what ps, top and debuggers show
    logging.basicConfig(level=log_level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s", force=True)
    with contextlib.suppress(asyncio.CancelledError):
        # Before the loop: meanwhile nothing else could be done, and Ctrl-C works as it does anywhere.
        _compile(roles, config.policy, line)
        uvloop.run(_Process(roles, rank, cluster, config, given, secret, line).run())
    return 0


class _Process:
    """What happens, in order, to one process."""

    def __init__(
        self,
        roles: Sequence[str],
        rank: int | None,
        cluster: str | None,
        config: RunConfig,
        given: Collection[str],
        secret: str | None,
        line: StatusLine,
    ) -> None:
        self._roles = roles
        self._rank = rank
        self._config = config
        self._given = given
        self._line = line
        self._clock: Clock = WallClock()
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._host, self._port, self._cluster = rendezvous.place(config.topology, cluster)
        self._secret = read_secret(config.topology.secret_file, secret)
        self._check_reach()
        self._here = Whereabouts(config, (self._host, self._port), self._secret)
        self._me = f"{host_id()}/{os.getpid()}/{start_ticks(os.getpid())}/{secrets.token_hex(8)}"
        self._opened = False
        """Whether this process is the door of a cluster that others can find."""
        self._give_up_ns = self._clock.now_ns() + int(config.times.join_s * 1e9)

    def _check_reach(self) -> None:
        if self._secret is None and not is_loopback(self._host):
            raise ConfigError(
                "topology.rendezvous",
                f"{self._host} lies beyond this machine, and there is no secret",
                f"use 127.0.0.1, or give topology.secret_file or {SECRET}",
            )

    async def run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        signalled = False

        def stop() -> None:
            # Once: a second Ctrl-C must not break off the clean-up that the first one began.
            nonlocal signalled
            if not signalled:
                signalled = True
                task.cancel()

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop)
        try:
            await self._until_it_ends()
        except asyncio.CancelledError:
            if signalled and self._opened:
                self._line.over("the cluster ended", self._console)
            raise

    async def _until_it_ends(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            door = await self._open(stack) if DOOR in self._roles else None
            store, identity = await rendezvous.find(
                self._host,
                self._port,
                self._secret,
                self._clock,
                join_s=self._config.times.join_s,
                waiting=self._line.say if door is None else _nothing,
            )
            self._check(identity)
            try:
                await self._serve(store, identity, door)
            except PeerLost as error:
                if isinstance(error, RoleLost) or error.peer != HUB:
                    raise
                # A channel breaks before anybody has said why: the hub lives in the door.
                reason = "it ended, or does not serve any more"
                raise RoleLost(member_name(DOOR, 0), reason, "see its shell; start the topology again") from error

    async def _open(self, stack: contextlib.AsyncExitStack) -> Fabric:
        """The door's part: looks at everything first, then opens the rendezvous."""
        config = self._config
        self._line.say("looking at model and machine")
        check(config)
        check_shared_memory(config)
        check_listen(config.serve)
        self._here.check()
        host = await rendezvous.Host.listen(self._host, self._port)
        stack.callback(host.close)
        cluster = self._cluster or rendezvous.name_at(self._port)
        fabric = self._here.open_door(cluster)
        stack.push_async_callback(fabric.close)
        identity = ClusterIdentity(
            cluster=cluster,
            wire=WIRE_VERSION,
            nonce=secrets.token_hex(8),
            host=host_id(),
            node=self._here.door_node or "",
            hub=hub_address(fabric),
            door_pid=os.getpid(),
            counts={role: config.topology.count(role) for role in ROLES},
            config=flat(config),
            model=model_digest(config),
        )
        host.publish(identity, self._secret)
        self._opened = True
        for text in (*describe_memory(config), describe_kernels(config)):
            self._line.over(text, self._console)
        self._line.over(f"rendezvous at {host.where}, cluster {cluster}, {config.topology.describe()}", self._console)
        return fabric

    def _check(self, identity: ClusterIdentity) -> None:
        """Refuses a cluster that is not the one meant, or that this process cannot reach. Raises ``ConfigError``."""
        where = rendezvous.shown(self._host, self._port)
        if self._cluster not in (None, identity.cluster):
            raise ConfigError(
                "cluster",
                f"the cluster at {where} is {identity.cluster!r}, not {self._cluster!r}",
                "give its name, or the --rendezvous of the one that is meant",
            )
        if identity.host != host_id() and not identity.node:
            raise ConfigError(
                "topology.fabric",
                f"the cluster at {where} runs on another machine, and its door takes members of its own alone",
                "start this role on that machine, or the door with topology.rendezvous_remote",
            )
        identity.check_joining(self._config, self._given, where)

    async def _serve(self, store: rendezvous.Store, identity: ClusterIdentity, door: Fabric | None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            taken: list[Taken] = []
            for number, role in enumerate(self._roles):
                if role != DOOR:
                    me = f"{self._me}/{number}"
                    machine = claiming(role, identity.counts[role], self._rank, me, _lives)
                    taken.append(Taken(role, await store.claim(role, identity.nonce, machine), me))
                    stack.push_async_callback(self._release, store, identity, taken[-1])
            watch = self._here.join(identity, None, beside=self._roles[0])
            stack.push_async_callback(watch.close)
            group = await stack.enter_async_context(crew())
            hub = HUB_ADDRESS
            roles = [] if door is None else [group.create_task(self._role(DOOR, 0, door, hub, None), name=DOOR)]
            hub = identity.hub
            client = await stack.enter_async_context(self._hub(watch, hub))
            await self._room_for(client, taken)
            for member in taken:
                rank = member.claim.rank
                fabric = self._here.join(identity, (member.role, rank))
                roles.append(group.create_task(self._role(member.role, rank, fabric, hub, client), name=member.name))
            names = [member.name for member in taken] + ([] if door is None else [member_name(DOOR, 0)])
            telling = group.create_task(self._tell(client, identity, names), name="status")
            await asyncio.wait(roles)
            telling.cancel()
            lost = await self._last_word(client)
            if lost not in ("", DOOR_GONE):
                raise RoleLost(*lost.split(": ", 1))
            self._line.over("the cluster ended", self._console)

    @contextlib.asynccontextmanager
    async def _hub(self, fabric: Fabric, address: str) -> AsyncIterator[Client]:
        """A client of the hub, as soon as it listens, once it has said who is in."""
        left_us = self._left_us()
        async with contextlib.AsyncExitStack() as stack:
            async with deadline(left_us, peer="hub", operation="looking for it", hint="see the door's shell"):
                while True:
                    try:
                        connecting = Client.connect(fabric, address, self._clock, timeout_us=left_us)
                        client = await stack.enter_async_context(connecting)
                        break
                    except PeerLost:
                        await self._clock.sleep_us(LOOK_AGAIN_US)
                await client.known()
            yield client

    async def _room_for(self, client: Client, taken: Sequence[Taken]) -> None:
        """Returns once the hub has seen those leave whose ranks were taken over."""
        names = {member.name for member in taken}
        async with deadline(
            self._config.times.control_s * 1e6,
            peer="hub",
            operation=f"waiting for {', '.join(names)} to be free there",
            hint="a process that this one cannot see has that rank",
        ):
            while not names <= set((status := client.status).absent) and not status.lost:
                await client.status_after(status)
        self._raise_if_lost(client.status)

    async def _role(self, role: str, rank: int, fabric: Fabric, hub: str, client: Client | None) -> None:
        try:
            await run_role(
                role,
                rank,
                fabric=fabric,
                hub_address=hub,
                clock=self._clock,
                config=self._config,
                world=RealWorld(),
                replaceable=True,
            )
        except TransportError as error:
            # A link breaks before the hub has said whose end broke it.
            lost = "" if client is None else await self._last_word(client)
            if lost:
                raise RoleLost(*lost.split(": ", 1)) from error
            raise

    async def _tell(self, client: Client, identity: ClusterIdentity, names: Sequence[str]) -> None:
        """Says who is missing until the cluster serves, then that this process is ready; raises ``RoleLost`` when one is lost."""
        status = client.status
        try:
            async with deadline(self._left_us(), peer=identity.cluster, operation="starting"):
                while not status.serving:
                    self._raise_if_lost(status)
                    self._line.say(waiting_for(identity.counts, status))
                    status = await client.status_after(status)
        except DeadlineExceeded:
            raise ClusterLate(
                identity.cluster,
                f"it does not serve after {self._config.times.join_s:g} s; {waiting_for(identity.counts, status)}",
                "start what is missing, sooner or with a longer times.join_s",
            ) from None
        for name in names:
            where = rendezvous.shown(self._host, self._port)
            self._line.over(
                f"{name} is ready (pid {os.getpid()}), cluster {identity.cluster} at {where}", self._console
            )
        if DOOR in self._roles:
            print_address(status.url, self._config, self._console)
        while True:
            status = await client.status_after(status)
            self._raise_if_lost(status)

    def _raise_if_lost(self, status: control.Status) -> None:
        # That the door is gone is told by its last word, or by the lack of it.
        if status.lost not in ("", DOOR_GONE):
            raise RoleLost(*status.lost.split(": ", 1))

    async def _last_word(self, client: Client) -> str:
        """Who was lost, as the hub says, where it says so in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_S):
                while not (status := client.status).lost:
                    await client.status_after(status)
        return client.status.lost

    async def _release(self, store: rendezvous.Store, identity: ClusterIdentity, member: Taken) -> None:
        with contextlib.suppress(PeerLost, ConfigError):
            await store.release(member.role, identity.nonce, member.claim, member.me)

    def _left_us(self) -> float:
        """What is left of ``times.join_s``."""
        return max(1e3, (self._give_up_ns - self._clock.now_ns()) / 1e3)


def _compile(roles: Sequence[str], policy: str, line: StatusLine) -> None:
    """Has the kernels of these roles before they join: a role that compiled while it serves would stand still for a minute."""
    if SCHEDULER in roles or FFN in roles:
        line.say("loading kernels (the first start compiles them: about a minute)")
    if SCHEDULER in roles:
        from afore.scheduler.policies.registry import policy_kernels

        for compile_group in policy_kernels(policy):
            compile_group()
    if FFN in roles:
        from afore.workers.kernels import compile_kernels

        compile_kernels()


def _nothing(_: str) -> None:
    """The door does not wait for itself."""


def _lives(holder: str) -> bool:
    """Whether the process that holds a rank is alive. One of another machine, or one that we cannot read, counts as alive."""
    try:
        host, pid, ticks, _, _ = holder.split("/")
        return host != host_id() or str(start_ticks(int(pid))) == ticks
    except ValueError:
        return True
