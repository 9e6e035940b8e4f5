"""ibverbs (PyPI; loads libibverbs.so.1) as a ``Binding``. Young: the extra pins it. Its errors are ``OSError`` already."""

from __future__ import annotations

import errno
import os
from typing import Any

import ibverbs as ib

from afore.transport.verbs.binding import (
    MTU_BYTES,
    RECEIVE,
    Completion,
    Memory,
    OpenDevice,
    PathOptions,
    QueuePair,
    QueueShape,
)


class _IbverbsQueuePair:
    def __init__(self, context: Any, domain: Any, port: int, shape: QueueShape, access: int) -> None:
        self._made: list[Any] = []
        try:
            self._channel = context.create_comp_channel()
            self._made.append(self._channel)
            self.fd = int(self._channel.fd)
            os.set_blocking(self.fd, False)
            self._queue = context.create_cq(shape.sends + shape.receives, self._channel)
            self._made.append(self._queue)
            wanted = ib.QPInitAttr(
                send_cq=self._queue,
                recv_cq=self._queue,
                qp_type=ib.QPType.RC,
                max_send_wr=shape.sends,
                max_recv_wr=shape.receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=shape.inline_bytes,
            )
            self._pair = domain.create_qp(wanted)
            self._made.append(self._pair)
            self._pair.to_init(port, access)
            self.number = int(self._pair.qp_num)
            self.inline_bytes = int(self._pair.query()[1].max_inline_data)
        except BaseException:
            self.close()
            raise
        self._request = ib.SendWR()
        self._receives: list[Any] = []
        self._post_send = self._pair.post_send
        self._post_receive = self._pair.post_recv

    def connect(self, path: PathOptions) -> None:
        peer = ib.QPInfo(
            qp_num=path.peer_number,
            psn=path.peer_first_packet,
            lid=path.peer_lid,
            gid=path.peer_gid,
            port=path.port,
            mtu=path.mtu,
        )
        self._pair.to_rtr(
            peer,
            sgid_index=path.gid_index,
            mtu=path.mtu,
            hop_limit=64,
            min_rnr_timer=path.rnr_timer,
            max_dest_rd_atomic=path.reads_in_flight,
        )
        self._pair.to_rts(
            path.own_first_packet,
            timeout=path.ack_timeout,
            retry_cnt=path.retry_count,
            rnr_retry=path.rnr_retry_count,
            max_rd_atomic=path.reads_in_flight,
        )

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
        request = self._request
        request.opcode = opcode
        request.wr_id = number
        request.send_flags = flags
        request.sg_list = [ib.SGE(address, nbytes, lkey)]
        request.remote_addr = remote_address
        request.rkey = rkey
        request.imm_data = immediate
        self._post_send(request)

    def prepare_receives(self, address: int, nbytes: int, count: int, lkey: int) -> None:
        self._receives = [
            ib.RecvWR(wr_id=RECEIVE + place, sg_list=[ib.SGE(address + place * nbytes, nbytes, lkey)])
            for place in range(count)
        ]
        self._post_receive(self._receives)

    def post_receive(self, place: int) -> None:
        self._post_receive(self._receives[place])

    def poll(self, most: int) -> list[Completion]:
        return [(one.wr_id, one.status, one.opcode, one.imm_data) for one in self._queue.poll(most)]

    def take_event(self) -> None:
        self._channel.get_cq_event()
        self._queue.ack_events(1)

    def arm(self) -> None:
        self._queue.req_notify()

    def close(self) -> None:
        made, self._made = self._made, []
        for thing in reversed(made):
            thing.close()


class _IbverbsDevice:
    def __init__(self, name: str) -> None:
        found = [device for device in ib.get_device_list() if device.name == name]
        if not found:
            raise OSError(errno.ENODEV, f"libibverbs knows no device {name}")
        self._context = found[0].open()
        self._domain = self._context.alloc_pd()

    def active_mtu(self, port: int) -> int:
        mtu = int(self._context.query_port(port).active_mtu)
        assert mtu in MTU_BYTES
        return mtu

    def lid(self, port: int) -> int:
        return int(self._context.query_port(port).lid)

    def register(self, address: int, nbytes: int, access: int) -> Memory:
        memory: Memory = self._domain.reg_mr(address, nbytes, access)
        return memory

    def queue_pair(self, port: int, shape: QueueShape, access: int) -> QueuePair:
        return _IbverbsQueuePair(self._context, self._domain, port, shape, access)

    def close(self) -> None:
        self._domain.close()
        self._context.close()


class _Ibverbs:
    name = "ibverbs"
    version = str(ib.__version__)

    def open(self, device: str) -> OpenDevice:
        return _IbverbsDevice(device)


BINDING = _Ibverbs()
