"""pyverbs (rdma-core's own binding, Debian's 44 and newer) as a ``Binding``.

What has to be known of it: ``get_cq_event`` holds the GIL while it blocks, so the channel's descriptor is non-blocking and only
asked when it is readable; 44 does not tell that descriptor; ``SGE``, ``SendWR`` and ``RecvWR`` never free their C memory
unless closed, and making one costs more than posting it, so each queue pair keeps one request and rewrites it; immediates are in
network order.
"""

from __future__ import annotations

import errno
import importlib.metadata
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from afore.transport.verbs.binding import (
    RECEIVE,
    RECEIVED_IMMEDIATE,
    SEND,
    Completion,
    Memory,
    OpenDevice,
    PathOptions,
    QueuePair,
    QueueShape,
)

_RELIABLE_CONNECTION = 2
_QUERY_CAPACITY = 1 << 19
_EVENT_LINK = "anon_inode:[infinibandevent]"


@contextmanager
def _typed() -> Iterator[None]:
    """Turns pyverbs' errors into ``OSError``."""
    try:
        yield
    except PyverbsRDMAError as error:
        code = int(getattr(error, "error_code", 0) or 0)
        raise OSError(abs(code), str(error)) from error
    except PyverbsError as error:
        raise OSError(errno.ENODEV, str(error)) from error


def _event_fds() -> set[int]:
    """This process's completion channels (and async event queues), by descriptor."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name) == _EVENT_LINK:
                found.add(int(name))
        except OSError:
            pass
    return found


class _PyverbsQueuePair:
    def __init__(self, context: Any, domain: Any, port: int, shape: QueueShape, access: int) -> None:
        self._made: list[Any] = []
        try:
            self._make(context, domain, port, shape, access)
        except BaseException:
            self.close()
            raise

    def _make(self, context: Any, domain: Any, port: int, shape: QueueShape, access: int) -> None:
        before = _event_fds()
        self._channel = CompChannel(context)
        self._made.append(self._channel)
        fd = getattr(self._channel, "fd", None)
        self.fd = int(fd) if fd is not None else (_event_fds() - before).pop()
        os.set_blocking(self.fd, False)
        self._queue = CQ(context, shape.sends + shape.receives, None, self._channel, 0)
        self._made.append(self._queue)
        capacity = QPCap(
            max_send_wr=shape.sends,
            max_recv_wr=shape.receives,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=shape.inline_bytes,
        )
        self._pair = QP(
            domain,
            QPInitAttr(qp_type=_RELIABLE_CONNECTION, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0),
        )
        self._made.append(self._pair)
        attributes = QPAttr(port_num=port)
        attributes.qp_access_flags = access
        self._pair.to_init(attributes)
        self.number = int(self._pair.qp_num)
        self.inline_bytes = int(self._pair.query(_QUERY_CAPACITY)[1].cap.max_inline_data)
        # One request that every post rewrites: it points at this entry's own C memory, not at a copy.
        self._entry = SGE(0, 0, 0)
        self._request = SendWR(0, opcode=SEND, num_sge=1, sg=[self._entry])
        self._request.close()
        self._request.sg_list = self._entry
        self._receives: list[Any] = []
        self._post_send = self._pair.post_send
        self._post_receive = self._pair.post_recv

    def connect(self, path: PathOptions) -> None:
        attributes = QPAttr(port_num=path.port)
        attributes.path_mtu = path.mtu
        attributes.dest_qp_num = path.peer_number
        attributes.rq_psn = path.peer_first_packet
        attributes.max_dest_rd_atomic = path.reads_in_flight
        attributes.min_rnr_timer = path.rnr_timer
        gid = GID(ipaddress.IPv6Address(path.peer_gid).exploded)
        route = GlobalRoute(dgid=gid, sgid_index=path.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(is_global=1, port_num=path.port, gr=route, dlid=path.peer_lid)
        with _typed():
            self._pair.to_rtr(attributes)
            attributes.sq_psn = path.own_first_packet
            attributes.timeout = path.ack_timeout
            attributes.retry_cnt = path.retry_count
            attributes.rnr_retry = path.rnr_retry_count
            attributes.max_rd_atomic = path.reads_in_flight
            self._pair.to_rts(attributes)

    def post(
        self,
        opcode: int,
        number: int,
        flags: int,
        address: int,
        nbytes: int,
        lkey: int,
        remote_address: int = 0,
        rkey: int = 0,
        immediate: int = 0,
    ) -> None:
        entry, request = self._entry, self._request
        entry.addr = address
        entry.length = nbytes
        entry.lkey = lkey
        request.opcode = opcode
        request.wr_id = number
        request.send_flags = flags
        request.imm_data = socket.htonl(immediate)
        # The same bytes of the request mean something else for a SEND, which does not look at them.
        request.set_wr_rdma(rkey, remote_address)
        try:
            self._post_send(request)
        except PyverbsError as error:
            raise OSError(errno.ENOMEM, f"posting a request: {error}") from error

    def prepare_receives(self, address: int, nbytes: int, count: int, lkey: int) -> None:
        for place in range(count):
            entry = SGE(address + place * nbytes, nbytes, lkey)
            self._receives.append(RecvWR(RECEIVE + place, num_sge=1, sg=[entry]))
            entry.close()
        with _typed():
            for receive in self._receives:
                self._post_receive(receive)

    def post_receive(self, place: int) -> None:
        try:
            self._post_receive(self._receives[place])
        except PyverbsError as error:
            raise OSError(errno.ENOMEM, f"posting a receive: {error}") from error

    def poll(self, most: int) -> list[Completion]:
        count, found = self._queue.poll(most)
        if not count:
            return []
        return [
            (one.wr_id, one.status, one.opcode, socket.ntohl(one.imm_data) if one.opcode == RECEIVED_IMMEDIATE else 0)
            for one in found
        ]

    def take_event(self) -> None:
        with _typed():
            self._channel.get_cq_event(self._queue)
        self._queue.ack_events(1)

    def arm(self) -> None:
        self._queue.req_notify()

    def close(self) -> None:
        made, self._made = self._made, []
        for thing in reversed(made):
            thing.close()
        if len(made) == 3:
            self._entry.close()
            # The entry's pointer is null now; with it the request's own, so that no version of pyverbs frees it a second time.
            self._request.sg_list = self._entry
            for receive in self._receives:
                receive.close()
            self._receives.clear()


class _PyverbsDevice:
    def __init__(self, name: str) -> None:
        with _typed():
            self._context = Context(name=name)
            self._domain = PD(self._context)

    def active_mtu(self, port: int) -> int:
        with _typed():
            return int(self._context.query_port(port).active_mtu)

    def lid(self, port: int) -> int:
        with _typed():
            return int(self._context.query_port(port).lid)

    def register(self, address: int, nbytes: int, access: int) -> Memory:
        with _typed():
            memory: Memory = MR(self._domain, nbytes, access, address=address)
            return memory

    def queue_pair(self, port: int, shape: QueueShape, access: int) -> QueuePair:
        with _typed():
            return _PyverbsQueuePair(self._context, self._domain, port, shape, access)

    def close(self) -> None:
        self._domain.close()
        self._context.close()


class _Pyverbs:
    name = "pyverbs"

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version("pyverbs")
        except importlib.metadata.PackageNotFoundError:
            return "of the distribution"

    def open(self, device: str) -> OpenDevice:
        return _PyverbsDevice(device)


BINDING = _Pyverbs()
