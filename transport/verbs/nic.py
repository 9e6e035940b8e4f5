"""The opened device of one endpoint: what it registers, the queue pairs that it makes and connects."""

from __future__ import annotations

import errno
import secrets

from afore.core.errors import PeerLost
from afore.transport.host import host_error
from afore.transport.verbs.binding import (
    LOCAL_WRITE,
    MTU_BYTES,
    REMOTE_READ,
    REMOTE_WRITE,
    Binding,
    Memory,
    PathOptions,
    QueuePair,
    QueueShape,
)
from afore.transport.verbs.choice import PathChoice, agree_mtu, choose_mtu
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.memory import LocalMemory, register
from afore.transport.verbs.table import gid_text
from afore.transport.verbs.wire import NUMBER_LIMIT, EndpointRecord

_REMOTE = REMOTE_WRITE | REMOTE_READ


class Nic:
    """One device, port and address, opened. ``close`` it last."""

    def __init__(self, binding: Binding, path: PathChoice, config: VerbsConfig) -> None:
        """Raises ``HostError``."""
        self._path = path
        self._config = config
        self._inline_bytes = config.inline_bytes
        try:
            self.device = binding.open(path.device)
        except OSError as error:
            remedy = "let this user open /dev/infiniband/uverbs*, and see that the driver's user part (rdma-core) is installed"
            raise host_error(
                error, path.device, f"cannot open the device with {binding.name} ({error})", remedy
            ) from error
        self._open = True
        try:
            self._lid = self.device.lid(path.port)
            self._mtu, mtu_reason = choose_mtu(self.device.active_mtu(path.port), config.mtu_bytes)
        except OSError as error:
            self.close()
            raise host_error(error, path.device, f"cannot ask port {path.port}", "see the kernel's log") from error
        self.reasons = (f"binding {binding.name} {binding.version}", *path.reasons, mtu_reason)
        """What is used, and why."""

    def register(self, address: int, nbytes: int, what: str) -> Memory:
        """Memory for peers to write and read. Raises ``HostError``."""
        return register(self.device, address, nbytes, LOCAL_WRITE | _REMOTE, what)

    def queue_pair(
        self, *, sends: int, receives: int, receive_bytes: int, small_bytes: int, credits: int
    ) -> tuple[LocalMemory, QueuePair, EndpointRecord]:
        """A queue pair with posted receives in the first bytes of memory of its own, and what the peer has to know of it.

        Raises ``HostError``.
        """
        small = LocalMemory(self.device, small_bytes, "a link")
        try:
            pair = self._make(sends, receives)
            try:
                pair.prepare_receives(small.address, receive_bytes, receives, small.lkey)
            except BaseException:
                pair.close()
                raise
        except OSError as error:
            small.close()
            problem = f"cannot make a queue pair of {sends} sends and {receives} receives ({error})"
            raise host_error(error, self._path.device, problem, "lower verbs.credits or verbs.send_depth") from error
        except BaseException:
            small.close()
            raise
        record = EndpointRecord(
            number=pair.number,
            first_packet=secrets.randbelow(NUMBER_LIMIT),
            lid=self._lid,
            mtu=self._mtu,
            infiniband=self._path.infiniband,
            credits=credits,
            gid=self._path.gid.gid,
        )
        return small, pair, record

    def _make(self, sends: int, receives: int) -> QueuePair:
        """Asks for less inline room as long as the device refuses."""
        while True:
            shape = QueueShape(sends=sends, receives=receives, inline_bytes=self._inline_bytes)
            try:
                return self.device.queue_pair(self._path.port, shape, _REMOTE)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOMEM) or not self._inline_bytes:
                    raise
                self._inline_bytes //= 2

    def connect(self, pair: QueuePair, peer: str, ours: EndpointRecord, theirs: EndpointRecord) -> str:
        """Connects ``pair``; returns the MTU of this link, and why. Raises ``PeerLost`` where the two cannot reach each other."""
        if ours.infiniband != theirs.infiniband:
            layers = {True: "InfiniBand", False: "Ethernet"}
            raise PeerLost(
                peer,
                f"its port is {layers[theirs.infiniband]}, this side's {layers[ours.infiniband]}",
                "name devices of one network on both sides (verbs.device)",
            )
        mtu, reason = agree_mtu(ours.mtu, theirs.mtu)
        config = self._config
        options = PathOptions(
            port=self._path.port,
            gid_index=self._path.gid.index,
            mtu=mtu,
            own_first_packet=ours.first_packet,
            peer_number=theirs.number,
            peer_first_packet=theirs.first_packet,
            peer_gid=theirs.gid,
            peer_lid=theirs.lid,
            ack_timeout=config.ack_timeout_code,
            retry_count=config.retry_count,
            rnr_retry_count=config.rnr_retry_count,
            rnr_timer=config.rnr_timer_code,
            reads_in_flight=config.reads_in_flight,
        )
        try:
            pair.connect(options)
        except OSError as error:
            raise PeerLost(
                peer,
                f"no path from {self._path.gid} to {gid_text(theirs.gid)} with MTU {MTU_BYTES[mtu]} ({error})",
                "choose addresses that reach each other (verbs.gid_index on both sides)",
            ) from error
        return reason

    def close(self) -> None:
        """Closes the device. Idempotent."""
        if self._open:
            self._open = False
            self.device.close()
