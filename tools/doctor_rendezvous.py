"""``doctor --peer`` at a door's rendezvous: what cluster it is, and whether its hub lets this machine in."""

from __future__ import annotations

from afore.core.errors import ClusterLost, ConfigError, PeerLost
from afore.core.topology import split_address
from afore.serving.endpoints import host_id
from afore.serving.identity import ClusterIdentity
from afore.serving.rendezvous import Store
from afore.serving.spec import HUB_ADDRESS
from afore.tools.doctor_meeting import STEP_US
from afore.tools.doctor_steps import Steps, find_route, try_connect, try_hello
from afore.transport.handshake import Identity
from afore.transport.routed_names import RoutedAddress, is_routed
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp_config import LOOPBACK_SECRET


async def check_rendezvous(steps: Steps, address: str, secret: bytes | None) -> None:
    """The steps after the connection, where it led to something that is no endpoint. Raises ``Ended`` at the one that fails."""
    identity = await _identity(steps, address, secret)
    if is_routed(identity.hub):
        far = RoutedAddress.parse(identity.hub).far
        if "tcp" not in far:
            ways = ", ".join(far) or "shm"
            raise steps.fail(
                "hub", f"its hub is reached over {ways} only", "give the door a topology.fabric with tcp (auto)"
            )
        hub = far["tcp"]
        own = find_route(steps, hub, name="hub route")
        sock = await try_connect(steps, hub, name="hub connect", mend="the door's firewall must pass its ports")
        try:
            me = Identity(address=f"{own}:0", secret=secret or LOOPBACK_SECRET)
            with steps.step("hello"):
                await try_hello(steps, sock, me, hub)
        finally:
            sock.close()
        return
    await _near(steps, identity)


async def _identity(steps: Steps, address: str, secret: bytes | None) -> ClusterIdentity:
    host, port = split_address(address)
    mend = "this port is neither a doctor's nor a door's; see what listens there: ss -ltnp"
    with steps.step("rendezvous"):
        try:
            identity = await (await Store.connect(host, port)).identity(secret)
        except ConfigError as error:
            if error.field == "topology.secret_file":
                raise
            raise steps.fail("rendezvous", error.problem, mend) from error
        if identity is None:
            raise PeerLost(address, "a cluster that is starting: it has not said what it is", "try again in a moment")
    counts = ", ".join(f"{count} {role}" for role, count in identity.counts.items())
    proved = ", proved with the secret" if secret is not None else ""
    steps.ok(
        "rendezvous",
        f"cluster {identity.cluster!r}, wire version {identity.wire}, door's pid {identity.door_pid}, {counts}{proved}",
    )
    return identity


async def _near(steps: Steps, identity: ClusterIdentity) -> None:
    """The hub of a cluster that is on one machine alone."""
    if identity.host != host_id():
        raise steps.fail(
            "hub",
            "the cluster is on another machine and talks over shared memory",
            "start its door with topology.nodes or topology.fabric tcp, so that other machines can take part",
        )
    with steps.step("hub", "its door is gone: start it again"):
        try:
            fabric = ShmFabric.open(ShmConfig(run_id=identity.cluster).run_directory, "doctor")
        except ConfigError as error:
            raise ClusterLost(identity.cluster, "it has ended") from error
        try:
            channel = await fabric.dial(HUB_ADDRESS, timeout_us=STEP_US)
            await channel.close()
        finally:
            await fabric.close()
    steps.ok("hub", "it took the connection over shared memory, and both sides know the run's secret")
