"""How FFN workers find the one that they come together at: it tells the others its host and port, one-sided, for each epoch.

Each worker registers a small region; worker 0 writes the address into all of them and rings. So a group of torch.distributed needs
no address in the configuration, and its store is one of this epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

from afore.core.errors import WireError
from afore.core.topology import FFN, is_loopback, member_name, split_address
from afore.transport.api import Fabric, Link, Region, RegionKey
from afore.transport.nodes import Nodes

MEETING = "meeting"
"""Label of the region."""
MEETING_NBYTES = 256
_LENGTH = 4
HERE = "127.0.0.1"


class Meeting:
    """One worker's side. ``others``: on worker 0 the links and regions of all others; empty elsewhere."""

    def __init__(
        self, region: Region, host: str, others: Sequence[tuple[Link, RegionKey]], *, timeout_us: float
    ) -> None:
        self._region = region
        self.host = host
        """Where worker 0 listens."""
        self._others = others
        self._timeout_us = timeout_us

    async def meet(self, port: int | None) -> tuple[str, int]:
        """See ``collective.Meet``. Raises ``TransportError``."""
        if port is not None:
            said = f"{self.host}:{port}".encode() if ":" not in self.host else f"[{self.host}]:{port}".encode()
            packed = len(said).to_bytes(_LENGTH, "little") + said
            for link, key in self._others:
                await link.write(key, 0, packed, notify=1, timeout_us=self._timeout_us)
            return self.host, port
        await self._region.notified(timeout_us=self._timeout_us)
        buffer = self._region.buffer
        length = int.from_bytes(buffer[:_LENGTH], "little")
        if not 0 < length <= MEETING_NBYTES - _LENGTH:
            raise WireError(member_name(FFN, 0), f"told an address of {length} bytes")
        said = bytes(buffer[_LENGTH : _LENGTH + length])
        return split_address(said.decode(errors="replace"), field="device.group")


def host_of(fabric: Fabric, nodes: Nodes, size: int) -> str:
    """Where the other FFN workers reach this process: on its own machine by loopback, else by the fabric's own address.

    Raises ``WireError`` where that has no host.
    """
    if len({nodes.of(FFN, rank) for rank in range(size)}) == 1:
        return HERE
    for part in fabric.address.split(";"):
        address = part.rpartition("=")[2]
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if colon and port.isdecimal() and host and not is_loopback(host):
            return host
    raise WireError(
        member_name(FFN, 0), f"no other machine reaches {fabric.address[:80]!r}", "give topology.listen on its machine"
    )
